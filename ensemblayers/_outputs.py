"""The outputs of members: tensors, in tuples, lists and dicts."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def dtypes(outputs: Any) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]


def stack_outputs(outputs: list[Any]) -> Any:
    """Stack the members' outputs, tensor by tensor; what is no tensor has to be equal in all."""
    if all(isinstance(out, Tensor) for out in outputs):
        return torch.stack(outputs)
    return pytree.tree_map(lambda *leaves: _stack(leaves), *outputs)


def _stack(leaves: tuple) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor):
        return torch.stack(leaves)
    plain = isinstance(first, (int, float, str, type(None)))
    if plain and all(leaf == first for leaf in leaves):
        return first
    raise ValueError(
        "expected outputs of tensors in tuples, lists and dicts, got "
        f"{type(first).__name__}{' values that differ among the members' if plain else ''}"
    )
