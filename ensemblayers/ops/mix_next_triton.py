"""The fused pass of the subspace optimizers on a GPU: one launch for all parameters of a call.

:mod:`.mix_next` says what is computed, and imports this file at its first call on CUDA tensors. A
parameter and its gradient are reached by their addresses, where they lie:

    table [K, 4]: parameter k's address, first column, number of elements, first program
    owner [programs]: the parameter of each program, which takes BLOCK of its elements
    grads [K]: the gradients' addresses

A program reads each vertex of its block once and writes it once, with its moments, then the next
point; nothing depends on the order of programs. Weights, learning rate, step and hyperparameters
are read on the device. What comes from the host goes up in one copy that nobody waits for, so that
a CUDA graph can hold a call after a first one outside of it. A replay repeats the numbers that came
from the host; what is to change between replays has to be a tensor on the device.
"""

import functools
import math
import struct
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .mix_next import Rule, Sgd

BLOCK = 512
WARPS = 8

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

# --------------------------------------------------------------------------------- parts of kernels


@triton.jit
def _locate(table, owner, BLOCK: tl.constexpr):
    """This program's parameter, its address, and the block's first element, column and size."""
    i_b = tl.program_id(0).to(tl.int64)
    i_k = tl.load(owner + i_b).to(tl.int64)
    p_row = table + i_k * 4
    i_e = (i_b - tl.load(p_row + 3)) * BLOCK
    return i_k, tl.load(p_row), i_e, tl.load(p_row + 1) + i_e, tl.load(p_row + 2) - i_e


@triton.jit
def _load(pointer, mask, acc: tl.constexpr):
    # Converted at once: Triton's interpreter can't calculate in bfloat16.
    return tl.load(pointer, mask=mask, other=0.0).to(acc)


@triton.jit
def _load_rows(p_row, width, i_0, mask, acc: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr):
    """Rows i_0 to i_0 + CHUNK - 1; zeros from row N on."""
    rows = ()
    for c in tl.static_range(CHUNK):
        row = _load(p_row + (i_0 + c) * width, mask & (i_0 + c < N), acc)
        rows = rows + (row,)  # noqa: RUF005, Triton knows no unpacking in a tuple
    return rows


@triton.jit
def _mix_rows(
    b_point,
    p_w,
    width,
    alpha,
    m_e,
    START: tl.constexpr,
    STOP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add the rows from START to STOP, times their weights, to a point."""
    acc: tl.constexpr = b_point.dtype
    for i_0 in range(START, STOP, CHUNK):
        b_w = _load_rows(p_w, width, i_0, m_e, acc, STOP, CHUNK)
        b_alpha = _load_rows(alpha, 1, i_0, True, acc, STOP, CHUNK)
        for c in tl.static_range(CHUNK):
            b_point += b_alpha[c] * b_w[c]
    return b_point


@triton.jit
def _load_gradient(grads, i_k, i_e, o_e, m_e, acc: tl.constexpr, POINT: tl.constexpr):
    p_grad = tl.load(grads + i_k).to(tl.pointer_type(POINT)) + i_e
    return _load(p_grad + o_e, m_e, acc)


@triton.jit
def _store_point(i_param, i_e, o_e, m_e, b_point, POINT: tl.constexpr):
    p_param = i_param.to(tl.pointer_type(POINT)) + i_e
    tl.store(p_param + o_e, b_point.to(POINT), mask=m_e)


@triton.jit
def _one_minus_power(log_base, exponent):
    """``1 - base ** exponent`` of 0 <= base < 1, to full precision for a base near 1 too."""
    x = exponent * log_base
    # Near 0 the series of exp(x) - 1, where the difference would cancel.
    s = 1 + x / 15
    for k in tl.static_range(1, 14):
        s = 1 + x / (15 - k) * s
    return tl.where(x > -0.5, -x * s, 1 - tl.exp(x))


# ------------------------------------------------------------------------------------------ kernels

# Of these neither the value nor the alignment is worth a compilation.
_PLAIN = ["width", "grads", "alpha", "next_alpha", "lr", "step", "numbers"]


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["alpha"])
def mix_kernel(
    vertices,  # [ROWS, width]
    width,
    table,
    owner,
    alpha,  # [ROWS]
    POINT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, i_param, i_e, i_column, left = _locate(table, owner, BLOCK)
    width = width.to(tl.int64)
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < left
    b_point = tl.zeros((BLOCK,), vertices.dtype.element_ty)
    p_w = vertices + i_column + o_e
    b_point = _mix_rows(b_point, p_w, width, alpha, m_e, 0, ROWS, CHUNK)
    _store_point(i_param, i_e, o_e, m_e, b_point, POINT)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=_PLAIN)
def sgd_kernel(
    vertices,  # [ROWS, width]
    buffer,  # [N, width] with MOMENTUM
    width,
    table,
    owner,
    grads,
    alpha,  # [N]
    next_alpha,  # [ROWS]
    lr,
    numbers,  # momentum, 1 - dampening, weight decay
    POINT: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    FIRST: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    acc: tl.constexpr = vertices.dtype.element_ty
    i_k, i_param, i_e, i_column, left = _locate(table, owner, BLOCK)
    width = width.to(tl.int64)
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < left
    rate = tl.load(lr).to(acc)
    momentum = tl.load(numbers).to(acc)
    keep = tl.load(numbers + 1).to(acc)
    decay = tl.load(numbers + 2).to(acc)
    b_g = _load_gradient(grads, i_k, i_e, o_e, m_e, acc, POINT)
    if MAXIMIZE:
        b_g = -b_g
    p_w = vertices + i_column + o_e
    b_point = tl.zeros((BLOCK,), acc)
    for i_0 in range(0, N, CHUNK):
        # Loads of a few rows before the first store, which the compiler can't move them across.
        b_w = _load_rows(p_w, width, i_0, m_e, acc, N, CHUNK)
        b_alpha = _load_rows(alpha, 1, i_0, True, acc, N, CHUNK)
        b_next = _load_rows(next_alpha, 1, i_0, True, acc, N, CHUNK)
        if MOMENTUM and not FIRST:
            b_old = _load_rows(buffer + i_column + o_e, width, i_0, m_e, acc, N, CHUNK)
        for c in tl.static_range(CHUNK):
            m_row = m_e & (i_0 + c < N)
            b_d = b_alpha[c] * b_g + decay * b_w[c]
            if MOMENTUM:
                b_m = b_d
                if not FIRST:
                    b_m = momentum * b_old[c] + keep * b_d
                tl.store(buffer + i_column + (i_0 + c) * width + o_e, b_m, mask=m_row)
                if NESTEROV:
                    b_d += momentum * b_m
                else:
                    b_d = b_m
            b_new = b_w[c] - rate * b_d
            tl.store(p_w + (i_0 + c) * width, b_new, mask=m_row)
            b_point += b_next[c] * b_new
    b_point = _mix_rows(b_point, p_w, width, next_alpha, m_e, N, ROWS, CHUNK)
    _store_point(i_param, i_e, o_e, m_e, b_point, POINT)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=_PLAIN)
def adamw_kernel(
    vertices,  # [ROWS, width]
    average,  # [N, width]
    square,  # [N, width]
    width,
    table,
    owner,
    grads,
    alpha,  # [N]
    next_alpha,  # [ROWS]
    lr,
    step,
    numbers,  # of each beta: itself, 1 - beta, log(beta); then eps, weight decay
    POINT: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    acc: tl.constexpr = vertices.dtype.element_ty
    i_k, i_param, i_e, i_column, left = _locate(table, owner, BLOCK)
    width = width.to(tl.int64)
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < left
    beta1 = tl.load(numbers).to(acc)
    rest1 = tl.load(numbers + 1).to(acc)
    beta2 = tl.load(numbers + 3).to(acc)
    rest2 = tl.load(numbers + 4).to(acc)
    eps = tl.load(numbers + 6).to(acc)
    base_rate = tl.load(lr).to(acc)
    count = tl.load(step).to(acc)
    keep = 1 - base_rate * tl.load(numbers + 7).to(acc)
    rate = base_rate / _one_minus_power(tl.load(numbers + 2).to(acc), count)
    scale = 1 / tl.sqrt(_one_minus_power(tl.load(numbers + 5).to(acc), count))
    b_g = _load_gradient(grads, i_k, i_e, o_e, m_e, acc, POINT)
    if MAXIMIZE:
        b_g = -b_g
    p_w = vertices + i_column + o_e
    p_m = average + i_column + o_e
    p_s = square + i_column + o_e
    b_point = tl.zeros((BLOCK,), acc)
    for i_0 in range(0, N, CHUNK):
        # Loads of a few rows before the first store, which the compiler can't move them across.
        b_w = _load_rows(p_w, width, i_0, m_e, acc, N, CHUNK)
        b_m = _load_rows(p_m, width, i_0, m_e, acc, N, CHUNK)
        b_s = _load_rows(p_s, width, i_0, m_e, acc, N, CHUNK)
        b_alpha = _load_rows(alpha, 1, i_0, True, acc, N, CHUNK)
        b_next = _load_rows(next_alpha, 1, i_0, True, acc, N, CHUNK)
        for c in tl.static_range(CHUNK):
            m_row = m_e & (i_0 + c < N)
            i_row = (i_0 + c) * width
            b_d = b_alpha[c] * b_g
            b_first = beta1 * b_m[c] + rest1 * b_d
            b_second = beta2 * b_s[c] + rest2 * b_d * b_d
            b_new = keep * b_w[c] - rate * b_first / (tl.sqrt(b_second) * scale + eps)
            tl.store(p_m + i_row, b_first, mask=m_row)
            tl.store(p_s + i_row, b_second, mask=m_row)
            tl.store(p_w + i_row, b_new, mask=m_row)
            b_point += b_next[c] * b_new
    b_point = _mix_rows(b_point, p_w, width, next_alpha, m_e, N, ROWS, CHUNK)
    _store_point(i_param, i_e, o_e, m_e, b_point, POINT)


# ------------------------------------------------------------------------------------------- launch


def mix_(vertices: Tensor, alpha: Tensor, params: Sequence[Tensor], columns: Sequence[int]) -> None:
    """As :func:`.mix_next.mix_`, of at least one parameter."""
    table, owner = _layout(params, columns, vertices.device)
    if not len(owner):
        return
    _, (alpha,) = _upload([], [alpha], vertices.device)
    rows, size, point = len(vertices), vertices.element_size(), _TYPES[params[0].dtype]
    with torch.cuda.device_of(vertices):
        mix_kernel[(len(owner),)](
            *(vertices, vertices.stride(0), table, owner, alpha),
            **{"POINT": point, "ROWS": rows, "CHUNK": chunk(rows, size), "BLOCK": BLOCK},
            num_warps=WARPS,
        )


def step_(
    rule: Rule,
    vertices: Tensor,
    moments: tuple[Tensor, ...],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    columns: Sequence[int],
    alpha: Tensor,
    next_alpha: Tensor,
) -> None:
    """As :func:`.mix_next.step_`, of at least one parameter."""
    table, owner = _layout(params, columns, vertices.device)
    if not len(owner):
        return
    n, rows, point = len(alpha), len(vertices), _TYPES[params[0].dtype]
    if isinstance(rule, Sgd):
        kernel = sgd_kernel
        flags = {"MOMENTUM": bool(moments), "NESTEROV": rule.nesterov, "FIRST": rule.first}
        numbers = [rule.lr, (rule.momentum, 1 - rule.dampening, rule.weight_decay)]
        moments = moments or (None,)
    else:
        kernel, flags = adamw_kernel, {}
        betas = [x for b in rule.betas for x in (b, 1 - b, math.log(b) if b else -math.inf)]
        numbers = [rule.lr, rule.step, (*betas, rule.eps, rule.weight_decay)]
    addresses = [g.data_ptr() for g in grads]
    grads, values = _upload(addresses, [alpha, next_alpha, *numbers], vertices.device)
    with torch.cuda.device_of(vertices):
        kernel[(len(owner),)](
            *(vertices, *moments, vertices.stride(0), table, owner, grads, *values),
            **{"POINT": point, "N": n, "ROWS": rows, "MAXIMIZE": rule.maximize, **flags},
            **{"CHUNK": chunk(n, vertices.element_size()), "BLOCK": BLOCK},
            num_warps=WARPS,
        )


def chunk(n: int, size: int) -> int:
    """How many of n rows a program loads at a time: 16 bytes an element or less, in even shares."""
    return math.ceil(n / math.ceil(n * size / 16))


# What the graphs captured so far read at each replay.
_held: list[tuple[Tensor, ...]] = []


def _layout(
    params: Sequence[Tensor], columns: Sequence[int], device: torch.device, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """The table and the owners of parameters, made once for each set of them."""
    addresses = tuple(p.data_ptr() for p in params)
    sizes = tuple(p.numel() for p in params)
    layout = _make_layout(addresses, tuple(columns), sizes, device, block)
    if _capturing(device):
        _held.append(layout)
    return layout


@functools.lru_cache(maxsize=256)
def _make_layout(addresses, columns, sizes, device, block) -> tuple[Tensor, Tensor]:
    programs = [triton.cdiv(size, block) for size in sizes]
    first = accumulate(programs[:-1], initial=0)
    table = torch.tensor(list(zip(addresses, columns, sizes, first, strict=True)))
    owner = torch.arange(len(sizes), dtype=torch.int32)
    # These copies wait: any stream may be the next to read them.
    return table.to(device), owner.repeat_interleave(torch.tensor(programs)).to(device)


def _upload(
    addresses: Sequence[int],
    values: Sequence[float | Sequence[float] | Tensor],
    device: torch.device,
) -> tuple[Tensor, list[Tensor]]:
    """Addresses and values on the device: those from the host in one copy, in float64."""
    there = {k: v for k, v in enumerate(values) if isinstance(v, Tensor) and v.device == device}
    here = {k: _numbers(v) for k, v in enumerate(values) if k not in there}
    numbers = [x for v in here.values() for x in v]
    packed = struct.pack(f"{len(addresses)}q{len(numbers)}d", *addresses, *numbers)
    if not packed:
        return torch.empty(0), [v.contiguous() for v in there.values()]
    host = torch.frombuffer(bytearray(packed), dtype=torch.int64)
    if device.type != "cpu":
        host = host.pin_memory()
    data = host.to(device, non_blocking=True)
    if _capturing(device):
        _held.append((host, data))
    sent = data[len(addresses) :].view(torch.float64).split([len(v) for v in here.values()])
    on_device = {k: v.contiguous() for k, v in there.items()} | dict(zip(here, sent, strict=True))
    return data[: len(addresses)], [on_device[k] for k in range(len(values))]


def _numbers(value: float | Sequence[float] | Tensor) -> list[float]:
    if isinstance(value, Tensor):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) else [value]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
