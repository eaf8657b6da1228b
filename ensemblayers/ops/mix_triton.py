"""The mix in Triton, and its gradients: one pass over the stack each. :mod:`.mix` defines them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .mix_next_triton import _load, _mix_rows, chunk

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
