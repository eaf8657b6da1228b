"""BatchEnsemble's linear layer: ``y_m = (x_m * r_m) W^T * s_m + bias_m`` for the rows of member m.

Plain PyTorch is the definition. For training on a CPU, C++ (``csrc/batch_ensemble_linear.cpp``)
takes as many products as a plain layer: where x needs no gradient, as in a first layer, r's comes
from one product along with W's, where autograd takes a further one; else from that of the scaled x.
Kept for the backward pass are x and the products before s, not the scaled x. From some rows on,
with a weight that fits into a cache (:func:`is_own`), the products are its own, which scale as they
load and store, without gradients too; else they are the library's between passes that scale.
Without gradients r and s are then folded into n weights where that touches fewer elements
(:func:`folds`).

On CUDA, in Triton (:mod:`.batch_ensemble_linear_triton`), only x is kept. Which algorithm is taken
(:func:`algorithm`), and for x's gradient with the parts of x and y, r and s exchanged; the bounds
are reckoned, not measured, and ``benchmarks/gpu.py`` measures them:

====== =============================== =========================================================
name   when                            what
====== =============================== =========================================================
folded over 2 * in rows a member       n weights ``W * s_m r_m^T``, one batched product
scaled no tensor cores and over 128    the library's product between two passes that scale x and
       rows; or from 4096 rows and     y
       4096 x 4096 weights on
fused  else                            x is scaled as the product loads it, y as it is stored
====== =============================== =========================================================

Rows with a member each by index are never folded. The gradients of W, r and s come from the
products ``H_m = g_m^T x_m``, the cost of a plain layer's: ``dW = sum_m s_m r_m^T * H_m``, and those
of s_m and r_m are the sums of ``r_m * W * H_m`` and ``s_m * W * H_m`` over in and out. One kernel
computes H_m and keeps it in registers, or, from many rows on (:func:`gradient_algorithm`), reads
what the library's batched product wrote.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._gradients import gradient_memory, is_eager, records
from .._transforms import is_recorded
from . import _triton, native
from ._autograd import define, differentiable
from .member_scale import of_groups, to_members
from .mix import no_autocast

LEAST_ROWS = 4  # A member's, from which on the C++ kernels are faster.
OWN_ROWS, OWN_WEIGHT = 128, 4 << 20  # From and up to (bytes).
FOLD = 1.5  # How many times the elements of n weights those of x and y have to be.

# On CUDA:
FOLDED_ROWS = 2  # Times the features in, rows a member: more are worth n weights.
LARGE_ROWS, LARGE_WEIGHT = 4096, 4096**2  # From both on, the library's product is the faster one.
FUSED_ROWS = 128  # Without tensor cores.
GRADIENT_ROWS = 2048  # A member's: more are worth writing and reading its H.

forced = _triton.Forced("fused", "scaled", "folded")


def algorithm(x: Tensor, weight: Tensor, groups: int, indexed: bool) -> str:
    """The algorithm's name on CUDA.

    Args:
        x, weight: ``[rows, in]``, ``[out, in]``.
        groups: how many groups of consecutive rows have one member each.
        indexed: whether an index says which.
    """
    if forced.name is not None and not (indexed and forced.name == "folded"):
        return forced.name
    rows = x.shape[0]
    if not indexed and rows > FOLDED_ROWS * x.shape[1] * groups:
        return "folded"
    if not _triton.on_tensor_cores(x):
        return "scaled" if rows > FUSED_ROWS else "fused"
    return "scaled" if rows >= LARGE_ROWS and weight.numel() >= LARGE_WEIGHT else "fused"


def gradient_algorithm(x: Tensor, groups: int, indexed: bool) -> str:
    """That of the gradients of W, r and s: ``"fused"`` or ``"library"``."""
    if indexed:  # A member's rows are anywhere.
        return "fused"
    if _triton.on_tensor_cores(x):
        return "fused" if x.shape[0] <= GRADIENT_ROWS * groups else "library"
    return "fused" if x.shape[0] <= FUSED_ROWS else "library"


def plain_linear(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
    """The definition.

    Shape:
        - x: ``[n * b, in]``, weight: ``[out, in]``, r: ``[n, in]``, s and bias: ``[n, out]``
        - Output: ``[n * b, out]``
    """
    n, (rows, inner) = r.shape[0], x.shape  # len() would make a size of an export constant.
    scaled = x.reshape(n, rows // n, inner) * r.unsqueeze(1).to(x.dtype)
    y = torch.nn.functional.linear(scaled, weight)
    s = s.unsqueeze(1).to(y.dtype)  # Under autocast y's dtype is not that of the others.
    shifted = y * s if bias is None else torch.addcmul(bias.unsqueeze(1).to(y.dtype), y, s)
    return shifted.flatten(0, 1)


def linear(
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    s: Tensor,
    bias: Tensor | None,
    members: Tensor | None = None,
) -> Tensor:
    """As :func:`plain_linear`, by the fastest way there is.

    Args:
        members: the members ``[groups]`` of the groups into which the rows divide; None: each
            member has one, in their order.
    """
    if not x.is_cpu and takes(x, weight, r, s, bias, members):
        return fused_linear(x, weight, r, s, bias, members)
    r, s, bias = of_groups(members, r, s, bias)
    recorded = records(x, weight, r, s, bias)
    if _in_cpp(x, weight, r, s, bias, recorded):
        if recorded:
            return _Linear.apply(x, weight, r, s, bias)
        return _forward(x, weight, r, s, bias, True, False)[0]
    if folds(x, weight, r):
        return folded_linear(x, weight, r, s, bias)
    return plain_linear(x, weight, r, s, bias)


def is_own(x: Tensor, weight: Tensor) -> bool:
    """Whether C++'s own products are the faster ones on a CPU.

    Measured on one thread and on two for 10 x 256 to 2048 x 2048 weights and 40 to 2048 rows: of a
    plain layer's time, they take 0.8 to 1.1 forward and 0.9 to 1.1 backward, the library's between
    passes 0.9 to 1.2 and 1.0 to 1.2; with fewer rows or a larger weight it is the other way round.
    """
    return x.shape[0] >= OWN_ROWS and weight.numel() * weight.element_size() <= OWN_WEIGHT


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
        and x.shape[0] * sum(weight.shape) > FOLD * len(r) * weight.numel()
    )


def folded_linear(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
    """As :func:`plain_linear`, by n weights ``[out, in]`` and one batched product."""
    weights = weight * s.unsqueeze(2) * r.unsqueeze(1)
    rows = x.reshape(len(r), x.shape[0] // len(r), x.shape[1])
    if bias is None:
        return torch.bmm(rows, weights.mT).flatten(0, 1)
    return torch.baddbmm(bias.unsqueeze(1), rows, weights.mT).flatten(0, 1)


def _in_cpp(
    x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None, recorded: bool
) -> bool:
    dtype = x.dtype
    return (
        x.is_cpu
        and weight.is_cpu
        and (dtype == torch.float32 or dtype == torch.float64)
        and dtype == weight.dtype == r.dtype == s.dtype
        and (bias is None or bias.dtype == dtype)
        and is_eager(x, weight, r, s, bias)  # Before the rows, which an export leaves open.
        and (recorded or is_own(x, weight))
        and x.shape[0] >= LEAST_ROWS * r.shape[0]
        and _fit(x, weight, r, s, bias)
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
        and native.available()
    )


def _forward(*arguments) -> tuple[Tensor, Tensor]:
    return torch.ops.ensemblayers.batch_ensemble_forward.default(*arguments)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, r, s, bias):
        ctx.own = is_own(x, weight)
        out, y = _forward(x, weight, r, s, bias, ctx.own, True)
        ctx.save_for_backward(x, weight, r, s, bias, y)
        return out

    @staticmethod
    def backward(ctx, grad):
        *inputs, y = ctx.saved_tensors
        of_x, of_weight, of_r, of_s, of_bias = needs = ctx.needs_input_grad
        if is_recorded(grad):
            return _differentiable(grad, inputs, needs)
        x, weight, r, s, _ = inputs
        d_weight = gradient_memory(weight) if of_weight else None
        of_scaled = of_x or (of_r and not of_weight)
        d_x, d_r, d_s, d_bias = torch.ops.ensemblayers.batch_ensemble_backward.default(
            grad, x, weight, r, s, y, d_weight, of_scaled, ctx.own
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


# -------------------------------------------------------------------------------------------- CUDA


def plain_members_linear(
    x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None, members: Tensor | None
) -> Tensor:
    """:func:`plain_linear` in the dtype of x, with the members of groups of rows by index."""
    r, s, bias = of_groups(members, r, s, bias)
    with no_autocast(x.device.type):
        return plain_linear(x, weight.to(x.dtype), r, s, bias)


def plain_members_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    s: Tensor,
    bias: Tensor | None,
    members: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, r, s and bias; empty where not needed.

    ``needs`` has a flag for each input, members' among them, which has no gradient.
    """
    inputs = (x, weight, r, s, bias)
    found = [(grad if t is None else t).new_empty(0) for t in inputs]
    own_r, own_s = (t.unsqueeze(1).to(x.dtype) for t in of_groups(members, r, s))
    groups = len(own_r)
    x, g = (t.reshape(groups, t.shape[0] // groups, t.shape[1]) for t in (x, grad))
    with no_autocast(x.device.type):
        w = weight.to(x.dtype)
        x_r, g_s = x * own_r, g * own_s
        if needs[0] or needs[2]:
            d_x_r = g_s @ w
        if needs[0]:
            found[0] = (d_x_r * own_r).flatten(0, 1)
        if needs[1]:
            found[1] = (g_s.flatten(0, 1).mT @ x_r.flatten(0, 1)).to(weight.dtype)
        if needs[2]:
            found[2] = to_members((d_x_r * x).sum(1), members, r)
        if needs[3]:
            found[3] = to_members((g * (x_r @ w.mT)).sum(1), members, s)
        if needs[4]:
            found[4] = to_members(g.sum(1), members, bias)
    return tuple(found)


def _cuda(x, weight, r, s, bias, members):
    return _triton.module("batch_ensemble_linear").forward(x, weight, r, s, bias, members)


def _cuda_backward(*arguments):
    return _triton.module("batch_ensemble_linear").backward(*arguments)


def _fake_backward(grad, x, weight, r, s, bias, members, needs):
    return tuple(
        (grad if t is None else t).new_empty(t.shape if need else 0)
        for t, need in zip((x, weight, r, s, bias), needs, strict=False)
    )


_forward_op = define(
    "batch_ensemble_linear(Tensor x, Tensor weight, Tensor r, Tensor s, Tensor? bias,"
    " Tensor? members) -> Tensor",
    plain=plain_members_linear,
    cuda=_cuda,
    fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]),
)
_backward_op = define(
    "batch_ensemble_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor r, Tensor s,"
    " Tensor? bias, Tensor? members, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    plain=plain_members_linear_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)

rows_linear = differentiable(
    lambda *arguments: (_forward_op(*arguments[:-1]),),
    _backward_op,
    lambda *arguments: (plain_members_linear(*arguments[:-1]),),
    plain_members_linear_backward,
)


def _fit(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None) -> bool:
    """Whether shapes are those of the definition; others broadcast in it, or are torch's errors."""
    inner = x.shape[1] == weight.shape[1] == r.shape[1]
    outer = s.shape == (r.shape[0], weight.shape[0])
    return inner and outer and (bias is None or bias.shape == s.shape)


def takes(
    x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None, members: Tensor | None
) -> bool:
    """Whether :func:`fused_linear` can take these tensors; what it can't has torch's errors."""
    if not (_triton.takes(x, weight, r, s, bias) and _triton.takes_index(members, x)):
        return False
    if not _fit(x, weight, r, s, bias):
        return False
    return x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)


def fused_linear(
    x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None, members: Tensor | None
) -> Tensor:
    """:func:`linear` by its kernels.

    Under autocast x is cast, and the output is in its dtype; the others are cast when loaded.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    return rows_linear(x, weight, r, s, bias, members)
