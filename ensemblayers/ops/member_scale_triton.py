"""BatchEnsemble's scales in Triton, and their gradients: one pass each.

:mod:`.member_scale` defines them. A program takes a tile of one row, ``[C, S]`` of its channels and
its space, in whichever order they lie in memory. Sums go through a buffer in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .member_scale import dense, plain_scale, plain_scale_backward

BLOCK = 1024  # elements of a tile
WARPS = 4
_PLAIN = ["members", "n", "each", "scale_member", "shift_member"]

# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def member_of(members, group, mask, n, INDEXED: tl.constexpr):
    """The members of groups, and whether there are such."""
    if INDEXED:
        i_member = tl.load(members + group, mask=mask, other=0).to(tl.int64)
        found = (i_member >= 0) & (i_member < n)
        return tl.where(found, i_member, 0), found
    return group, mask


@triton.jit
def _place(channels, space, x_channel, x_space, C: tl.constexpr, S: tl.constexpr):
    """A program's row, its channels, and the offsets of its tile in x."""
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    o_p = tl.program_id(2).to(tl.int64) * S + tl.arange(0, S)
    o_x = i_row * channels * space + o_c[:, None] * x_channel + o_p[None, :] * x_space
    return i_row, o_c, o_x, (o_c < channels)[:, None] & (o_p < space)[None, :]


@triton.jit(do_not_specialize=_PLAIN)
def scale_kernel(
    x,  # [PARTS, rows, channels, space], channels and space in any order
    scale,  # [n, channels]
    shift,  # [n, channels]
    members,  # [rows / each]
    y,  # [rows, channels, space], as x
    n,
    channels,
    space,
    each,
    x_channel,
    x_space,
    scale_member,
    scale_channel,
    shift_member,
    shift_channel,
    INDEXED: tl.constexpr,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    i_row, o_c, o_x, m_x = _place(channels, space, x_channel, x_space, C, S)
    i_member, found = member_of(members, i_row // each, i_row >= 0, n, INDEXED)
    m_c = o_c < channels
    # Of a member that isn't there the factors, and so the outputs, are NaN.
    p_scale = scale + i_member * scale_member + o_c * scale_channel
    b_scale = tl.load(p_scale, mask=m_c & found, other=float("nan")).to(tl.float32)
    b_y = tl.zeros((C, S), tl.float32)
    size = tl.num_programs(0).to(tl.int64) * channels * space
    for i in tl.static_range(PARTS):
        b_y += tl.load(x + i * size + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y *= b_scale[:, None]
    if SHIFT:
        p_shift = shift + i_member * shift_member + o_c * shift_channel
        b_y += tl.load(p_shift, mask=m_c, other=0.0).to(tl.float32)[:, None]
    tl.store(y + o_x, b_y.to(y.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=_PLAIN)
def scale_backward_kernel(
    grad,  # [rows, channels, space], as x
    x,  # [rows, channels, space]
    scale,  # [n, channels]
    members,  # [rows / each]
    d_x,  # [rows, channels, space], as x
    d_scale,  # [tiles of space, rows, channels]
    d_shift,  # [tiles of space, rows, channels]
    n,
    channels,
    space,
    each,
    x_channel,
    x_space,
    scale_member,
    scale_channel,
    INDEXED: tl.constexpr,
    X: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    i_row, o_c, o_x, m_x = _place(channels, space, x_channel, x_space, C, S)
    m_c = o_c < channels
    b_g = tl.load(grad + o_x, mask=m_x, other=0.0).to(tl.float32)
    o_sum = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + i_row) * channels + o_c
    if X:
        i_member, found = member_of(members, i_row // each, i_row >= 0, n, INDEXED)
        p_scale = scale + i_member * scale_member + o_c * scale_channel
        b_scale = tl.load(p_scale, mask=m_c & found, other=float("nan")).to(tl.float32)
        tl.store(d_x + o_x, (b_g * b_scale[:, None]).to(d_x.dtype.element_ty), mask=m_x)
    if SCALE:
        b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(d_scale + o_sum, tl.sum(b_g * b_x, 1), mask=m_c)
    if SHIFT:
        tl.store(d_shift + o_sum, tl.sum(b_g, 1), mask=m_c)


# ------------------------------------------------------------------------------------------- launch


def forward(x: Tensor, scale: Tensor, shift: Tensor | None, members: Tensor | None) -> Tensor:
    """As :func:`.member_scale.plain_scale`."""
    if not x.numel():
        return plain_scale(x, scale, shift, members)
    x = dense(x)
    y = torch.empty_like(x)
    scale_into(y, x, scale, shift, members)
    return y


def scale_into(
    y: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    members: Tensor | None,
    parts: int = 1,
) -> None:
    """Scale x into y, which may be x; with ``parts``, the sum of x ``[parts, *y.shape]``."""
    grid, sizes, tile = _tiling(y, scale, members)
    with torch.cuda.device_of(y):
        scale_kernel[grid](
            *(x, scale, shift, members, y, *sizes, *scale.stride()),
            *((0, 0) if shift is None else shift.stride()),
            **{"INDEXED": members is not None, "SHIFT": shift is not None, "PARTS": parts, **tile},
            num_warps=WARPS,
        )


def backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    members: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`.member_scale.plain_scale_backward`."""
    if not x.numel():
        return plain_scale_backward(grad, x, scale, shift, members, needs)
    x = dense(x)
    grad = torch.empty_like(x, dtype=grad.dtype).copy_(grad) if _unlike(grad, x) else grad
    grid, sizes, tile = _tiling(x, scale, members)
    d_x = torch.empty_like(x) if needs[0] else x.new_empty(0)
    sums = [
        x.new_empty(grid[2], *x.shape[:2], dtype=torch.float32) if need else None
        for need in needs[1:3]
    ]
    with torch.cuda.device_of(x):
        scale_backward_kernel[grid](
            *(grad, x, scale, members, d_x, *sums, *sizes, *scale.stride()),
            **{"X": needs[0], "SCALE": needs[1], "SHIFT": needs[2]},
            **{"INDEXED": members is not None, **tile},
            num_warps=WARPS,
        )
    factors = (
        (grad if like is None else like).new_empty(0)
        if own is None
        else _by_member(own, members, like)
        for own, like in zip(sums, (scale, shift), strict=True)
    )
    return d_x, *factors


def _unlike(grad: Tensor, x: Tensor) -> bool:
    """Whether a gradient lies in memory in another way; strides of dimensions of 1 say nothing."""
    pairs = zip(grad.stride(), x.stride(), x.shape, strict=True)
    return any(size > 1 and a != b for a, b, size in pairs)


def _by_member(sums: Tensor, members: Tensor | None, like: Tensor) -> Tensor:
    """Add up sums ``[tiles, rows, channels]`` by member, in a fixed order."""
    n = len(like)
    rows = sums.sum(0)
    groups = rows.unflatten(0, (n if members is None else len(members), -1)).sum(1)
    if members is not None:
        own = members == torch.arange(n, device=members.device).unsqueeze(1)
        groups = (own.unsqueeze(2) * groups).sum(1)
    return groups.to(like.dtype)


def _tiling(x: Tensor, scale: Tensor, members: Tensor | None):
    """The grid, the kernels' sizes and their tile for x ``[rows, channels, *space]``, dense."""
    rows, channels = x.shape[:2]
    space = x[0, 0].numel()
    last = x.is_contiguous()
    wide = triton.next_power_of_2(space if last else channels)
    wide = min(wide, BLOCK)
    narrow = min(triton.next_power_of_2(channels if last else space), BLOCK // wide)
    c, s = (narrow, wide) if last else (wide, narrow)
    each = rows // (len(scale) if members is None else len(members))
    sizes = (len(scale), channels, space, each, *((space, 1) if last else (1, channels)))
    grid = (rows, triton.cdiv(channels, c), triton.cdiv(space, s))
    return grid, sizes, {"C": c, "S": s}
