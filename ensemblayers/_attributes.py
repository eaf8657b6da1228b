"""The attributes of a model's modules beside their tensors, children and hooks."""

import copy
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._module import copy_module

_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"_non_persistent_buffers_set"}
_CONTAINERS = (list, dict, set)


class Snapshot:
    """A model's attributes at one time, lists, dicts and sets as copies.

    Empty under torch.compile: it would break the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [] if torch.compiler.is_compiling() else list(model.modules())
        self._values = [tuple(vars(m).values()) for m in self._modules]
        self._old = [
            {k: copy.copy(v) if type(v) in _CONTAINERS else v for k, v in _attributes(m).items()}
            for m in self._modules
        ]
        self._containers = [
            [k for k, v in old.items() if type(v) in _CONTAINERS] for old in self._old
        ]

    def changed(self) -> bool:
        """Whether attributes, or their lists, dicts and sets, changed since."""
        every = zip(self._modules, self._values, self._containers, self._old, strict=True)
        for module, values, containers, old in every:
            own = vars(module)
            same = len(own) == len(values) and all(map(operator.is_, own.values(), values))
            if same:  # As in nearly all calls, and quick to see.
                if any(_differ(old[k], own[k]) for k in containers):
                    return True
            elif _differ(old, _attributes(module)):
                return True
        return False

    def changes(self) -> list[dict[str, Any]]:
        """What is new or differs by now, module by module."""
        return [
            {k: v for k, v in _attributes(m).items() if k not in old or _differ(old[k], v)}
            for m, old in zip(self._modules, self._old, strict=True)
        ]

    def restore(self) -> None:
        for module, old in zip(self._modules, self._old, strict=True):
            for name in _attributes(module).keys() - old.keys():
                del vars(module)[name]
            vars(module).update(old)


def same_attributes(models: list[nn.Module]) -> bool:
    """Whether models are equal but for parameters and buffers, with no other tensors."""
    for modules in zip(*(m.modules() for m in models), strict=True):
        # A buffer that is None so far may be assigned in the forward pass; a norm's never is.
        norm = isinstance(modules[0], nn.modules.batchnorm._NormBase)
        if not norm and any(b is None for b in modules[0]._buffers.values()):
            return False
        first, *others = map(_attributes, modules)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(first)):
            return False
        try:
            if any(bool(first != other) for other in others):
                return False
        except (RuntimeError, ValueError):  # Objects that can't be compared.
            return False
    return True


def copy_attributes(source: nn.Module, target: nn.Module) -> None:
    """Give a model copies of another's attributes, and of its buffers where it has None."""
    for own, other in zip(target.modules(), copy_module(source).modules(), strict=True):
        vars(own).update(_attributes(other))
        own._buffers.update((k, b) for k, b in other._buffers.items() if own._buffers[k] is None)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}


def _differ(old: Any, new: Any) -> bool:
    if old is new:
        return False
    if type(old) is not type(new):
        return True
    if isinstance(old, dict):
        return old.keys() != new.keys() or any(_differ(v, new[k]) for k, v in old.items())
    if isinstance(old, list):
        return len(old) != len(new) or any(map(_differ, old, new))
    return not isinstance(old, (int, float, str, set)) or old != new
