"""Members that write to their input, as an in-place normalisation does: each gets a copy."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class OwnInputs:
    """Calls members so that none sees what another one wrote to the shared input.

    The first call of a kind is on copies, which shows whether members write: if so, all calls are.
    """

    def __init__(self) -> None:
        self._tried: set[Hashable] = set()
        self._written = False

    def call(self, kind: Hashable, member: Callable[[Any, Any], Any], args: Any, kwargs: Any):
        """Return ``member(args, kwargs)``.

        Raises:
            RuntimeError: an input was changed in place, and in the first call of the kind was not.
        """
        compiled = torch.compiler.is_compiling()
        copied = compiled or self._written or kind not in self._tried
        given = args, kwargs
        if copied:
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, given)
        if compiled or self._written:
            return member(args, kwargs)
        inputs = tensors_of(args, kwargs)
        before = _versions(inputs)
        outputs = member(args, kwargs)
        written = _versions(inputs) != before or (copied and _differ(given, (args, kwargs)))
        if written and not copied:
            raise RuntimeError(
                "a member changed its input in place, which the members after it would see; let "
                "it change a copy, as x.clone()"
            )
        self._tried.add(kind)
        self._written |= written
        return outputs


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments, however nested."""
    if not kwargs and all(type(x) is Tensor for x in args):
        return list(args)  # pytree is slow.
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _versions(tensors: list[Tensor]) -> list[int]:
    """How often each tensor was written to."""
    return [t._version for t in tensors if not t.is_inference()]


def _differ(given: Any, copies: Any) -> bool:
    """Whether inference tensors, which have no version, differ from their copies."""
    pairs = zip(pytree.tree_leaves(given), pytree.tree_leaves(copies), strict=True)
    return any(
        isinstance(t, Tensor) and t.is_inference() and not torch.equal(t, copy) for t, copy in pairs
    )
