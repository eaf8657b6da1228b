"""The layers' operations as pure functions of tensors: the definition of what each means.

``n`` is the number of members, ``B`` a batch, ``in`` and ``out`` features or channels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from . import ops

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def mix(stacked: Tensor, alpha: Tensor) -> Tensor:
    """Combine n stacked tensors with the weights alpha: ``sum_i alpha_i stacked_i``.

    Half-precision tensors are combined in alpha's precision and rounded once; autocast does not
    touch alpha.

    Shape:
        - stacked: ``[n, *shape]``
        - alpha: ``[n]`` or ``[B, n]``
        - Output: ``[*shape]`` or ``[B, *shape]``, in the dtype of ``stacked``.

    >>> import torch
    >>> mix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 0.5]))
    tensor([2., 3.])
    """
    if alpha.shape[-1] != stacked.shape[0]:
        raise ValueError(
            f"expected {stacked.shape[0]} weights for stacked {list(stacked.shape)}, "
            f"got alpha {list(alpha.shape)}"
        )
    return ops.mix.mix(stacked, alpha)


def subspace_linear(x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor) -> Tensor:
    """Linear layer at the point alpha of the simplex of n weight sets.

    Shape:
        - x: ``[..., in]``; ``[B, ..., in]`` for a point per example
        - weight: ``[n, out, in]``, bias: ``[n, out]``
        - alpha: ``[n]``, or ``[B, n]`` for a point per example
        - Output: ``[..., out]``

    Source: Wortsman et al. 2021, https://arxiv.org/abs/2102.10472

    >>> import torch
    >>> x, weight, bias = torch.ones(2, 3), torch.ones(2, 4, 3), torch.zeros(2, 4)
    >>> subspace_linear(x, weight, bias, torch.tensor([0.5, 0.5]))
    tensor([[3., 3., 3., 3.],
            [3., 3., 3., 3.]])
    """
    if alpha.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"expected {weight.shape[0]} weights for weight {list(weight.shape)}, "
            f"got alpha {list(alpha.shape)}"
        )
    if alpha.dim() == 2:
        check_points(x, alpha)
    if ops.subspace_linear.takes(x, weight, bias, alpha):
        return ops.subspace_linear.subspace_linear(x, weight, bias, alpha)
    if alpha.dim() == 1:
        return F.linear(x, mix(weight, alpha), None if bias is None else mix(bias, alpha))
    # sum_i alpha_bi W_i x_b is one product over n * in features: no weight set per example.
    scaled = x.unsqueeze(-2) * _align(alpha, x.dim() + 1, at=-2)
    y = F.linear(scaled.to(x.dtype).flatten(-2), rearrange(weight, "n o i -> o (n i)"))
    return y if bias is None else y + _align(mix(bias, alpha), y.dim(), at=-1).to(y.dtype)


def subspace_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    alpha: Tensor,
    *,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution at the point alpha of the simplex of n weight sets.

    The number of spatial dimensions, 1 to 3, is that of the weight.

    Shape:
        - x: ``[B, in, *space]``, or ``[in, *space]`` where alpha is ``[n]``
        - weight: ``[n, out, in / groups, *kernel]``, bias: ``[n, out]``
        - alpha: ``[n]``, or ``[B, n]`` for a point per example
        - Output: ``[B, out, *space]``

    Source: Wortsman et al. 2021, https://arxiv.org/abs/2102.10472
    """
    options: dict[str, Any] = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    if alpha.dim() == 1:
        if _is_linear(x, weight, stride, padding, groups):
            rows, flat = x.movedim(1, -1), weight.flatten(2)
            if ops.subspace_linear.is_fused(rows, flat, bias, alpha):
                return subspace_linear(rows, flat, bias, alpha).movedim(-1, 1)
        b = None if bias is None else mix(bias, alpha)
        return conv(x, mix(weight, alpha), b, **options)
    if x.dim() != weight.dim() - 1:
        raise ValueError(f"expected x [B, in, *space] with alpha [B, n], got x {list(x.shape)}")
    check_points(x, alpha)
    # As for the linear layer: n * in channels, the n copies side by side within each group.
    grouped = x.unflatten(1, (groups, -1)).unsqueeze(2)
    scaled = grouped * _align(alpha, grouped.dim(), at=2)
    y = conv(scaled.to(x.dtype).flatten(1, 3), weight.transpose(0, 1).flatten(1, 2), **options)
    return y if bias is None else y + _align(mix(bias, alpha), y.dim(), at=1).to(y.dtype)


def _is_linear(x: Tensor, weight: Tensor, stride, padding, groups: int) -> bool:
    """Whether a convolution is a linear layer on the channels, which come last in x's memory."""
    if groups != 1 or weight.shape[3:].numel() != 1 or x.dim() != weight.dim() - 1:
        return False
    steps, edges = ((v,) if isinstance(v, int) else v for v in (stride, padding))
    plain = all(s == 1 for s in steps) and (isinstance(edges, str) or not any(edges))
    return plain and x.movedim(1, -1).is_contiguous()


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """F.conv1d, F.conv2d or F.conv3d: the number of spatial dimensions is the weight's."""
    return _CONV[weight.dim() - 2](x, weight, bias, **options)


def batch_ensemble_linear(
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    s: Tensor,
    bias: Tensor | None = None,
    *,
    members: Tensor | None = None,
) -> Tensor:
    """Linear layer whose member i has the weight ``W * (s_i r_i^T)``.

    With k pairs of fast weights a member it is ``W * sum_j s_ij r_ij^T``, at k times the cost.

    Args:
        members: the member of each row, ``[B]``; None: the batch is member-major.

    Shape:
        - x: ``[n * b, ..., in]``, member-major: rows i * b to (i + 1) * b are member i's; with
          ``members``, ``[B * m, ..., in]``: rows j * m to (j + 1) * m are member members[j]'s
        - weight: ``[out, in]``, r: ``[n, in]``, s: ``[n, out]``, bias: ``[n, out]``;
          r ``[n, k, in]`` and s ``[n, k, out]`` for k pairs
        - Output: x's with ``out`` for ``in``

    Raises:
        ValueError: x without the weight's features, a batch that does not divide by n, or by the
            length of ``members``; ``members`` that are no tensor of integers.

    Source: Wen et al. 2020, https://arxiv.org/abs/2002.06715

    >>> import torch
    >>> r, s = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), torch.tensor([[1.0], [2.0]])
    >>> batch_ensemble_linear(torch.ones(2, 2), torch.ones(1, 2), r, s)
    tensor([[2.],
            [0.]])
    """
    if x.dim() < 2 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"expected x [n * b, ..., in] for a weight {list(weight.shape)}, got {list(x.shape)}"
        )
    members = check_members(x, len(r), members)
    flat = x if x.dim() == 2 else x.flatten(0, -2)

    def one(*fast: Tensor | None) -> Tensor:
        return ops.batch_ensemble_linear.linear(flat, weight, *fast, members)

    y = _over_pairs(one, r, s, bias)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], weight.shape[0])


def batch_ensemble_conv(
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    s: Tensor,
    bias: Tensor | None = None,
    *,
    members: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution whose member i scales its input channels by r_i and its output channels by s_i.

    With k pairs of fast weights a member, the sum of k such convolutions of one weight.

    Args:
        members: the member of each row, ``[B]``; None: the batch is member-major.

    Shape:
        - x: ``[n * b, in, *space]``, member-major; ``[B * m, in, *space]`` with ``members``
        - weight: ``[out, in / groups, *kernel]``
        - r: ``[n, in]`` or ``[n, k, in]``, s: ``[n, out]`` or ``[n, k, out]``, bias: ``[n, out]``
        - Output: x's with ``out`` channels

    Raises:
        ValueError: x without the weight's channels, a batch that does not divide by n, or by the
            length of ``members``; ``members`` that are no tensor of integers.

    Source: Wen et al. 2020, https://arxiv.org/abs/2002.06715
    """
    options: dict[str, Any] = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    if x.dim() != weight.dim() or x.shape[1] != r.shape[-1]:
        raise ValueError(
            f"expected x [n * b, {r.shape[-1]}, *space] for a weight {list(weight.shape)}, "
            f"got {list(x.shape)}"
        )
    members = check_members(x, len(r), members)
    scale = ops.member_scale.scale

    def one(r: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
        return scale(conv(scale(x, r, None, members), weight, **options), s, bias, members)

    return _over_pairs(one, r, s, bias)


def stacked_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, shared: bool = False
) -> Tensor:
    """Linear layers of n networks as one batched product.

    Args:
        shared: whether all have one batch, which is not copied, or a batch each.

    Shape:
        - x: ``[n, ..., in]``, or ``[..., in]`` where it is shared
        - weight: ``[n, out, in]``, bias: ``[n, out]``
        - Output: ``[n, ..., out]``

    Raises:
        ValueError: a bias of another shape, which would be broadcast.

    >>> import torch
    >>> x, weight = torch.ones(4, 3), torch.stack([torch.ones(2, 3), torch.zeros(2, 3)])
    >>> stacked_linear(x, weight, shared=True)[:, 0]
    tensor([[3., 3.],
            [0., 0.]])
    """
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(
            f"expected a bias [n, out] for a weight [n, out, in] {list(weight.shape)}, "
            f"got {list(bias.shape)}"
        )
    if x.dim() != (2 if shared else 3):
        lead = x.shape[:-1] if shared else x.shape[1:-1]
        rows = x.reshape(*(() if shared else x.shape[:1]), math.prod(lead), x.shape[-1])
        y = stacked_linear(rows, weight, bias, shared=shared)
        return y.reshape(y.shape[0], *lead, y.shape[-1])
    return ops.stacked_linear.linear(x, weight, bias)


def check_members(x: Tensor, n: int, members: Tensor | None) -> Tensor | None:
    """``members`` of the rows of x, or None where these are member-major, or there are none."""
    if members is None:
        if x.shape[0] % n:
            raise ValueError(
                f"expected a member-major batch [n * b, ...] that divides by n={n} members, "
                f"got {x.shape[0]} rows"
            )
        return None
    check_index(members)
    if members.dim() != 1:
        raise ValueError(f"expected members [B], the member of each row, got {list(members.shape)}")
    rows, given = x.shape[0], members.shape[0]
    if rows % max(given, 1) or bool(rows) != bool(given):
        raise ValueError(f"expected members of {x.shape[0]} rows, got {len(members)}")
    return members if rows else None


def check_index(members: Tensor) -> None:
    """Raise a ValueError for members that are no tensor of integers that torch indexes by."""
    if not isinstance(members, Tensor):
        raise ValueError(f"expected members as a tensor [B], got {type(members).__name__}")
    if members.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expected members of int64 or int32, got {members.dtype}")


def _over_pairs(one: Callable[..., Tensor], r: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
    """Sum ``one(r_j, s_j, bias)`` over the pairs of fast weights, the bias once."""
    if r.dim() == 2:
        return one(r, s, bias)
    first, *others = zip(r.unbind(1), s.unbind(1), strict=True)
    y = one(*first, bias)
    for pair in others:
        y = y + one(*pair, None)
    return y


def _align(rows: Tensor, dim: int, *, at: int) -> Tensor:
    """View ``[B, k]`` as ``dim`` dimensions, B first and k at ``at``, to broadcast."""
    shape = [1] * dim
    shape[0], shape[at] = rows.shape
    return rows.reshape(shape)


def check_points(x: Tensor, alpha: Tensor) -> None:
    """Raise a ValueError unless alpha [B, n] has a row for each example of x."""
    if x.dim() < 2 or x.shape[0] != alpha.shape[0]:
        raise ValueError(
            f"expected one point for each of the {x.shape[0]} examples of x {list(x.shape)}, "
            f"got alpha {list(alpha.shape)}"
        )
