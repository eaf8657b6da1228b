"""The attributes of a model's modules beside their tensors, children and hooks."""

import copy
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._module import copy_module

_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"_non_persistent_buffers_set"}
_CONTAINERS = {list, dict, set}


class Snapshot:
    """A model's attributes at one time, lists, dicts and sets as copies.

    Empty under torch.compile: it would break the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [] if torch.compiler.is_compiling() else model.modules()
        self._own = list(map(vars, modules))
        self._old = list(map(dict, self._own))
        self._names = list(map(list, self._own))
        self._copies = [
            (k, name, copy.copy(value))
            for k, old in enumerate(self._old)
            for name, value in old.items()
            if type(value) in _CONTAINERS and name not in _OF_EVERY_MODULE
        ]

    def changed(self) -> bool:
        """Whether attributes, or their lists, dicts and sets, changed since."""
        # In nearly all calls none was assigned, which is quick to see.
        assigned = list(map(list, self._own)) != self._names or not all(
            map(operator.is_, _values(self._own), _values(self._old))
        )
        if assigned:
            return any(map(_differ, self._before(), map(_attributes, self._own)))
        for k, name, old in self._copies:
            if _differ(old, self._own[k][name]):
                return True
        return False

    def changes(self) -> list[tuple[dict[str, Any], set[str]]]:
        """What is new or differs by now, and the names that are gone, module by module."""
        found = []
        for own, old in zip(map(_attributes, self._own), self._before(), strict=True):
            new = {k: v for k, v in own.items() if k not in old or _differ(old[k], v)}
            found.append((new, old.keys() - own.keys()))
        return found

    def restore(self) -> None:
        for own, old in zip(self._own, self._before(), strict=True):
            for name in _attributes(own).keys() - old.keys():
                del own[name]
            own.update(old)

    def _before(self) -> list[dict[str, Any]]:
        """The attributes, module by module, with what lists, dicts and sets held."""
        before = list(map(_attributes, self._old))
        for k, name, value in self._copies:
            before[k][name] = value
        return before


def same_attributes(models: list[nn.Module]) -> bool:
    """Whether models are equal but for parameters and buffers, with no other tensors."""
    for modules in zip(*(m.modules() for m in models), strict=True):
        # A buffer that is None so far may be assigned in the forward pass; a norm's never is.
        norm = isinstance(modules[0], nn.modules.batchnorm._NormBase)
        if not norm and any(b is None for b in modules[0]._buffers.values()):
            return False
        first, *others = (_attributes(vars(m)) for m in modules)
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
        vars(own).update(_attributes(vars(other)))
        own._buffers.update((k, b) for k, b in other._buffers.items() if own._buffers[k] is None)


def _values(some: list[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(dict.values, some))


def _attributes(own: dict[str, Any]) -> dict[str, Any]:
    """Of what a module holds, its attributes."""
    return {k: v for k, v in own.items() if k not in _OF_EVERY_MODULE}


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
