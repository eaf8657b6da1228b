"""BatchEnsemble's scales: each member's channels times its own factors, plus its own shifts.

On CUDA in eager mode the gradients are one pass in Triton (:mod:`.member_scale_triton`) that reads
the gradient and x, and writes x's gradient and the sums for the factors; autograd's elementwise
operations take four, two of which write a product as large as x only to sum it. Under torch.compile
plain PyTorch stands, which Inductor fuses with what is before and after.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _triton
from ._autograd import define, differentiable


def of_groups(members: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of tensors ``[n, ...]`` the rows of the members of consecutive equal groups of examples."""
    if members is None:
        return tensors
    return tuple(None if t is None else t.index_select(0, members) for t in tensors)


def to_members(shares: Tensor, members: Tensor | None, like: Tensor) -> Tensor:
    """Sum shares ``[groups, ...]`` by member: the gradient of :func:`of_groups`."""
    if members is not None:
        zeros = shares.new_zeros(like.shape)
        shares = zeros.index_add(0, members, shares)
    return shares.to(like.dtype)


def plain_scale(x: Tensor, scale: Tensor, shift: Tensor | None, members: Tensor | None) -> Tensor:
    """The definition, in x's dtype.

    Shape:
        - x: ``[groups * b, channels, *space]``
        - scale: ``[n, channels]``, shift: ``[n, channels]``
        - members: ``[groups]``, the member of each; None: there are n, one a member
    """
    scale, shift = of_groups(members, scale, shift)
    folded, scale = _folded(x, scale)
    # Not torch.addcmul, which is slow for factors that are constant along the last dimension.
    out = folded * scale.to(x.dtype)
    if shift is not None:
        out = out + _folded(x, shift)[1].to(x.dtype)
    return out.flatten(0, 1)


def _scale_by_rows(
    x: Tensor, scale: Tensor, shift: Tensor | None, members: Tensor | None
) -> Tensor:
    """As :func:`plain_scale`, with x as it is: Inductor can't order a fold's dynamic strides."""

    def rows(factors: Tensor) -> Tensor:
        folded, factors = _folded(x, factors)
        return factors.expand(*folded.shape[:3], *factors.shape[3:]).flatten(0, 1).to(x.dtype)

    scale, shift = of_groups(members, scale, shift)
    out = x * rows(scale)
    return out if shift is None else out + rows(shift)


def _folded(x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """x as ``[groups, b, channels, *space]``, and factors ``[groups, channels]`` to broadcast."""
    # An empty batch leaves no -1 to infer.
    groups = factors.shape[0]  # len() would make a size of an export constant.
    folded = x.unflatten(0, (groups, x.shape[0] // groups))
    return folded, factors.reshape(groups, 1, -1, *(1,) * (folded.dim() - 3))


def plain_scale_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    members: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, scale and shift; empty where not needed.

    ``needs`` has a flag for each input, members' among them, which has no gradient.
    """
    found = [x.new_empty(0), scale.new_empty(0), (grad if shift is None else shift).new_empty(0)]
    (own,) = of_groups(members, scale)
    folded, factors = _folded(grad, own)
    others = [1, *range(3, folded.dim())]
    if needs[0]:
        found[0] = (folded * factors.to(grad.dtype)).flatten(0, 1)
    if needs[1]:
        found[1] = to_members((folded * _folded(x, own)[0]).sum(others), members, scale)
    if needs[2]:
        found[2] = to_members(folded.sum(others), members, shift)
    return tuple(found)


def dense(x: Tensor) -> Tensor:
    """x without gaps, its channels first or last in a row's memory."""
    return x if x.movedim(1, -1).is_contiguous() else x.contiguous()


# ------------------------------------------------------------------------------------ registration


def _cuda(x, scale, shift, members):
    return _triton.module("member_scale").forward(x, scale, shift, members)


def _cuda_backward(grad, x, scale, shift, members, needs):
    return _triton.module("member_scale").backward(grad, x, scale, shift, members, needs)


def _fake_backward(grad, x, scale, shift, members, needs):
    return (
        torch.empty_like(dense(x)) if needs[0] else x.new_empty(0),
        scale.new_empty(scale.shape if needs[1] else 0),
        (grad if shift is None else shift).new_empty(shift.shape if needs[2] else 0),
    )


_forward_op = define(
    "member_scale(Tensor x, Tensor scale, Tensor? shift, Tensor? members) -> Tensor",
    plain=plain_scale,
    cuda=_cuda,
    fake=lambda x, scale, shift, members: torch.empty_like(dense(x)),
)
_backward_op = define(
    "member_scale_backward(Tensor grad, Tensor x, Tensor scale, Tensor? shift, Tensor? members,"
    " bool[] needs) -> (Tensor, Tensor, Tensor)",
    plain=plain_scale_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)

fused_scale = differentiable(
    lambda *arguments: (_forward_op(*arguments[:-1]),),
    _backward_op,
    lambda *arguments: (plain_scale(*arguments[:-1]),),
    plain_scale_backward,
)


def scale(x: Tensor, scale: Tensor, shift: Tensor | None, members: Tensor | None) -> Tensor:
    """As :func:`plain_scale`, by the Triton kernels where they can run and pay."""
    if torch.compiler.is_compiling():
        return _scale_by_rows(x, scale, shift, members)
    if not _triton.takes(x, scale, shift):
        return plain_scale(x, scale, shift, members)
    if _triton.takes_index(members, x):
        return fused_scale(x, scale, shift, members)
    return plain_scale(x, scale, shift, members)
