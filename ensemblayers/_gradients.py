"""Memory for the gradients of large parameters, kept from one step to the next on a CPU.

After ``zero_grad()`` a gradient's memory goes back to the system, and the next backward pass gets
it page by page, zeroed: for 48 MB that takes as long as the matrix product that fills it. Single
networks are spared, as the C library keeps blocks below 32 MB; n stacked ones are not.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ._transforms import has_tangents, is_recorded, transformed

LARGE = 1 << 20  # Bytes from which on reuse pays.
_kept = WeakTensorKeyDictionary()
_users = getattr(torch._C, "_storage_Use_Count", None)


def gradient_memory(leaf: Tensor) -> Tensor:
    """An uninitialised tensor of a leaf's shape, strides and dtype, for its gradient.

    Its memory is that of the last such tensor, unless a tensor still uses that.
    """
    size = leaf.numel() * leaf.element_size()
    if size < LARGE or leaf.device.type != "cpu" or not leaf.is_leaf or _users is None:
        return torch.empty_like(leaf)
    # Taken out while it is looked at: another thread's backward pass finds nothing here.
    storage = _kept.pop(leaf, None)
    if storage is None or storage.nbytes() != size or _users(storage._cdata) > 1:
        fresh = torch.empty_like(leaf)
        if fresh.stride() != leaf.stride():  # Not dense: there is no layout to keep.
            return fresh
        storage = fresh.untyped_storage()
    out = torch.empty(0, dtype=leaf.dtype).set_(storage, 0, leaf.shape, leaf.stride())
    _kept[leaf] = storage
    return out


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether tensors are plain ones in eager mode, so that memory may be written as one likes.

    torch.func's transforms, torch.compile, tracers, fake tensors and other dispatch modes have to
    see the operations themselves, and so has forward-mode differentiation.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or transformed()
        or has_tangents()
    ):
        return False
    return all(t is None or type(t) in _PLAIN for t in tensors)


def writes_gradients(*tensors: Tensor | None) -> bool:
    """Whether gradients are recorded that may be written straight into memory."""
    if not torch.is_grad_enabled() or not is_eager(*tensors):
        return False
    return any(t is not None and t.requires_grad for t in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


def unbind(stacked: Tensor) -> tuple[Tensor, ...]:
    """``stacked.unbind(0)``, with the gradients stacked into memory that is kept."""
    large = stacked.numel() * stacked.element_size() >= LARGE and stacked.device.type == "cpu"
    if large and stacked.is_leaf and writes_gradients(stacked):
        return _Unbind.apply(stacked)
    return stacked.unbind(0)


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stacked):
        ctx.set_materialize_grads(False)
        ctx.stacked = stacked  # Not saved: its shape and layout count, not its values.
        return stacked.unbind(0)

    @staticmethod
    def backward(ctx, *grads):
        if is_recorded(*grads):
            zero = torch.zeros_like(ctx.stacked[0])
            return torch.stack([zero if g is None else g for g in grads])
        out = gradient_memory(ctx.stacked)
        for own, g in zip(out.unbind(0), grads, strict=True):
            own.zero_() if g is None else own.copy_(g)
        return out
