"""Copies of modules, and the exchange of a module's class within a copy."""

import copy
from collections import OrderedDict

from torch import Tensor, nn


def copy_module(module: nn.Module, replace: dict[Tensor, nn.Parameter] | None = None) -> nn.Module:
    """Deep copy of a module, with some of its parameters replaced wherever they occur.

    Tensors that are the output of a graph (as old-style weight_norm leaves them) are copied
    detached, where copy.deepcopy refuses them.

    Raises:
        ValueError: a buffer that has no shape yet.
    """
    lazy = [name for name, b in module.named_buffers() if nn.parameter.is_lazy(b)]
    if lazy:
        raise ValueError(f"expected buffers with shapes, got lazy {lazy[0]}; run the model once")
    memo: dict[int, object] = {id(old): new for old, new in (replace or {}).items()}
    for m in module.modules():
        for value in (*vars(m).values(), *m._buffers.values()):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    return copy.deepcopy(module, memo)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters, not those of its children."""
    return {name: p for name, p in module._parameters.items() if p is not None}


class PlainKeys(nn.Module):
    """A wrapper around ``module`` whose state_dict has the keys of ``module``, without a prefix.

    Its parameters and buffers keep their names, ``module.weight``: functional_call takes
    ``dict(model.named_parameters()) | dict(model.named_buffers())``, and what pairs names with the
    state_dict's keys, as torch.distributed.checkpoint does, takes ``model.module``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            self._refuse(name)
            raise

    def __setattr__(self, name, value):
        if isinstance(value, Tensor):  # As functional_call does with what is no parameter.
            self._refuse(name)
        super().__setattr__(name, value)

    def _refuse(self, name):
        """Raise an AttributeError for a parameter, buffer or child of ``module``."""
        module = vars(self).get("_modules", {}).get("module")
        if module is None or name not in {*module._parameters, *module._buffers, *module._modules}:
            return
        raise AttributeError(
            f"expected module.{name}, got {name}: in a {type(self).__name__} the state_dict's keys "
            "are no names. functional_call takes dict(model.named_parameters()) | "
            "dict(model.named_buffers()), torch.distributed.checkpoint takes model.module"
        )

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        completed = OrderedDict(state_dict)
        if hasattr(state_dict, "_metadata"):
            completed._metadata = state_dict._metadata
        self._complete(completed, "")
        return self.module.load_state_dict(completed, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # As a part of another module, whose load_state_dict goes on to ``module`` after this.
        self._complete(state_dict, prefix)
        for key in [k for k in state_dict if k.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _complete(self, state_dict, prefix):
        """Fit the tensors under a prefix to this ensemble's."""


def forget_fast_path(module: nn.Module) -> None:
    """Keep nn.TransformerEncoderLayer from reading its children's weights past their forward."""
    if isinstance(module, nn.TransformerEncoderLayer) and "_plain_activation" not in vars(module):
        module._plain_activation = module.activation_relu_or_gelu
        module.activation_relu_or_gelu = 0


def restore_fast_path(module: nn.Module) -> None:
    """Undo :func:`forget_fast_path`, where it was applied."""
    if "_plain_activation" in vars(module):
        module.activation_relu_or_gelu = vars(module).pop("_plain_activation")


def check_module(model: nn.Module) -> None:
    """Raise a ValueError for what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a module, got {type(model).__name__}")


def check_outermost(model: nn.Module) -> None:
    """Raise a ValueError for a module that holds a whole ensemble among others."""
    check_module(model)
    for name, module in model.named_modules():
        if isinstance(module, PlainKeys) and module is not model:
            raise ValueError(
                f"expected the ensemble itself, got {type(model).__name__} that holds a "
                f"{type(module).__name__} as {name!r}; pass that, or make the whole an ensemble"
            )


def check_no_ensemble(model: nn.Module, kind: type[PlainKeys] = PlainKeys) -> None:
    """Raise a ValueError for a module that is or holds a whole ensemble of a kind."""
    check_module(model)
    for name, module in model.named_modules():
        if isinstance(module, kind):
            where = f"one as {name!r}" if name else "one"
            raise ValueError(
                f"expected a model without a whole {type(module).__name__} in it, got {where}"
            )
