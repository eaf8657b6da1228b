"""The linear layer at a point of the simplex in Triton; :mod:`.subspace_linear` says what it means.

Three kernels. Each takes any strides, so that the product with the transposed weights, which the
gradient of x is, is the same kernel with the weights' strides exchanged:

    point_kernel      y = x (sum_i alpha_i W_i)^T: the weights are mixed in float32 as they are
                      loaded, rounded to the dtype of x, and stored where someone wants them
    each_kernel       y_b = sum_i alpha_bi (x_b W_i^T), and <y_bi, other_b>, alpha's gradient
    gradient_kernel   G = g^T x; alpha_i G for every member, and <G, W_i> a tile, alpha's gradient

The products are written transposed (weights times x^T): the mixed weights are then the operand that
tensor cores take from registers, and a few rows fill a tile. Sums over tiles go through a buffer in
a fixed order: the same inputs give the same bits.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .mix_triton import _wide, mix, mix_backward
from .subspace_linear import algorithm, gradient_algorithm, plain_linear, plain_linear_backward
from .tuning import Config

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Programs that keep a card busy; the sum over in is split where there are fewer.
_PROGRAMS = 120
# Of these arguments no value and no alignment is worth a compilation.
_PLAIN = ["rows", "alpha", "a_row", "a_member", "b_member", "b_out"]

# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def _tile(pointer, mask, dtype: tl.constexpr):
    # Converted at once: Triton's interpreter can't calculate in bfloat16.
    return tl.load(pointer, mask=mask, other=0.0).to(dtype)


@triton.jit
def _mixed_bias(bias, alpha, b_member, o_bias, m_bias, N: tl.constexpr):
    b_bias = tl.zeros((o_bias.shape[0],), tl.float32)
    for i in range(0, N):
        b_own = _tile(bias + i * b_member + o_bias, m_bias, tl.float32)
        b_bias += tl.load(alpha + i).to(tl.float32) * b_own
    return b_bias


@triton.jit(do_not_specialize=_PLAIN)
def point_kernel(
    x,  # [rows, ins]
    weight,  # [N, outs, ins]
    bias,  # [N, outs]
    alpha,  # [N]
    y,  # [rows, outs], or with SPLIT the partial sums [SPLIT, rows, outs]
    mixed,  # [outs, ins]
    rows,
    outs,
    ins,
    x_row,
    x_in,
    w_member,
    w_out,
    w_in,
    b_member,
    b_out,
    N: tl.constexpr,
    KEEP: tl.constexpr,
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
    i_row = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2)
    o_out = i_out * OUTS + tl.arange(0, OUTS)
    o_row = i_row * ROWS + tl.arange(0, ROWS)
    m_out = o_out < outs
    m_row = o_row < rows
    alphas = ()
    for i in tl.static_range(N):
        alphas = alphas + (tl.load(alpha + i).to(tl.float32),)  # noqa: RUF005
    trips = tl.cdiv(ins, INS * SPLIT)
    b_y = tl.zeros((OUTS, ROWS), tl.float32)
    for i_in in range(0, TRIPS if TRIPS > 0 else trips):
        o_in = (i_split * trips + i_in) * INS + tl.arange(0, INS).to(tl.int64)
        p_x = x + o_row[None, :] * x_row + o_in[:, None] * x_in
        p_w = weight + o_out[:, None] * w_out + o_in[None, :] * w_in
        if EVEN:
            m_x = m_row[None, :]
            m_w = m_out[:, None]
        else:
            m_x = m_row[None, :] & (o_in < ins)[:, None]
            m_w = m_out[:, None] & (o_in < ins)[None, :]
        b_w = tl.zeros((OUTS, INS), tl.float32)
        for i in tl.static_range(N):
            b_w += alphas[i] * _tile(p_w + i * w_member, m_w, tl.float32)
        if KEEP:  # noqa: SIM102, one is known when it is compiled
            if i_row == 0:
                p_m = mixed + o_out[:, None] * ins + o_in[None, :]
                tl.store(p_m, b_w.to(mixed.dtype.element_ty), mask=m_w)
        b_x = _tile(p_x, m_x, DOT)
        b_y = tl.dot(b_w.to(DOT), b_x, b_y, input_precision=PRECISION)
    if BIAS:
        b_y += _mixed_bias(bias, alpha, b_member, o_out * b_out, m_out, N)[:, None]
    p_y = y + (i_split * rows.to(tl.int64) + o_row[None, :]) * outs + o_out[:, None]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_out[:, None] & m_row[None, :])


@triton.jit(do_not_specialize=["size", *_PLAIN])
def sum_kernel(
    partial,  # [SPLIT, rows, outs]
    bias,  # [N, outs]
    alpha,  # [N]
    y,  # [rows, outs]
    size,  # rows * outs
    outs,
    b_member,
    b_out,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < size
    b_y = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SPLIT):
        b_y += tl.load(partial + i * size.to(tl.int64) + o_e, mask=m_e, other=0.0)
    if BIAS:
        b_y += _mixed_bias(bias, alpha, b_member, o_e % outs * b_out, m_e, N)
    tl.store(y + o_e, b_y.to(y.dtype.element_ty), mask=m_e)


@triton.jit(do_not_specialize=_PLAIN)
def each_kernel(
    x,  # [rows, ins]
    weight,  # [N, outs, ins]
    bias,  # [N, outs]
    alpha,  # [rows, N]
    other,  # [rows, outs]
    y,  # [rows, outs]
    partial,  # [tiles of outs, rows, N]
    rows,
    outs,
    ins,
    x_row,
    x_in,
    w_member,
    w_out,
    w_in,
    b_member,
    b_out,
    a_row,
    a_member,
    other_row,
    other_out,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    EVEN: tl.constexpr,
    TRIPS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INS: tl.constexpr,
):
    i_out = tl.program_id(0).to(tl.int64)
    i_row = tl.program_id(1).to(tl.int64)
    o_out = i_out * OUTS + tl.arange(0, OUTS)
    o_row = i_row * ROWS + tl.arange(0, ROWS)
    m_out = o_out < outs
    m_row = o_row < rows
    m_y = m_out[:, None] & m_row[None, :]
    if ALPHA:
        p_other = other + o_row[None, :] * other_row + o_out[:, None] * other_out
        b_other = _tile(p_other, m_y, tl.float32)
    b_y = tl.zeros((OUTS, ROWS), tl.float32)
    for i in range(0, N):
        b_own = tl.zeros((OUTS, ROWS), tl.float32)
        for i_in in range(0, TRIPS if TRIPS > 0 else tl.cdiv(ins, INS)):
            o_in = i_in * INS + tl.arange(0, INS).to(tl.int64)
            p_x = x + o_row[None, :] * x_row + o_in[:, None] * x_in
            p_w = weight + i * w_member + o_out[:, None] * w_out + o_in[None, :] * w_in
            if EVEN:
                m_x = m_row[None, :]
                m_w = m_out[:, None]
            else:
                m_x = m_row[None, :] & (o_in < ins)[:, None]
                m_w = m_out[:, None] & (o_in < ins)[None, :]
            b_w = _tile(p_w, m_w, DOT)
            b_x = _tile(p_x, m_x, DOT)
            b_own = tl.dot(b_w, b_x, b_own, input_precision=PRECISION)
        if BIAS:
            b_own += _tile(bias + i * b_member + o_out * b_out, m_out, tl.float32)[:, None]
        if ALPHA:
            p_partial = partial + ((i_out * rows + o_row) * N + i)
            tl.store(p_partial, tl.sum(b_own * b_other, 0), mask=m_row)
        # Scaled after the product: neither x nor a weight is rounded once more.
        b_alpha = _tile(alpha + o_row * a_row + i * a_member, m_row, tl.float32)
        b_y += b_own * b_alpha[None, :]
    p_y = y + o_row[None, :] * outs + o_out[:, None]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=_PLAIN)
def gradient_kernel(
    grad,  # [rows, outs]
    x,  # [rows, ins]
    weight,  # [N, outs, ins]
    bias,  # [N, outs]
    alpha,  # [N], with EACH [rows, N]
    d_weight,  # [N, outs, ins]
    d_bias,  # [N, outs]
    partial,  # [tiles + rows of tiles, N]
    rows,
    outs,
    ins,
    g_row,
    g_out,
    x_row,
    x_in,
    w_member,
    w_out,
    w_in,
    b_member,
    b_out,
    a_row,
    a_member,
    N: tl.constexpr,
    EACH: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    D_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    TRIPS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INS: tl.constexpr,
):
    i_in = tl.program_id(0).to(tl.int64)
    i_out = tl.program_id(1).to(tl.int64)
    i_member = tl.program_id(2)
    o_out = i_out * OUTS + tl.arange(0, OUTS)
    o_in = i_in * INS + tl.arange(0, INS)
    m_out = o_out < outs
    m_in = o_in < ins
    b_sum = tl.zeros((OUTS, INS), tl.float32)
    for i_row in range(0, TRIPS if TRIPS > 0 else tl.cdiv(rows, ROWS)):
        o_row = i_row * ROWS + tl.arange(0, ROWS).to(tl.int64)
        m_row = o_row < rows
        p_g = grad + o_row[None, :] * g_row + o_out[:, None] * g_out
        m_g = m_out[:, None] & m_row[None, :]
        if EACH:
            b_alpha = _tile(alpha + o_row * a_row + i_member * a_member, m_row, tl.float32)
            b_g = (_tile(p_g, m_g, tl.float32) * b_alpha[None, :]).to(DOT)
        else:
            b_g = _tile(p_g, m_g, DOT)
        p_x = x + o_row[:, None] * x_row + o_in[None, :] * x_in
        b_x = _tile(p_x, m_row[:, None] & m_in[None, :], DOT)
        b_sum = tl.dot(b_g, b_x, b_sum, input_precision=PRECISION)

    o_w = o_out[:, None] * ins + o_in[None, :]
    m_w = m_out[:, None] & m_in[None, :]
    size = _wide(outs) * ins
    if EACH:
        p_d = d_weight + i_member * size + o_w
        tl.store(p_d, b_sum.to(d_weight.dtype.element_ty), mask=m_w)
    else:
        i_tile = i_out * tl.num_programs(0) + i_in
        for i in range(0, N):
            b_a = tl.load(alpha + i * a_member).to(tl.float32)
            if WEIGHT:
                p_d = d_weight + i * size + o_w
                tl.store(p_d, (b_a * b_sum).to(d_weight.dtype.element_ty), mask=m_w)
            if ALPHA:
                p_w = weight + i * w_member + o_out[:, None] * w_out + o_in[None, :] * w_in
                b_share = tl.sum(b_sum * _tile(p_w, m_w, tl.float32))
                tl.store(partial + i_tile * N + i, b_share)

    # Each row of tiles has its first program sum the gradient for the bias.
    if BIAS:  # noqa: SIM102
        if i_in == 0:
            b_totals = tl.zeros((OUTS, ROWS), tl.float32)
            for i_row in range(0, TRIPS if TRIPS > 0 else tl.cdiv(rows, ROWS)):
                o_row = i_row * ROWS + tl.arange(0, ROWS).to(tl.int64)
                m_row = o_row < rows
                p_g = grad + o_row[None, :] * g_row + o_out[:, None] * g_out
                b_g = _tile(p_g, m_out[:, None] & m_row[None, :], tl.float32)
                if EACH:
                    p_alpha = alpha + o_row * a_row + i_member * a_member
                    b_g *= _tile(p_alpha, m_row, tl.float32)[None, :]
                b_totals += b_g
            b_total = tl.sum(b_totals, 1)
            if EACH:
                p_d = d_bias + _wide(i_member) * outs + o_out
                tl.store(p_d, b_total.to(d_bias.dtype.element_ty), mask=m_out)
            else:
                i_share = tl.num_programs(0) * tl.num_programs(1) + i_out
                for i in range(0, N):
                    if D_BIAS:
                        b_d = tl.load(alpha + i * a_member).to(tl.float32) * b_total
                        p_d = d_bias + _wide(i) * outs + o_out
                        tl.store(p_d, b_d.to(d_bias.dtype.element_ty), mask=m_out)
                    if ALPHA:
                        p_bias = bias + i * b_member + o_out * b_out
                        b_share = tl.sum(b_total * _tile(p_bias, m_out, tl.float32), 0)
                        tl.store(partial + i_share * N + i, b_share)


# -------------------------------------------------------------------------------------- tile sizes


def point_configs(x: Tensor, weight: Tensor, limit: int) -> list[Config]:
    """For :func:`point_kernel` on x ``[rows, ins]`` and weight ``[n, outs, ins]``."""
    n, outs, ins = weight.shape
    rows = min(tuning.bucket(len(x)), 128)
    found = []
    for out_tile in (64, 32, 16, 128):
        programs = triton.cdiv(outs, out_tile) * triton.cdiv(len(x), rows)
        for in_tile, stages in ((64, 4), (64, 3), (128, 2), (64, 2), (32, 4), (32, 2), (16, 2)):
            bytes_each = n * out_tile * weight.element_size() + rows * x.element_size()
            if stages * in_tile * bytes_each > limit:
                continue
            for split in (1, 2, 4, 8):
                if split > 1 and (programs * split > 4 * _PROGRAMS or ins < 4 * in_tile * split):
                    continue
                warps = 8 if out_tile * rows >= 128 * 128 else 4
                found.append(Config(out_tile, rows, in_tile, warps, stages, split))

    def order(config: Config) -> tuple:
        programs = triton.cdiv(outs, config.outs) * config.split
        # Enough programs first, then few splits, then large tiles.
        return (programs < _PROGRAMS, config.split, config.outs == 128, -config.outs)

    return sorted(found, key=order)


def each_configs(x: Tensor, weight: Tensor, limit: int) -> list[Config]:
    """For :func:`each_kernel`."""
    outs = weight.shape[1]
    rows = min(tuning.bucket(len(x)), 64)
    found = []
    for out_tile in (64, 32, 16):
        for in_tile, stages in ((64, 4), (64, 3), (128, 2), (32, 4), (32, 2)):
            bytes_each = out_tile * weight.element_size() + rows * x.element_size()
            # Two sums and a tile of the other factor share the registers with the operands.
            most = 4096 // weight.element_size()
            if out_tile * rows > most or rows * in_tile > 2048 or out_tile * in_tile > 2 * most:
                continue
            if stages * in_tile * bytes_each <= limit:
                found.append(Config(out_tile, rows, in_tile, 4, stages))

    def order(config: Config) -> tuple:
        programs = triton.cdiv(outs, config.outs) * triton.cdiv(len(x), rows)
        return (programs < _PROGRAMS, -config.outs)

    return sorted(found, key=order)


def gradient_configs(grad: Tensor, x: Tensor, limit: int) -> list[Config]:
    """For :func:`gradient_kernel` on grad ``[rows, outs]`` and x ``[rows, ins]``."""
    row_tiles = (16, 32) if len(x) <= 32 or x.element_size() == 4 else (32, 64)
    found = []
    for out_tile, in_tile in ((64, 64), (64, 128), (128, 128), (32, 64), (32, 32)):
        for row_tile in row_tiles:
            for stages in (3, 2, 4):
                bytes_each = (out_tile + in_tile) * x.element_size()
                if stages * row_tile * bytes_each <= limit:
                    warps = 8 if out_tile * in_tile >= 128 * 128 else 4
                    found.append(Config(out_tile, row_tile, in_tile, warps, stages))

    def order(config: Config) -> bool:
        tiles = triton.cdiv(grad.shape[1], config.outs) * triton.cdiv(x.shape[1], config.ins)
        return tiles < _PROGRAMS

    return sorted(found, key=order)


def _choose(kernel: str, configs, x: Tensor, weight: Tensor, sizes: tuple[int, ...], run) -> Config:
    types = f"{str(x.dtype)[6:]}-{str(weight.dtype)[6:]}"
    shape = "x".join(map(str, sizes))
    key = f"{kernel} {types} rows={tuning.bucket(len(x))} {shape}"
    limit = tuning.shared_memory(x.device)
    return tuning.choose(key, x.device, lambda: configs(x, weight, limit), run)


def _common(x: Tensor, size: int, config: Config, block: int, split: int = 1) -> dict:
    """What the three kernels are compiled for beside their flags."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        # A constant in the interpreter, whose range may take no tensor.
        "TRIPS": triton.cdiv(size, block * split) if _INTERPRETED else 0,
        "DOT": tl.float32 if _INTERPRETED else _TYPES[x.dtype],
        "PRECISION": "tf32" if tf32 else "ieee",
        **{"OUTS": config.outs, "ROWS": config.rows, "INS": config.ins},
        **{"num_warps": config.warps, "num_stages": config.stages},
    }


# ------------------------------------------------------------------------------------------- launch


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """As :func:`.subspace_linear.plain_linear`."""
    nothing = x.new_empty(0)
    name = algorithm(x, weight, alpha)
    if name == "scaled" or not (len(x) and weight.numel()):
        return plain_linear(x, weight, bias, alpha, keep)
    if name == "fused":
        return point(x, weight, bias, alpha, keep)
    if name == "each":
        return each(x, weight, bias, alpha, None)[0], nothing
    mixed = mix(weight, alpha).to(x.dtype)
    b = None if bias is None else mix(bias, alpha).to(x.dtype)
    return torch.nn.functional.linear(x, mixed, b), mixed if keep else nothing


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    alpha: Tensor,
    mixed: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`.subspace_linear.plain_linear_backward`."""
    name = algorithm(x, weight, alpha)
    if name == "scaled" or not (len(x) and weight.numel()):
        return plain_linear_backward(grad, x, weight, bias, alpha, mixed, needs)
    found = [grad.new_empty(0) if t is None else t.new_empty(0) for t in (x, weight, bias, alpha)]
    if name == "each":
        if needs[0] or needs[3]:
            found[0], d_alpha = each(grad, weight.mT, None, alpha, x)
            if bias is not None:
                d_alpha = d_alpha + grad.float() @ bias.float().mT
            found[3] = d_alpha.to(alpha.dtype)
    elif needs[0]:
        if not mixed.numel():
            mixed = mix(weight, alpha).to(grad.dtype)
        found[0] = grad @ mixed
    flags = (needs[1], needs[2], needs[3] and name != "each")
    if any(flags):
        fused = name == "each" or gradient_algorithm(x) == "fused"
        compute = gradients if fused else _gradients_by_library
        some = compute(grad, x, weight, bias, alpha, flags)
        for k, t in zip((1, 2, 3), some, strict=True):
            if t is not None:
                found[k] = t
    # Of the kernels that give two, one may not be wanted.
    return tuple(t if need else t.new_empty(0) for t, need in zip(found, needs, strict=True))


def point(
    x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """The fused product at one point, and the mixed weight or an empty tensor."""
    (n, outs, ins), rows = weight.shape, len(x)
    alpha = alpha.contiguous()
    y = x.new_empty(rows, outs)
    mixed = x.new_empty((outs, ins) if keep else 0)
    b_strides = (0, 0) if bias is None else bias.stride()

    def run(config: Config) -> None:
        split = config.split
        target = y if split == 1 else x.new_empty(split, rows, outs, dtype=torch.float32)
        grid = (triton.cdiv(outs, config.outs), triton.cdiv(rows, config.rows), split)
        point_kernel[grid](
            *(x, weight, bias, alpha, target, mixed, rows, outs, ins),
            *(*x.stride(), *weight.stride(), *b_strides),
            **{"N": n, "KEEP": keep, "BIAS": bias is not None and split == 1, "SPLIT": split},
            EVEN=ins % (config.ins * split) == 0,
            **_common(x, ins, config, config.ins, split),
        )
        if split > 1:
            block = 256
            sum_kernel[(triton.cdiv(y.numel(), block),)](
                *(target, bias, alpha, y, y.numel(), outs, *b_strides),
                **{"N": n, "BIAS": bias is not None, "SPLIT": split, "BLOCK": block},
            )

    with torch.cuda.device_of(x):
        run(_choose("point", point_configs, x, weight, (n, outs, ins), run))
    return y, mixed


def each(
    x: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, other: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The product with a point a row; with other ``[rows, out]``, ``<x W_i^T, other>`` a row."""
    (n, outs, ins), rows = weight.shape, len(x)
    y = x.new_empty(rows, outs)
    b_strides = (0, 0) if bias is None else bias.stride()
    partial = None

    def run(config: Config) -> None:
        nonlocal partial
        tiles = triton.cdiv(outs, config.outs)
        if other is not None:
            partial = x.new_empty(tiles, rows, n, dtype=torch.float32)
        each_kernel[tiles, triton.cdiv(rows, config.rows)](
            *(x, weight, bias, alpha, other, y, partial, rows, outs, ins),
            *(*x.stride(), *weight.stride(), *b_strides, *alpha.stride()),
            *((0, 0) if other is None else other.stride()),
            **{"N": n, "BIAS": bias is not None, "ALPHA": other is not None},
            EVEN=ins % config.ins == 0,
            **_common(x, ins, config, config.ins),
        )

    with torch.cuda.device_of(x):
        run(_choose("each", each_configs, x, weight, (n, outs, ins), run))
    return y, None if partial is None else partial.sum(0)


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    alpha: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of weight, bias and alpha ``[n]`` that are needed, in one launch."""
    (n, outs, ins), rows = weight.shape, len(x)
    per_row = alpha.dim() == 2
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    d_bias = None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    partial = None
    a_strides = alpha.stride() if per_row else (0, *alpha.stride())
    b_strides = (0, 0) if bias is None else bias.stride()

    def run(config: Config) -> None:
        nonlocal partial
        grid = (triton.cdiv(ins, config.ins), triton.cdiv(outs, config.outs))
        if needs[2]:
            shares = grid[0] * grid[1] + (0 if bias is None else grid[1])
            partial = x.new_empty(shares, n, dtype=torch.float32)
        gradient_kernel[(*grid, n if per_row else 1)](
            *(grad, x, weight, bias, alpha, d_weight, d_bias, partial, rows, outs, ins),
            *(*grad.stride(), *x.stride(), *weight.stride(), *b_strides, *a_strides),
            **{"N": n, "EACH": per_row, "WEIGHT": needs[0], "D_BIAS": needs[1], "ALPHA": needs[2]},
            BIAS=bias is not None and (needs[1] or needs[2]),
            **_common(x, rows, config, config.rows),
        )

    def configs(x, weight, limit):
        return gradient_configs(grad, x, limit)

    with torch.cuda.device_of(x):
        run(_choose("gradient", configs, x, weight, (n, outs, ins), run))
    d_alpha = None if partial is None else partial.sum(0).to(alpha.dtype)
    return d_weight if needs[0] else None, d_bias if needs[1] else None, d_alpha


def _gradients_by_library(grad, x, weight, bias, alpha, needs):
    """The same by the library's product and one pass over it: for many rows at one point."""
    d_weight, d_alpha = mix_backward(grad.mT @ x, weight, alpha, [needs[0], needs[2]])
    d_bias = None
    if bias is not None and (needs[1] or needs[2]):
        d_bias, share = mix_backward(grad.sum(0), bias, alpha, [needs[1], needs[2]])
        if needs[2]:
            d_alpha = d_alpha + share
    return d_weight if needs[0] else None, d_bias, d_alpha if needs[2] else None
