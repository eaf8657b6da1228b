"""The linear layer at a point of the simplex: ``y = x (sum_i alpha_i W_i)^T + sum_i alpha_i b_i``.

Which algorithm is taken on CUDA (:func:`algorithm`); ``benchmarks/gpu.py`` measures them:

====== =========================== ==============================================================
name   when                        what
====== =========================== ==============================================================
fused  up to 128 rows, n <= 10,    the weights are mixed as the product loads them; for a backward
       tensor cores                pass the mixed weight is stored on the way
mixed  else                        the mix kernel, then the library's product
each   alpha [rows, n], tensor     one product a member, scaled by alpha's column as it is summed
       cores
scaled alpha [rows, n] else        the library's product of n scaled copies of x, side by side
====== =========================== ==============================================================

Tensor cores take half precision, and float32 where torch allows tf32. The weights' gradient is one
product ``G = g^T x`` whose epilogue writes ``alpha_i G`` and sums ``<G, W_i>`` in a fixed order,
or, for many rows (:func:`gradient_algorithm`), the library's product and one pass over it.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _triton
from ._autograd import define, differentiable
from .mix import no_autocast, plain_mix

FUSED_ROWS = 128  # Beyond, every tile of rows mixes the weights once more.
FUSED_MEMBERS = 10  # More don't fit into shared memory with two stages.
GRADIENT_ROWS = 1024  # Beyond, the library's faster product is worth a second pass.

# For measurements; alpha [rows, n] keeps its own.
forced = _triton.Forced("fused", "mixed")


def algorithm(x: Tensor, weight: Tensor, alpha: Tensor) -> str:
    """The algorithm's name for x ``[rows, in]``, weight ``[n, out, in]`` on CUDA."""
    if alpha.dim() == 2:
        return "each" if _triton.on_tensor_cores(x) else "scaled"
    if forced.name is not None:
        return forced.name
    fits = len(x) <= FUSED_ROWS and len(weight) <= FUSED_MEMBERS
    return "fused" if fits and _triton.on_tensor_cores(x) else "mixed"


def gradient_algorithm(x: Tensor) -> str:
    """That of the weights' gradient at one point: ``"fused"`` or ``"library"``."""
    most = GRADIENT_ROWS if _triton.on_tensor_cores(x) else FUSED_ROWS
    return "fused" if len(x) <= most else "library"


# -------------------------------------------------------------------------------------- definition


def plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """The definition, on rows; the second output is the mixed weight, or empty.

    Shape:
        - x: ``[rows, in]``, weight: ``[n, out, in]``, bias: ``[n, out]``
        - alpha: ``[n]`` or ``[rows, n]``
        - Output: ``[rows, out]`` in the dtype of x, ``[out, in]`` or ``[0]``
    """
    with no_autocast(x.device.type):
        if alpha.dim() == 1:
            mixed = plain_mix(weight, alpha).to(x.dtype)
            b = None if bias is None else plain_mix(bias, alpha).to(x.dtype)
            return F.linear(x, mixed, b), mixed if keep else x.new_empty(0)
        y = F.linear(_scaled(x, alpha), weight.movedim(0, 1).flatten(1).to(x.dtype))
        if bias is not None:
            y = y + plain_mix(bias, alpha).to(y.dtype)
        return y, x.new_empty(0)


def _scaled(x: Tensor, alpha: Tensor) -> Tensor:
    """Each member's copy of a row, times its weight, side by side: ``[rows, n * features]``."""
    return (x.unsqueeze(1) * alpha.unsqueeze(2)).to(x.dtype).flatten(1)


def plain_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    alpha: Tensor,
    mixed: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, bias and alpha; empty where not needed."""
    inputs = (x, weight, bias, alpha)
    found = [grad.new_empty(0) if t is None else t.new_empty(0) for t in inputs]
    with no_autocast(x.device.type):
        if alpha.dim() == 1:
            if needs[0]:
                found[0] = grad @ plain_mix(weight, alpha).to(grad.dtype)
            if needs[1] or needs[3]:
                outer = grad.mT @ x
            if needs[1]:
                found[1] = (alpha.view(-1, 1, 1) * outer).to(weight.dtype)
            total = grad.sum(0)
            if needs[2]:
                found[2] = torch.outer(alpha.to(total.dtype), total).to(bias.dtype)
            if needs[3]:
                found[3] = (weight * outer).sum((1, 2), dtype=alpha.dtype)
                if bias is not None:
                    found[3] = found[3] + (bias * total).sum(1, dtype=alpha.dtype)
        else:
            if needs[0]:
                found[0] = _scaled(grad, alpha) @ weight.flatten(0, 1).to(grad.dtype)
            if needs[1]:
                shares = _scaled(grad, alpha).mT @ x
                found[1] = shares.view(weight.shape).to(weight.dtype)
            if needs[2]:
                found[2] = (alpha.mT.to(grad.dtype) @ grad).to(bias.dtype)
            if needs[3]:
                own = torch.einsum("bk,nok->bno", x, weight.to(x.dtype))
                if bias is not None:
                    own = own + bias.to(x.dtype)
                found[3] = (own * grad.unsqueeze(1)).sum(2, dtype=alpha.dtype)
    return tuple(found)


# ------------------------------------------------------------------------------------ registration


def _cuda(x, weight, bias, alpha, keep):
    return _triton.module("subspace_linear").forward(x, weight, bias, alpha, keep)


def _cuda_backward(grad, x, weight, bias, alpha, mixed, needs):
    return _triton.module("subspace_linear").backward(grad, x, weight, bias, alpha, mixed, needs)


def _fake(x, weight, bias, alpha, keep):
    kept = weight.shape[1:] if keep and alpha.dim() == 1 else (0,)
    return x.new_empty(x.shape[0], weight.shape[1]), x.new_empty(kept)


def _fake_backward(grad, x, weight, bias, alpha, mixed, needs):
    inputs = (x, weight, bias, alpha)
    return tuple(
        (grad if t is None else t).new_empty(t.shape if need else 0)
        for t, need in zip(inputs, needs, strict=True)
    )


_forward_op = define(
    "subspace_linear(Tensor x, Tensor weight, Tensor? bias, Tensor alpha, bool keep)"
    " -> (Tensor, Tensor)",
    plain=plain_linear,
    cuda=_cuda,
    fake=_fake,
)
_backward_op = define(
    "subspace_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor alpha,"
    " Tensor mixed, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    plain=plain_linear_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)

rows_linear = differentiable(_forward_op, _backward_op, plain_linear, plain_linear_backward)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor) -> bool:
    """Whether :func:`subspace_linear` can take these tensors."""
    if not _triton.takes(x, weight, bias, alpha):
        return False
    if (alpha.shape[-1], x.shape[-1]) != (weight.shape[0], weight.shape[-1]):
        return False
    return x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)


def is_fused(x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor) -> bool:
    """Whether the weights would be mixed on their way into the product."""
    if not takes(x, weight, bias, alpha):
        return False
    return algorithm(x.flatten(0, -2), weight, alpha) == "fused"


def subspace_linear(x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor) -> Tensor:
    """The operation by its kernels, on any number of leading dimensions.

    Under autocast x is cast and the weights are not: they are mixed as they are, then rounded.

    Shape:
        - x: ``[..., in]``; ``[B, ..., in]`` for a point per example
        - weight: ``[n, out, in]``, bias: ``[n, out]``, alpha: ``[n]`` or ``[B, n]``
        - Output: ``[..., out]``
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if alpha.dim() == 2 and x.dim() > 2:
        alpha = alpha.repeat_interleave(math.prod(x.shape[1:-1]), 0, output_size=len(rows))
    return rows_linear(rows, weight, bias, alpha).view(*x.shape[:-1], weight.shape[1])
