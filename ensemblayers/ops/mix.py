"""The mix: n stacked tensors combined into one, ``sum_i alpha_i stacked_i``; or many such at once.

On CUDA one pass in Triton (:mod:`.mix_triton`) reads the stack as it is stored, where a matrix
product would first copy a stack in half precision to alpha's. Its gradients, ``alpha_i g`` and
``<g, stacked_i>``, are one pass too. On a CPU a large stack is mixed in C++, where that can be
built, and its gradient goes into memory that is kept; a small one costs what its calls cost, and
the product has the fewest.
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import Function

from .._gradients import LARGE, gradient_memory, is_eager
from .._transforms import is_recorded, transformed
from . import _triton, native
from ._autograd import define, differentiable


def plain_mix(stacked: Tensor, alpha: Tensor) -> Tensor:
    """The definition. Half-precision tensors are combined in alpha's precision, rounded once.

    Shape:
        - stacked: ``[n, *shape]``, alpha: ``[n]`` or ``[B, n]``
        - Output: ``[*shape]`` or ``[B, *shape]``, in the dtype of ``stacked``
    """
    dtype = torch.promote_types(alpha.dtype, stacked.dtype)
    # As mm, not torch.mv, whose gradient comes back transposed and costs 3 to 5 times as much.
    rows = alpha.reshape(-1, alpha.shape[-1]).to(dtype)
    with no_autocast(stacked.device.type):
        mixed = rows @ stacked.reshape(stacked.shape[0], -1).to(dtype)
    return mixed.to(stacked.dtype).view(alpha.shape[:-1] + stacked.shape[1:])


def no_autocast(device: str) -> contextlib.AbstractContextManager:
    """Autocast switched off on a type of device."""
    if device != "meta" and torch.is_autocast_enabled(device):  # No autocast on meta.
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def plain_mix_backward(
    grad: Tensor, stacked: Tensor, alpha: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of the stack and of alpha ``[n]``; empty where not needed."""
    d_stacked, d_alpha = stacked.new_empty(0), alpha.new_empty(0)
    dtype = torch.promote_types(alpha.dtype, stacked.dtype)
    flat = grad.reshape(-1).to(dtype)
    with no_autocast(stacked.device.type):
        if needs[0]:
            d_stacked = torch.outer(alpha.to(dtype), flat).to(stacked.dtype).view(stacked.shape)
        if needs[1]:
            d_alpha = (stacked.reshape(len(stacked), -1).to(dtype) @ flat).to(alpha.dtype)
    return d_stacked, d_alpha


def _fake_mix_backward(grad, stacked, alpha, needs):
    shapes = (stacked.shape, alpha.shape)
    return tuple(
        t.new_empty(shape if need else 0)
        for t, shape, need in zip((stacked, alpha), shapes, needs, strict=True)
    )


_mix = define(
    "mix(Tensor stacked, Tensor alpha) -> Tensor",
    plain=plain_mix,
    cuda=lambda stacked, alpha: _triton.module("mix").mix(stacked, alpha),
    fake=lambda stacked, alpha: stacked.new_empty(stacked.shape[1:]),
)
_mix_backward = define(
    "mix_backward(Tensor grad, Tensor stacked, Tensor alpha, bool[] needs) -> (Tensor, Tensor)",
    plain=plain_mix_backward,
    cuda=lambda *arguments: _triton.module("mix").mix_backward(*arguments),
    fake=_fake_mix_backward,
)

fused_mix = differentiable(
    lambda stacked, alpha, keep: (_mix(stacked, alpha),),
    _mix_backward,
    lambda stacked, alpha, keep: (plain_mix(stacked, alpha),),
    plain_mix_backward,
)


def mix(stacked: Tensor, alpha: Tensor) -> Tensor:
    """As :func:`plain_mix`, by the fastest way there is."""
    if alpha.dim() == 1:
        if _triton.takes(stacked, alpha):
            return fused_mix(stacked, alpha)
        if _is_large(stacked, alpha):
            return _LargeMix.apply(stacked, alpha)
    return plain_mix(stacked, alpha)


def _is_large(stacked: Tensor, alpha: Tensor) -> bool:
    return (
        stacked.device.type == alpha.device.type == "cpu"
        and stacked.numel() * stacked.element_size() >= LARGE
        and stacked.layout == torch.strided
        and stacked.is_contiguous()
        and alpha.dtype == _ALPHA.get(stacked.dtype)
        and alpha.shape[0] == stacked.shape[0]
        and is_eager(stacked, alpha)
    )


_ALPHA = {torch.float64: torch.float64, torch.float32: torch.float32}
_ALPHA |= {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class _LargeMix(Function):
    """On a CPU."""

    @staticmethod
    def forward(ctx, stacked: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(stacked, alpha)
        if not native.available():
            return plain_mix(stacked, alpha)
        out = torch.empty_like(stacked[0])
        torch.ops.ensemblayers.mix_(stacked.view(len(stacked), -1), alpha.contiguous(), [out], [0])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        (stacked, alpha), needs = ctx.saved_tensors, list(ctx.needs_input_grad)
        if is_recorded(grad) or stacked.dtype != alpha.dtype:
            found = plain_mix_backward(grad, stacked, alpha, needs)
        else:
            _, d_alpha = plain_mix_backward(grad, stacked, alpha, [False, needs[1]])
            d_stacked = gradient_memory(stacked) if needs[0] else None
            if needs[0]:
                n = len(alpha)
                torch.mm(alpha.view(n, 1), grad.reshape(1, -1), out=d_stacked.view(n, -1))
            found = d_stacked, d_alpha
        return (*(g if need else None for g, need in zip(found, needs, strict=True)),)


def mix_all(stacks: Sequence[Tensor], alpha: Tensor) -> list[Tensor]:
    """Mix many stacks of one device and dtype at one point.

    On CUDA in one launch; the gradients too, when those of all outputs are there.

    Shape:
        - stacks: ``[n, *shape]`` each, alpha: ``[n]``
        - Output: ``[*shape]`` each
    """
    if torch.compiler.is_compiling() or transformed() or not _triton.takes(alpha, *stacks):
        return [mix(stacked, alpha) for stacked in stacks]
    return list(_MixAll.apply(alpha, *stacks))


class _MixAll(Function):
    @staticmethod
    def forward(ctx, alpha: Tensor, *stacks: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(alpha, *stacks)
        return tuple(_triton.module("mix").mix_all(stacks, alpha))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        alpha, *stacks = ctx.saved_tensors
        backward = _plain_mix_all_backward
        if not is_recorded(*grads):
            backward = _triton.module("mix").mix_all_backward
        d_stacks, d_alpha = backward(grads, stacks, alpha)
        return d_alpha, *d_stacks


def _plain_mix_all_backward(
    grads: Sequence[Tensor], stacks: Sequence[Tensor], alpha: Tensor
) -> tuple[list[Tensor], Tensor]:
    pairs = [
        plain_mix_backward(g, stacked, alpha, [True, True])
        for g, stacked in zip(grads, stacks, strict=True)
    ]
    return [d_stacked for d_stacked, _ in pairs], sum(d_alpha for _, d_alpha in pairs)
