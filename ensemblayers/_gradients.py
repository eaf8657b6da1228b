"""Memory for the gradients of large parameters, kept from one step to the next on a CPU.

After ``zero_grad()`` a gradient's memory goes back to the system, and the next backward pass gets
it page by page, zeroed: for 48 MB that takes as long as the matrix product that fills it. Single
networks are spared, as the C library keeps blocks below 32 MB; n stacked ones are not.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from ._transforms import has_tangents, is_recorded, transformed

_FIRST = 2**63 - 1
LARGE = 1 << 20  # Bytes from which on reuse pays.
# By the leaf's id: a dictionary with weak keys is slow, in a step in which nothing is in the cache.
_kept: dict[int, tuple[Callable, Any, Any, Any]] = {}
_NOTHING = (lambda: None), None, None, None
_is_tracing, _dispatch_modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack
_use_count = getattr(torch._C, "_storage_Use_Count", None)


def gradient_memory(leaf: Tensor) -> Tensor:
    """An uninitialised tensor of a leaf's shape, strides and dtype, for its gradient.

    Its memory is that of the last such tensor, unless a tensor still uses that.
    """
    key, size = id(leaf), leaf.nbytes
    if size < LARGE or not leaf.is_cpu or not leaf.is_leaf or _use_count is None:
        return torch.empty_like(leaf)
    if _dispatch_modes() or torch.is_inference_mode_enabled():
        return torch.empty_like(leaf)  # Of a kind that is not to be kept.
    layout = leaf.dtype, leaf.shape, leaf.stride()
    # Taken out while it is looked at: another thread's backward pass finds nothing here.
    reference, kept, kept_layout, storage = _kept.pop(key, _NOTHING)
    if (
        reference() is not leaf
        or kept_layout != layout
        or storage.nbytes() != size
        or users(storage) != 2  # What is kept: a tensor and the storage.
        or _references(storage) != _OWN
        or storage.is_shared()
    ):
        keep_small_blocks()
        kept = torch.empty_like(leaf)
        if kept.stride() != leaf.stride():  # Not dense: there is no layout to keep.
            return kept
        reference = weakref.ref(leaf, lambda _: _kept.pop(key, None))
        storage = kept.untyped_storage()
    _kept[key] = reference, kept, layout, storage
    return kept.data


def users(storage: torch.UntypedStorage) -> int | None:
    """How many tensors, and other holders, a storage has; None where torch does not say."""
    return None if _use_count is None else _use_count(storage._cdata)


def _references(storage: torch.UntypedStorage) -> int:
    """How many names a storage has; more if its tensor holds it, which torch's version decides."""
    return sys.getrefcount(storage)


def _own_references() -> int:
    """As many as :func:`gradient_memory` finds where nobody else has the storage."""
    kept = torch.empty(1, device="cpu")
    storage = kept.untyped_storage()
    return _references(storage)


_OWN = _own_references()  # Now, as nobody looks on.


@functools.cache
def keep_small_blocks() -> None:
    """Have the C library keep 64 MB of freed memory, where it is glibc.

    It keeps twice the largest block below 32 MB that was freed. Of n members' activations that is a
    part only, and large gradients, by which it would learn, are not freed here. Nothing is written
    to this block: it takes no memory.
    """
    torch.empty((1 << 25) - (1 << 16), dtype=torch.uint8, device="cpu")


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether tensors are plain ones in eager mode, so that memory may be written as one likes.

    torch.func's transforms, torch.compile, tracers, fake tensors and other dispatch modes have to
    see the operations themselves, and so has forward-mode differentiation.
    """
    if is_compiling() or _is_tracing() or _dispatch_modes() or transformed() or has_tangents():
        return False
    for t in tensors:
        kind = type(t)
        if kind is not Parameter and kind is not Tensor and t is not None:
            return False
    return True


def records(*tensors: Tensor | None) -> bool:
    """Whether autograd records what becomes of these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def writes_gradients(*tensors: Tensor | None) -> bool:
    """Whether gradients are recorded that may be written straight into memory."""
    return records(*tensors) and is_eager(*tensors)


def unbind(stacked: Tensor) -> tuple[Tensor, ...]:
    """``stacked.unbind(0)``, with the gradients stacked into memory that is kept."""
    large = stacked.nbytes >= LARGE and stacked.is_cpu
    if not (large and stacked.is_leaf and writes_gradients(stacked)):
        return stacked.unbind(0)
    stack = _Stack(stacked)
    rows = [_Row.apply(row, stack, i) for i, row in enumerate(_Unbind.apply(stacked, stack))]
    for row in rows:
        # The backward pass runs what was recorded last first, and these would come after all
        # members. Like the gradients of leaves, they are to be stored, and freed, as they come.
        if hasattr(row.grad_fn, "_set_sequence_nr"):
            row.grad_fn._set_sequence_nr(_FIRST)
    return tuple(rows)


def has_place(row: Tensor) -> bool:
    """Whether the gradient of a row of :func:`unbind` has a place in kept memory."""
    return isinstance(row.grad_fn, _Row._backward_cls)


def place_of(row: Tensor) -> Tensor:
    """Uninitialised, dense memory for the gradient of a row that has a place.

    It is that place, so that nothing is copied, unless the row has had a gradient in this backward
    pass already, or the leaf has got other data since the forward pass.
    """
    own = row.grad_fn.stack.give(row.grad_fn.i)
    if own is None or own.dtype != row.dtype or own.shape != row.shape or not own.is_contiguous():
        return torch.empty_like(row, memory_format=torch.contiguous_format)
    return own


class _Stack:
    """The memory of a stacked gradient in each backward pass, from its first row to its last.

    Several may go through one graph at once: those of two threads, or one in a hook of the other.
    """

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        # Of each pass the memory, and the rows of it that were given away.
        self._passes: dict[int, tuple[Tensor, set[int]]] = {}

    def _pass(self) -> tuple[Tensor, set[int]]:
        number = torch._C._current_graph_task_id()
        found = self._passes.get(number)
        if found is None:
            found = self._passes[number] = gradient_memory(self.leaf), set()
        return found

    def give(self, i: int) -> Tensor | None:
        """A row that someone is to write, once in a pass."""
        out, given = self._pass()
        if i in given:
            return None
        given.add(i)
        return out[i]

    def put(self, i: int, grad: Tensor | None) -> Tensor:
        """A row's gradient, brought to its place if it is not there."""
        out, given = self._pass()
        own = out[i]
        if grad is None:
            return own.zero_()
        if grad.is_set_to(own):
            return own
        # A hook may have made it of what was written there.
        return own.copy_(grad.clone() if i in given else grad)

    def take(self) -> Tensor:
        return self._passes.pop(torch._C._current_graph_task_id())[0]


class _Row(torch.autograd.Function):
    """A row whose gradient goes to its place in the stack."""

    @staticmethod
    def forward(ctx, row, stack, i):
        ctx.set_materialize_grads(False)
        ctx.stack, ctx.i = stack, i
        return row.view_as(row)

    @staticmethod
    def backward(ctx, grad):
        if grad is None or is_recorded(grad) or grad.layout != torch.strided:
            return grad, None, None
        return ctx.stack.put(ctx.i, grad), None, None


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stacked, stack):
        ctx.set_materialize_grads(False)
        ctx.stack = stack
        return stacked.unbind(0)

    @staticmethod
    def backward(ctx, *grads):
        given = [g for g in grads if g is not None]
        if is_recorded(*given) or any(g.layout != torch.strided for g in given):
            zero = torch.zeros_like(given[0])  # Of their layout.
            return torch.stack([zero if g is None else g for g in grads]), None
        for i, g in enumerate(grads):
            ctx.stack.put(i, g)
        return ctx.stack.take(), None
