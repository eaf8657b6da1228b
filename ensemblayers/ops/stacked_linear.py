"""Linear layers of n networks as one batched product, on a CPU at times as several.

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

# A member's multiplications from which on several products are faster than one.
LEAST_WORK = 1 << 23
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
        if _has_parts(x, weight):
            return _in_parts(x, weight, bias)
    return _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = _each(x, weight)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _in_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`_product`, by :func:`_multiply`."""
    y = (x if bias is None else bias).new_empty(weight.shape[0], x.shape[-2], weight.shape[1])
    if bias is not None:
        y.copy_(bias.unsqueeze(1))
    _multiply(x, weight.mT, y, beta=int(bias is not None))
    return y


def _multiply(a: Tensor, b: Tensor, out: Tensor, beta: int = 0) -> None:
    """Set ``out`` to beta times itself plus n products.

    The largest multiple of the number of threads is one batched product, the others follow one by
    one.

    Shape:
        - a: ``[n, rows, inner]``, or ``[rows, inner]`` for all
        - b: ``[n, inner, columns]``, out: ``[n, rows, columns]``
    """
    n, one = out.shape[0], a.dim() == 2
    k = n - n % torch.get_num_threads()
    if k:
        out[:k].baddbmm_(a.expand(k, *a.shape) if one else a[:k], b[:k], beta=beta)
    for i in range(k, n):
        out[i].addmm_(a if one else a[i], b[i], beta=beta)


def _has_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`_multiply` is faster than one batched product.

    In a batched product each thread takes whole members, and some threads wait for the last ones.
    Measured on two threads for n = 3 and 5, 256 x 256 to 2048 x 2048 weights and 10 to 1024 rows:
    0.77 to 1.1 of its time, but with less work up to 1.8.
    """
    n = weight.shape[0]
    idle = -n % torch.get_num_threads()
    if 8 * idle <= n + idle or x.shape[-2] * weight.numel() < LEAST_WORK * n:
        return False
    if x.dim() == 3 and x.shape[0] != n:  # The batched product has the error.
        return False
    return weight.is_cpu and x.dtype in (torch.float32, torch.float64)


def _each(x: Tensor, weight: Tensor) -> Tensor:
    """A batch ``[n, B, in]`` a member, from one that is shared, ``[B, in]``."""
    return x if x.dim() == 3 else x.expand(weight.shape[0], *x.shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return (_in_parts if _has_parts(x, weight) else _product)(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        shared, recorded = x.dim() == 2, is_recorded(grad)
        in_parts = not recorded and _has_parts(x, weight) and is_eager(grad)
        d_x = d_weight = joint = None
        if of_weight and not recorded:
            d_weight = gradient_memory(weight)
        in_cpp = d_weight is not None and _in_cpp(grad, x, d_weight)
        if shared and (of_x or in_parts or in_cpp):
            joint = _joint(grad)

        if of_x and shared:  # One product sums over the members.
            d_x = joint @ weight.flatten(0, 1)
        elif of_x and in_parts:
            d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            _multiply(grad, weight, d_x)
        elif of_x:
            d_x = torch.bmm(grad, weight)

        if of_weight and recorded:
            d_weight = torch.bmm(grad.mT, _each(x, weight))
        elif in_cpp:
            _write(joint if shared else grad, x, d_weight)
        elif of_weight and in_parts and shared and d_weight.is_contiguous():
            torch.mm(joint.T, x, out=d_weight.flatten(0, 1))
        elif of_weight and in_parts:
            _multiply(grad.mT, _each(x, weight), d_weight)
        elif of_weight:
            torch.bmm(grad.mT, _each(x, weight), out=d_weight)
        return d_x, d_weight, grad.sum(1) if of_bias else None


def _joint(grad: Tensor) -> Tensor:
    """A copy of ``[n, B, out]``: rows ``[B, n * out]`` of one layer with all members' outputs."""
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
    """The weight's gradient of ``[n, B, out]``, or of the joint ``[B, n * out]``, in C++."""
    if x.dim() == 2:
        _write_one(grad, x, d_weight.flatten(0, 1))
    else:
        for own in zip(grad, x, d_weight, strict=True):
            _write_one(*own)


def _write_one(grad: Tensor, x: Tensor, d_weight: Tensor) -> None:
    grad, x, d_weight = (t.contiguous()[..., None, None] for t in (grad, x, d_weight))
    torch.ops.ensemblayers.conv2d_weight_gradient.default(
        grad, x, d_weight, stride=[1, 1], padding=[0, 0], dilation=[1, 1]
    )
