"""Whether models can be stacked: what has to be the same in all of them."""

import itertools
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations


def check_alike(models: list[nn.Module]) -> None:
    """Raise a ValueError for models that can't be stacked."""
    if not models:
        raise ValueError("expected at least one model to stack, got none")
    for i, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise ValueError(f"expected modules to stack, got {type(model).__name__} at {i}")
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        lazy = [name for name, t in tensors if nn.parameter.is_lazy(t)]
        if lazy:
            raise ValueError(
                f"expected tensors with shapes, got a lazy {lazy[0]} in model {i}; "
                "call each model once before"
            )
    reference = _describe(models[0])
    for i, model in enumerate(models[1:], 1):
        for what, other in _describe(model).items():
            expected = reference[what]
            for name in expected.keys() | other.keys():
                if expected.get(name) != other.get(name):
                    raise ValueError(
                        f"expected models of one {what}, but in {name or 'the model itself'} "
                        f"model 0 has {expected.get(name)} and model {i} has {other.get(name)}"
                    )


def _describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What has to be the same in all members, by name."""
    modules = dict(model.named_modules())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {
        "class": {name: type_before_parametrizations(m) for name, m in modules.items()},
        "training mode": {name: m.training for name, m in modules.items()},
        "shape": {name: tuple(t.shape) for name, t in tensors.items()},
        "dtype": {name: t.dtype for name, t in tensors.items()},
        "device": {name: t.device for name, t in tensors.items()},
        "requires_grad": {name: t.requires_grad for name, t in tensors.items()},
        "ties": {group[0]: group for group in names.values()},
    }
