"""Linear layers of n networks as one batched product, on a CPU at times as n products.

Where gradients are recorded, the weight's is written in the weight's own layout, which autograd's
is not, into memory that is kept. That of a large weight is computed on a CPU in C++
(``csrc/conv_weight_gradient.cpp``, for which a linear layer is a convolution with one place): it
writes past the caches, which would read first what is overwritten.
"""

import torch
from torch import Tensor

from .._gradients import gradient_memory, is_eager, records
from .._transforms import is_recorded
from . import native

# Of products one by one: the least rows, and multiplications.
LEAST_ROWS, LEAST_WORK = 64, 1 << 23
# Of a product in C++: the weights, in bytes, from which on, and the rows up to which it is faster.
LARGE_WEIGHT, MOST_ROWS = 8 << 20, 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs ``[n, B, out]`` of n linear layers.

    Shape:
        - x: ``[n, B, in]``, or ``[B, in]`` for all
        - weight: ``[n, out, in]``, bias: ``[n, out]``
    """
    device = "cpu" if x.is_cpu or x.is_meta else x.device.type  # Autocast knows no meta.
    if not torch.is_autocast_enabled(device) and is_eager(x, weight, bias):
        if records(x, weight, bias):
            return _Linear.apply(x, weight, bias)
        if _one_by_one(x, weight):
            return _products(x, weight, bias)
    return _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = _each(x, weight)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`_product`, one by one."""
    y = x.new_empty(weight.shape[0], x.shape[-2], weight.shape[1])
    if bias is None:
        _multiply(_each(x, weight), weight.mT, y)
    else:
        for b, rows, w, out in zip(bias, _each(x, weight), weight.mT, y, strict=True):
            torch.addmm(b, rows, w, out=out)
    return y


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    for own in zip(a, b, out, strict=True):
        torch.mm(*own[:2], out=own[2])


def _one_by_one(x: Tensor, weight: Tensor) -> bool:
    """Whether n products are faster than a batched one, in which each thread takes whole members.

    Measured on two threads for n = 3 and 5, 256 x 256 to 2048 x 2048 weights and 64 to 512 rows:
    0.75 to 1.05 of the batched product's time. With 10 rows, or where n divides by the threads, it
    takes up to 1.7.
    """
    if weight.shape[0] % torch.get_num_threads() == 0 or not x.is_cpu:
        return False
    rows, (_, out, inner) = x.shape[-2], weight.shape
    exact = x.dtype == torch.float32 or x.dtype == torch.float64
    return exact and rows >= LEAST_ROWS and rows * out * inner >= LEAST_WORK


def _each(x: Tensor, weight: Tensor) -> Tensor:
    """A batch ``[n, B, in]`` a member, from one that is shared, ``[B, in]``."""
    return x if x.dim() == 3 else x.expand(weight.shape[0], *x.shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.apart = _one_by_one(x, weight)
        return (_products if ctx.apart else _product)(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        recorded = is_recorded(grad)
        apart = ctx.apart and not recorded
        d_x = d_weight = None
        if of_x and x.dim() == 2:  # One product sums over the members.
            d_x = _joint(grad) @ weight.flatten(0, 1)
        elif of_x and apart:
            d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            _multiply(grad, weight, d_x)
        elif of_x:
            d_x = torch.bmm(grad, weight)
        if of_weight and recorded:
            d_weight = torch.bmm(grad.mT, _each(x, weight))
        elif of_weight:
            d_weight = gradient_memory(weight)
            if _in_cpp(grad, x, d_weight):
                _write(grad, x, d_weight)
            elif apart and x.dim() == 2 and d_weight.is_contiguous():
                torch.mm(_joint(grad).T, x, out=d_weight.flatten(0, 1))
            elif apart:
                _multiply(grad.mT, _each(x, weight), d_weight)
            else:
                torch.bmm(grad.mT, _each(x, weight), out=d_weight)
        return d_x, d_weight, grad.sum(1) if of_bias else None


def _joint(grad: Tensor) -> Tensor:
    """Of ``[n, B, out]`` the rows ``[B, n * out]`` of one layer with all members' outputs."""
    n, rows, out = grad.shape
    # Not flatten, which the vmap of is_grads_batched doesn't have.
    return grad.transpose(0, 1).reshape(rows, n * out)


def _in_cpp(grad: Tensor, x: Tensor, d_weight: Tensor) -> bool:
    """Whether the weight's gradient is a product in C++.

    Measured on one thread and on two for n = 3, 784 x 1024 to 4096 x 4096 weights and 10 to 256
    rows: 0.4 to 0.95 of the library's time. With smaller weights, or 1024 rows: up to 1.2.
    """
    one = d_weight if x.dim() == 2 else d_weight[0]
    return (
        one.nbytes >= LARGE_WEIGHT
        and 0 < x.shape[-2] <= MOST_ROWS
        and x.is_cpu
        and grad.dtype == x.dtype == d_weight.dtype == torch.float32
        and d_weight.is_contiguous()
        and is_eager(grad)
        and native.available()
    )


def _write(grad: Tensor, x: Tensor, d_weight: Tensor) -> None:
    if x.dim() == 2:
        _write_one(_joint(grad), x, d_weight.flatten(0, 1))
    else:
        for i in range(len(grad)):
            _write_one(grad[i], x[i], d_weight[i])


def _write_one(grad: Tensor, x: Tensor, d_weight: Tensor) -> None:
    grad, x, d_weight = (t.contiguous()[..., None, None] for t in (grad, x, d_weight))
    torch.ops.ensemblayers.conv2d_weight_gradient.default(
        grad, x, d_weight, stride=[1, 1], padding=[0, 0], dilation=[1, 1]
    )
