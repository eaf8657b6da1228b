"""Linear layers of n networks as one batched product.

Where gradients are recorded, the weight's is written in the weight's own layout, which autograd's
is not, into memory that is kept. That of a large weight is computed on a CPU in C++
(``csrc/conv_weight_gradient.cpp``, for which a linear layer is a convolution with one place): it
writes past the caches, which would read first what is overwritten.
"""

import torch
from torch import Tensor

from .._autocast import autocast_dtype
from .._gradients import gradient_memory, is_eager, writes_gradients
from .._transforms import is_recorded
from . import native

# Of a product in C++: the weights, in bytes, from which on, and the rows up to which it is faster.
LARGE_WEIGHT, MOST_ROWS = 8 << 20, 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs ``[n, B, out]`` of n linear layers.

    Shape:
        - x: ``[n, B, in]``, or ``[B, in]`` for all
        - weight: ``[n, out, in]``, bias: ``[n, out]``
    """
    device = "cpu" if x.is_cpu else x.device.type  # The latter is slow.
    if writes_gradients(x, weight, bias) and autocast_dtype(device) is None:
        return _Linear.apply(x, weight, bias)
    return _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = _each(x, weight)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _each(x: Tensor, weight: Tensor) -> Tensor:
    """A batch ``[n, B, in]`` a member, from one that is shared, ``[B, in]``."""
    return x if x.dim() == 3 else x.expand(weight.shape[0], *x.shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        d_x = d_weight = None
        if of_x and x.dim() == 3:
            d_x = torch.bmm(grad, weight)
        elif of_x:  # One product sums over the members.
            d_x = _joint(grad) @ weight.flatten(0, 1)
        if of_weight and is_recorded(grad):
            d_weight = torch.bmm(grad.mT, _each(x, weight))
        elif of_weight:
            d_weight = gradient_memory(weight)
            if _in_cpp(grad, x, d_weight):
                _write(grad, x, d_weight)
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
