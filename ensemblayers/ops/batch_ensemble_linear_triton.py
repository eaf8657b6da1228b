"""BatchEnsemble's linear layer in Triton; :mod:`.batch_ensemble_linear` says what it means.

Two kernels, for any strides:

    product_kernel    y_m = (x_m * r_m) W^T * s_m + bias_m; with W's strides exchanged, and r and s,
                      it is the gradient of x
    gradient_kernel   H_m = g_m^T x_m, a member after the other in registers, and from them the
                      gradients of W, r and s; that of the biases

A row's member is that of its group of consecutive rows: the group's number, or by an index. Where a
tile of rows has one member, r and s are vectors; else they are gathered as x is loaded. Sums over
tiles go through a buffer in a fixed order: the same inputs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .batch_ensemble_linear import (
    algorithm,
    folded_linear,
    gradient_algorithm,
    plain_members_linear,
    plain_members_linear_backward,
)
from .member_scale_triton import forward as scale
from .member_scale_triton import member_of, scale_into
from .mix_triton import _wide
from .subspace_linear_triton import _PROGRAMS, _choose, _common, _tile
from .tuning import Config

# Of these arguments no value and no alignment is worth a compilation.
_PLAIN = ["n", "rows", "each", "members", "order", "starts"]
_PLAIN += ["r_member", "s_member", "b_member"]

# ------------------------------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=_PLAIN)
def product_kernel(
    x,  # [rows, ins]
    weight,  # [outs, ins]
    r,  # [n, ins]
    s,  # [n, outs]
    bias,  # [n, outs]
    members,  # [rows / each]
    y,  # [rows, outs], or with SPLIT the partial sums [SPLIT, rows, outs]
    n,
    rows,
    outs,
    ins,
    each,
    x_row,
    x_in,
    w_out,
    w_in,
    r_member,
    r_in,
    s_member,
    s_out,
    b_member,
    b_out,
    INDEXED: tl.constexpr,
    SAME: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    TRIPS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INS: tl.constexpr,
):
    i_out = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2)
    o_out = i_out * OUTS + tl.arange(0, OUTS)
    m_out = o_out < outs
    if SAME:
        tiles = tl.cdiv(each, ROWS)
        i_group = i_tile // tiles
        o_row = i_group * each + i_tile % tiles * ROWS + tl.arange(0, ROWS)
        m_row = o_row < (i_group + 1) * each
        i_member, found = member_of(members, i_group, i_group >= 0, n, INDEXED)
        p_r = r + i_member * r_member
    else:
        o_row = i_tile * ROWS + tl.arange(0, ROWS)
        m_row = o_row < rows
        i_member, found = member_of(members, o_row // each, m_row, n, INDEXED)
        p_r = r + i_member[:, None] * r_member
    trips = tl.cdiv(ins, INS * SPLIT)
    b_y = tl.zeros((ROWS, OUTS), tl.float32)
    for i_in in range(0, TRIPS if TRIPS > 0 else trips):
        o_in = (i_split * trips + i_in) * INS + tl.arange(0, INS).to(tl.int64)
        m_in = o_in < ins
        p_x = x + o_row[:, None] * x_row + o_in[None, :] * x_in
        p_w = weight + o_out[None, :] * w_out + o_in[:, None] * w_in
        if EVEN:
            m_x = m_row[:, None]
            m_w = m_out[None, :]
        else:
            m_x = m_row[:, None] & m_in[None, :]
            m_w = m_out[None, :] & m_in[:, None]
        if SAME:
            b_r = _tile(p_r + o_in * r_in, m_in, tl.float32)[None, :]
        else:
            b_r = _tile(p_r + o_in[None, :] * r_in, m_x, tl.float32)
        b_x = (_tile(p_x, m_x, tl.float32) * b_r).to(DOT)
        b_w = _tile(p_w, m_w, DOT)
        b_y = tl.dot(b_x, b_w, b_y, input_precision=PRECISION)
    if SPLIT == 1:
        # Rows of a member that isn't there are NaN.
        if SAME:
            p_s = s + i_member * s_member + o_out * s_out
            b_y *= tl.load(p_s, mask=m_out & found, other=float("nan")).to(tl.float32)[None, :]
        else:
            p_s = s + i_member[:, None] * s_member + o_out[None, :] * s_out
            m_s = m_out[None, :] & found[:, None]
            b_y *= tl.load(p_s, mask=m_s, other=float("nan")).to(tl.float32)
        if BIAS:
            if SAME:
                b_y += _tile(bias + i_member * b_member + o_out * b_out, m_out, tl.float32)[None, :]
            else:
                p_b = bias + i_member[:, None] * b_member + o_out[None, :] * b_out
                b_y += _tile(p_b, m_out[None, :] & m_row[:, None], tl.float32)
    p_y = y + (i_split * _wide(rows) + o_row[:, None]) * outs + o_out[None, :]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_row[:, None] & m_out[None, :])


@triton.jit
def _member_rows(order, begin, end, i_tile, each, INDEXED: tl.constexpr, ROWS: tl.constexpr):
    """A tile of a member's rows: from begin to end where they are sorted by member."""
    o_row = begin + i_tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
    m_row = o_row < end
    if INDEXED:
        o_row = tl.load(order + o_row // each, mask=m_row, other=0) * each + o_row % each
    return o_row, m_row


@triton.jit(do_not_specialize=_PLAIN)
def gradient_kernel(
    grad,  # [rows, outs]
    x,  # [rows, ins]
    weight,  # [outs, ins]
    r,  # [N, ins]
    s,  # [N, outs]
    order,  # [rows / each], the groups of rows sorted by member
    starts,  # [N + 1], where each member's begin
    products,  # [N, outs, ins], H
    d_weight,  # [outs, ins]
    d_r,  # [tiles of outs, N, ins]
    d_s,  # [tiles of ins, N, outs]
    d_bias,  # [N, outs]
    outs,
    ins,
    each,
    g_row,
    g_out,
    x_row,
    x_in,
    w_out,
    w_in,
    r_member,
    r_in,
    s_member,
    s_out,
    N: tl.constexpr,
    INDEXED: tl.constexpr,
    GIVEN: tl.constexpr,  # Whether H is there.
    WEIGHT: tl.constexpr,
    FAST: tl.constexpr,
    BIAS: tl.constexpr,
    TRIPS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INS: tl.constexpr,
):
    i_in = tl.program_id(0).to(tl.int64)
    i_out = tl.program_id(1).to(tl.int64)
    o_out = i_out * OUTS + tl.arange(0, OUTS)
    o_in = i_in * INS + tl.arange(0, INS)
    m_out = o_out < outs
    m_in = o_in < ins
    o_w = o_out[:, None] * ins + o_in[None, :]
    m_w = m_out[:, None] & m_in[None, :]
    b_weight = tl.zeros((OUTS, INS), tl.float32)
    for i in range(0, N):
        i_member = _wide(i)
        if INDEXED:
            begin = tl.load(starts + i) * each
            end = tl.load(starts + i + 1) * each
        else:
            begin = i_member * each
            end = begin + each
        trips = tl.cdiv(end - begin, ROWS)
        if GIVEN:
            b_h = _tile(products + i_member * outs * ins + o_w, m_w, tl.float32)
        else:
            b_h = tl.zeros((OUTS, INS), tl.float32)
            for i_tile in range(0, TRIPS if TRIPS > 0 else trips):
                o_row, m_row = _member_rows(order, begin, end, i_tile, each, INDEXED, ROWS)
                p_g = grad + o_row[None, :] * g_row + o_out[:, None] * g_out
                b_g = _tile(p_g, m_out[:, None] & m_row[None, :], DOT)
                p_x = x + o_row[:, None] * x_row + o_in[None, :] * x_in
                b_x = _tile(p_x, m_row[:, None] & m_in[None, :], DOT)
                b_h = tl.dot(b_g, b_x, b_h, input_precision=PRECISION)
        b_r = _tile(r + i_member * r_member + o_in * r_in, m_in, tl.float32)
        b_s = _tile(s + i_member * s_member + o_out * s_out, m_out, tl.float32)
        if WEIGHT:
            b_weight += b_h * b_s[:, None] * b_r[None, :]
        if FAST:
            p_w = weight + o_out[:, None] * w_out + o_in[None, :] * w_in
            b_h *= _tile(p_w, m_w, tl.float32)
            p_s = d_s + (i_in * N + i) * outs + o_out
            tl.store(p_s, tl.sum(b_h * b_r[None, :], 1), mask=m_out)
            p_r = d_r + (i_out * N + i) * ins + o_in
            tl.store(p_r, tl.sum(b_h * b_s[:, None], 0), mask=m_in)
        # Each row of tiles has its first program sum the gradient for the biases.
        if BIAS:  # noqa: SIM102, one is known when it is compiled
            if i_in == 0:
                b_totals = tl.zeros((OUTS, ROWS), tl.float32)
                for i_tile in range(0, TRIPS if TRIPS > 0 else trips):
                    o_row, m_row = _member_rows(order, begin, end, i_tile, each, INDEXED, ROWS)
                    p_g = grad + o_row[None, :] * g_row + o_out[:, None] * g_out
                    b_totals += _tile(p_g, m_out[:, None] & m_row[None, :], tl.float32)
                p_b = d_bias + i_member * outs + o_out
                tl.store(p_b, tl.sum(b_totals, 1).to(d_bias.dtype.element_ty), mask=m_out)
    if WEIGHT:
        tl.store(d_weight + o_w, b_weight.to(d_weight.dtype.element_ty), mask=m_w)


# -------------------------------------------------------------------------------------- tile sizes


def product_configs(x: Tensor, weight: Tensor, limit: int, each: int) -> list[Config]:
    """For :func:`product_kernel` on x ``[rows, in]``, weight ``[out, in]``, groups of ``each``."""
    outs, ins = weight.shape
    most = min(tuning.bucket(len(x)), 128)
    found = []
    for row_tile in (most, most // 2) if most > 16 else (16,):
        gathers = not has_one_member(each, row_tile)
        row_tile = min(row_tile, 64) if gathers else row_tile
        for out_tile in (128, 64, 32):
            tiles = triton.cdiv(outs, out_tile) * triton.cdiv(len(x), row_tile)
            bytes_each = row_tile * x.element_size() + out_tile * weight.element_size()
            bytes_each += 4 * row_tile if gathers else 0
            pipelines = ((64, 3), (64, 4), (32, 3), (32, 2), (16, 2))
            fitting = [(k, stages) for k, stages in pipelines if stages * k * bytes_each <= limit]
            for in_tile, stages in fitting[:2]:
                for split in (1, 2, 4, 8):
                    if split > 1 and (tiles * split > 4 * _PROGRAMS or ins < 4 * in_tile * split):
                        continue
                    warps = 8 if out_tile * row_tile >= 128 * 64 else 4
                    found.append(Config(out_tile, row_tile, in_tile, warps, stages, split))

    def order(config: Config) -> tuple:
        tiles = triton.cdiv(outs, config.outs) * triton.cdiv(len(x), config.rows)
        # Enough programs first, then few splits, then large tiles.
        return (tiles * config.split < _PROGRAMS, config.split, -config.outs * config.rows)

    return sorted(dict.fromkeys(found), key=order)


def has_one_member(each: int, row_tile: int) -> bool:
    """Whether tiles are laid such that each has one member: if they are a quarter empty at most."""
    return triton.cdiv(each, row_tile) * row_tile <= 1.25 * each


def gradient_configs(x: Tensor, weight: Tensor, limit: int, each: int) -> list[Config]:
    """For :func:`gradient_kernel`; see :func:`product_configs`."""
    outs, ins = weight.shape
    found = []
    for out_tile, in_tile in ((128, 64), (64, 64), (32, 64), (32, 32)):
        for row_tile in (16, 32) if each <= 32 or x.element_size() == 4 else (32, 64):
            for stages in (3, 2, 4):
                if stages * row_tile * (out_tile + in_tile) * x.element_size() <= limit:
                    warps = 8 if out_tile * in_tile >= 128 * 64 else 4
                    found.append(Config(out_tile, row_tile, in_tile, warps, stages))

    def order(config: Config) -> bool:
        return triton.cdiv(outs, config.outs) * triton.cdiv(ins, config.ins) < _PROGRAMS

    return sorted(found, key=order)


# ------------------------------------------------------------------------------------------- launch


def forward(
    x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None, members: Tensor | None
) -> Tensor:
    """As :func:`.batch_ensemble_linear.plain_members_linear`, by the algorithm for the shape."""
    if not (len(x) and weight.numel()):
        return plain_members_linear(x, weight, r, s, bias, members)
    name = algorithm(x, weight, len(r) if members is None else len(members), members is not None)
    if name == "fused":
        return product(x, weight, r, s, bias, members)
    dtype = x.dtype
    if name == "folded":
        r, s, bias = (None if t is None else t.to(dtype) for t in (r, s, bias))
        return folded_linear(x, weight.to(dtype), r, s, bias)
    y = scale(x, r, None, members) @ weight.mT.to(dtype)
    scale_into(y, y, s, bias, members)
    return y


def product(
    x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor | None, members: Tensor | None
) -> Tensor:
    """The same by the fused product."""
    (outs, ins), rows = weight.shape, len(x)
    groups = len(r) if members is None else len(members)
    each = rows // groups
    y = x.new_empty(rows, outs)

    def run(config: Config) -> None:
        split = config.split
        target = y if split == 1 else x.new_empty(split, rows, outs, dtype=torch.float32)
        same = has_one_member(each, config.rows)
        tiles = triton.cdiv(each, config.rows) * groups if same else triton.cdiv(rows, config.rows)
        product_kernel[triton.cdiv(outs, config.outs), tiles, split](
            *(x, weight, r, s, bias, members, target, len(r), rows, outs, ins, each),
            *(*x.stride(), *weight.stride(), *r.stride(), *s.stride()),
            *((0, 0) if bias is None else bias.stride()),
            **{"INDEXED": members is not None, "SAME": same, "BIAS": bias is not None},
            **{"SPLIT": split, "EVEN": ins % (config.ins * split) == 0},
            **_common(x, ins, config, config.ins, split),
        )
        if split > 1:
            scale_into(y, target, s, bias, members, split)

    def configs(x: Tensor, weight: Tensor, limit: int) -> list[Config]:
        return product_configs(x, weight, limit, each)

    with torch.cuda.device_of(x):
        run(_choose("batch_ensemble", configs, x, weight, (tuning.bucket(each), outs, ins), run))
    return y


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    s: Tensor,
    bias: Tensor | None,
    members: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`.batch_ensemble_linear.plain_members_linear_backward`."""
    if not (len(x) and weight.numel()):
        return plain_members_linear_backward(grad, x, weight, r, s, bias, members, needs)
    inputs = (x, weight, r, s, bias)
    found = [(grad if t is None else t).new_empty(0) for t in inputs]
    if needs[0]:
        found[0] = forward(grad, weight.mT, s, r, None, members)
    if any(needs[1:]):
        found[1:] = gradients(grad, *inputs, members, needs[1:5])
    return tuple(found)


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    s: Tensor,
    bias: Tensor | None,
    members: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients of weight, r, s and bias that are needed; the others are empty."""
    (outs, ins), n = weight.shape, len(r)
    groups = n if members is None else len(members)
    each = len(x) // groups
    of_weight, of_r, of_s, of_bias = needs
    given = gradient_algorithm(x, groups, members is not None) == "library" and any(needs[:3])
    products = order = starts = d_r = d_s = None
    if given:
        products = torch.bmm(grad.unflatten(0, (n, each)).mT, x.unflatten(0, (n, each)))
    if members is not None:
        owners, order = members.sort(stable=True)
        starts = torch.searchsorted(owners, torch.arange(n + 1, device=x.device))
    d_weight = weight.new_empty(weight.shape if of_weight else 0)
    like = grad if bias is None else bias
    if given and of_bias:
        d_bias, of_bias = grad.unflatten(0, (n, each)).sum(1).to(like.dtype), False
    else:
        d_bias = like.new_empty((n, outs) if of_bias else 0)

    def run(config: Config) -> None:
        nonlocal d_r, d_s
        grid = (triton.cdiv(ins, config.ins), triton.cdiv(outs, config.outs))
        if of_r or of_s:
            d_r = x.new_empty(grid[1], n, ins, dtype=torch.float32)
            d_s = x.new_empty(grid[0], n, outs, dtype=torch.float32)
        gradient_kernel[grid](
            *(grad, x, weight, r, s, order, starts, products, d_weight, d_r, d_s, d_bias),
            *(outs, ins, each, *grad.stride(), *x.stride(), *weight.stride()),
            *(*r.stride(), *s.stride()),
            **{"N": n, "INDEXED": members is not None, "GIVEN": given},
            **{"WEIGHT": of_weight, "FAST": of_r or of_s, "BIAS": of_bias},
            **_common(x, each if members is None else len(x), config, config.rows),
        )

    def configs(x: Tensor, weight: Tensor, limit: int) -> list[Config]:
        return gradient_configs(x, weight, limit, each)

    with torch.cuda.device_of(x):
        sizes = (n, tuning.bucket(each), outs, ins)
        name = "batch_ensemble_shares" if given else "batch_ensemble_gradient"
        run(_choose(name, configs, x, weight, sizes, run))
    totals = (
        partial.sum(0).to(t.dtype) if need else t.new_empty(0)
        for partial, t, need in ((d_r, r, of_r), (d_s, s, of_s))
    )
    return [d_weight, *totals, d_bias]
