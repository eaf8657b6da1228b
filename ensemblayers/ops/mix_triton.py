"""The mix in Triton, and its gradients: one pass over the stack each. :mod:`.mix` defines them.

Of many stacks at once, each is reached by its address, as :mod:`.mix_next_triton` describes; the
results lie one behind the other in one buffer.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .mix_next_triton import _layout, _load, _locate, _mix_rows, _upload, chunk

BLOCK = 1024
WARPS = 4

# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def _wide(number):
    """A number in 64 bits: a tensor, or the constant that Triton makes of an argument of 1."""
    return tl.full((), 0, tl.int64) + number


@triton.jit(do_not_specialize_on_alignment=["alpha"])
def mix_kernel(
    stacked,  # [N, size]
    alpha,  # [N]
    out,  # [size]
    size,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_e = tl.program_id(0).to(tl.int64) * BLOCK
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < size - i_e
    b_out = tl.zeros((BLOCK,), tl.float32)
    b_out = _mix_rows(b_out, stacked + i_e + o_e, _wide(size), alpha, m_e, 0, N, CHUNK)
    tl.store(out + i_e + o_e, b_out.to(out.dtype.element_ty), mask=m_e)


@triton.jit(do_not_specialize_on_alignment=["alpha"])
def mix_backward_kernel(
    grad,  # [size]
    stacked,  # [N, size]
    alpha,  # [N]
    d_stacked,  # [N, size]
    partial,  # [programs, N]
    size,
    N: tl.constexpr,
    STACKED: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    i_e = i_b * BLOCK
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < size - i_e
    width = _wide(size)
    b_g = _load(grad + i_e + o_e, m_e, tl.float32)
    for i in range(0, N):
        if ALPHA:
            b_w = _load(stacked + i * width + i_e + o_e, m_e, tl.float32)
            tl.store(partial + i_b * N + i, tl.sum(b_g * b_w, 0))
        if STACKED:
            b_d = tl.load(alpha + i).to(tl.float32) * b_g
            p_d = d_stacked + i * width + i_e + o_e
            tl.store(p_d, b_d.to(d_stacked.dtype.element_ty), mask=m_e)


@triton.jit(do_not_specialize_on_alignment=["alpha"])
def mix_all_kernel(
    table,  # [K, 4]: address of a stack, first column of its mix, size of the mix, first program
    owner,
    alpha,  # [N]
    out,  # [columns]
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    i_k, i_stack, i_e, i_column, left = _locate(table, owner, BLOCK)
    width = tl.load(table + i_k * 4 + 2)
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < left
    p_w = i_stack.to(tl.pointer_type(dtype)) + i_e + o_e
    b_out = _mix_rows(tl.zeros((BLOCK,), tl.float32), p_w, width, alpha, m_e, 0, N, CHUNK)
    tl.store(out + i_column + o_e, b_out.to(dtype), mask=m_e)


@triton.jit(do_not_specialize_on_alignment=["alpha", "grads"])
def mix_all_backward_kernel(
    table,
    owner,
    grads,  # [K]: addresses
    alpha,  # [N]
    d_stacks,  # [N * columns]: a stack's gradient from N times its first column
    partial,  # [programs, N]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = d_stacks.dtype.element_ty
    i_k, i_stack, i_e, i_column, left = _locate(table, owner, BLOCK)
    width = tl.load(table + i_k * 4 + 2)
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < left
    p_g = tl.load(grads + i_k).to(tl.pointer_type(dtype)) + i_e + o_e
    b_g = _load(p_g, m_e, tl.float32)
    p_w = i_stack.to(tl.pointer_type(dtype)) + i_e + o_e
    p_d = d_stacks + (i_column - i_e) * N + i_e + o_e
    i_b = tl.program_id(0).to(tl.int64)
    for i in range(0, N):
        b_w = _load(p_w + i * width, m_e, tl.float32)
        tl.store(partial + i_b * N + i, tl.sum(b_g * b_w, 0))
        b_d = tl.load(alpha + i).to(tl.float32) * b_g
        tl.store(p_d + i * width, b_d.to(dtype), mask=m_e)


# ------------------------------------------------------------------------------------------- launch


def mix(stacked: Tensor, alpha: Tensor) -> Tensor:
    """As :func:`.mix.plain_mix`, at one point."""
    stacked, alpha = stacked.contiguous(), alpha.contiguous()
    out = stacked.new_empty(stacked.shape[1:])
    n, size = len(stacked), out.numel()
    if size:
        with torch.cuda.device_of(stacked):
            mix_kernel[(triton.cdiv(size, BLOCK),)](
                *(stacked, alpha, out, size),
                **{"N": n, "CHUNK": chunk(n, stacked.element_size()), "BLOCK": BLOCK},
                num_warps=WARPS,
            )
    return out


def mix_backward(
    grad: Tensor, stacked: Tensor, alpha: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """As :func:`.mix.plain_mix_backward`."""
    grad, stacked, alpha = grad.contiguous(), stacked.contiguous(), alpha.contiguous()
    n, size = len(stacked), grad.numel()
    programs = triton.cdiv(size, BLOCK)
    d_stacked = torch.empty_like(stacked) if needs[0] else stacked.new_empty(0)
    partial = stacked.new_empty(programs, n, dtype=torch.float32)
    if size:
        with torch.cuda.device_of(stacked):
            mix_backward_kernel[(programs,)](
                *(grad, stacked, alpha, d_stacked, partial, size),
                **{"N": n, "STACKED": needs[0], "ALPHA": needs[1], "BLOCK": BLOCK},
                num_warps=WARPS,
            )
    d_alpha = partial.sum(0).to(alpha.dtype) if needs[1] else alpha.new_empty(0)
    return d_stacked, d_alpha


def mix_all(stacks: Sequence[Tensor], alpha: Tensor) -> list[Tensor]:
    """As :func:`.mix.mix_all`, without gradients."""
    stacks, alpha = [s.contiguous() for s in stacks], alpha.contiguous()
    first, (table, owner) = stacks[0], _placed(stacks)
    n, columns = len(first), _columns(stacks)
    out = first.new_empty(columns[-1])
    if len(owner):
        with torch.cuda.device_of(first):
            mix_all_kernel[(len(owner),)](
                *(table, owner, alpha, out),
                **{"N": n, "CHUNK": chunk(n, first.element_size()), "BLOCK": BLOCK},
                num_warps=WARPS,
            )
    return [
        out[column : column + s[0].numel()].view(s.shape[1:])
        for s, column in zip(stacks, columns, strict=False)
    ]


def mix_all_backward(
    grads: Sequence[Tensor], stacks: Sequence[Tensor], alpha: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The gradients of the stacks and of alpha."""
    stacks, grads = [s.contiguous() for s in stacks], [g.contiguous() for g in grads]
    first, (table, owner) = stacks[0], _placed(stacks)
    n, columns = len(first), _columns(stacks)
    d_stacks = first.new_empty(n * columns[-1])
    partial = first.new_empty(len(owner), n, dtype=torch.float32)
    if len(owner):
        with torch.cuda.device_of(first):
            addresses, _ = _upload([g.data_ptr() for g in grads], [], first.device)
            mix_all_backward_kernel[(len(owner),)](
                *(table, owner, addresses, alpha.contiguous(), d_stacks, partial),
                **{"N": n, "BLOCK": BLOCK},
                num_warps=WARPS,
            )
    found = [
        d_stacks[n * column : n * column + s.numel()].view(s.shape)
        for s, column in zip(stacks, columns, strict=False)
    ]
    return found, partial.sum(0).to(alpha.dtype)


def _columns(stacks: Sequence[Tensor]) -> list[int]:
    """Where each mix begins, aligned to 16 elements; at last, where the buffer ends."""
    return list(accumulate((triton.cdiv(s[0].numel(), 16) * 16 for s in stacks), initial=0))


def _placed(stacks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return _layout([s[0] for s in stacks], _columns(stacks)[:-1], stacks[0].device, BLOCK)
