"""BatchEnsemble's linear layer: ``y_m = (x_m * r_m) W^T * s_m + bias_m`` for the rows of member m.

Plain PyTorch is the definition. For training on a CPU, C++ (``csrc/batch_ensemble_linear.cpp``)
computes r's gradient along with W's, in the time of one product, where autograd takes a further
one: a first layer has no use for the gradient of its scaled input. Kept for the backward pass are x
and the products before s, not the scaled x.

Without gradients, r and s are folded into n weights where that touches fewer elements than to scale
x and y (:func:`folds`).
"""

import torch
from torch import Tensor

from .._gradients import gradient_memory, writes_gradients
from .._transforms import is_recorded
from . import native

LEAST_ROWS = 4  # A member's, from which on the C++ kernels are faster.
FOLD = 1.5  # How many times the elements of n weights those of x and y have to be.


def plain_linear(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
    """The definition.

    Shape:
        - x: ``[n * b, in]``, weight: ``[out, in]``, r: ``[n, in]``, s and bias: ``[n, out]``
        - Output: ``[n * b, out]``
    """
    n, (rows, inner) = len(r), x.shape
    scaled = x.reshape(n, rows // n, inner) * r.unsqueeze(1).to(x.dtype)
    y = torch.nn.functional.linear(scaled, weight)
    s = s.unsqueeze(1).to(y.dtype)  # Under autocast y's dtype is not that of the others.
    shifted = y * s if bias is None else torch.addcmul(bias.unsqueeze(1).to(y.dtype), y, s)
    return shifted.flatten(0, 1)


def linear(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
    """As :func:`plain_linear`, by the C++ kernels where they are faster."""
    if _in_cpp(x, weight, r, s, bias):
        return _Linear.apply(x, weight, r, s, bias)
    if folds(x, weight, r):
        return folded_linear(x, weight, r, s, bias)
    return plain_linear(x, weight, r, s, bias)


def folds(x: Tensor, weight: Tensor, r: Tensor) -> bool:
    """Whether n weights are the faster way: without gradients, on a CPU, from enough rows on.

    Measured on one thread for 10 x 256 to 2048 x 2048 weights and 16 to 2048 rows a member: above
    the bound, the folded form costs 0.9 to 1.5 of a plain layer on the same rows, the scaled one
    1.1 to 2.1, below it the other way round.
    """
    return (
        not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and len(x) * sum(weight.shape) > FOLD * len(r) * weight.numel()
    )


def folded_linear(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
    """As :func:`plain_linear`, by n weights ``[out, in]`` and one batched product."""
    weights = weight * s.unsqueeze(2) * r.unsqueeze(1)
    rows = x.reshape(len(r), len(x) // len(r), x.shape[1])
    if bias is None:
        return torch.bmm(rows, weights.mT).flatten(0, 1)
    return torch.baddbmm(bias.unsqueeze(1), rows, weights.mT).flatten(0, 1)


def _in_cpp(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None) -> bool:
    dtype = x.dtype
    return (
        x.device.type == weight.device.type == "cpu"
        and (dtype == torch.float32 or dtype == torch.float64)
        and dtype == weight.dtype == r.dtype == s.dtype
        and (bias is None or bias.dtype == dtype)
        and len(x) >= LEAST_ROWS * len(r)
        and weight.is_contiguous()
        and writes_gradients(x, weight, r, s, bias)
        and not torch.is_autocast_enabled("cpu")
        and native.available()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, r, s, bias):
        out, y = torch.ops.ensemblayers.batch_ensemble_forward.default(x, weight, r, s, bias)
        ctx.save_for_backward(x, weight, r, s, bias, y)
        return out

    @staticmethod
    def backward(ctx, grad):
        *inputs, y = ctx.saved_tensors
        of_x, of_weight, of_r, of_s, of_bias = needs = ctx.needs_input_grad
        if is_recorded(grad):
            return _differentiable(grad, inputs, needs)
        x, weight, r, s, _ = inputs
        d_weight = gradient_memory(weight) if of_weight or of_r else None
        d_x, d_r, d_s, d_bias = torch.ops.ensemblayers.batch_ensemble_backward.default(
            grad, x, weight, r, s, y, d_weight, of_x
        )
        return (
            d_x if of_x else None,
            d_weight if of_weight else None,
            d_r if of_r else None,
            d_s if of_s else None,
            d_bias if of_bias else None,
        )


def _differentiable(grad: Tensor, inputs: list[Tensor | None], needs: tuple[bool, ...]):
    wanted = [k for k, need in enumerate(needs) if need]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since one tensor may be several of the inputs.
        own = [None if t is None else t.view_as(t) for t in inputs]
        y = plain_linear(*own)
    found = torch.autograd.grad(y, [own[k] for k in wanted], grad, create_graph=again)
    gradients = dict(zip(wanted, found, strict=True))
    return tuple(gradients.get(k) for k in range(len(inputs)))
