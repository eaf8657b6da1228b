"""The fused pass of the subspace optimizers: update all vertices, write the next point.

The n vertices (and frozen ones behind them) lie in one buffer ``[n + frozen, P]``, and a parameter
is a range of its columns. One gradient G serves all vertices, that of vertex i is ``alpha_i G``:

    W_i <- W_i - step(alpha_i G + weight_decay W_i),    parameter <- sum_i next_i W_i

An element's vertices are read once and written once, and no gradient is copied. Plain PyTorch is
the definition; C++ (``csrc/mix_next.cpp``) does the same on a CPU and Triton
(:mod:`.mix_next_triton`) on a GPU.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import native

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Sgd:
    """torch.optim.SGD's rule; ``first``: the momentum buffer holds nothing yet.

    A tensor as lr is for a CUDA graph: each replay reads it.
    """

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    maximize: bool

    def apply(self, w: Tensor, moments: tuple[Tensor, ...], grads: Tensor) -> None:
        """Update vertices ``[n, columns]`` from their gradients, in place."""
        d = grads.neg() if self.maximize else grads
        if self.weight_decay:
            d = d.add(w, alpha=self.weight_decay)
        if moments:
            (buffer,) = moments
            if self.first:
                buffer.copy_(d)
            else:
                buffer.mul_(self.momentum).add_(d, alpha=1 - self.dampening)
            d = d.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        w.sub_(d, alpha=float(self.lr))


@dataclass(slots=True)
class AdamW:
    """torch.optim.AdamW's rule at step ``step``, counted from 1.

    Tensors as lr and step are for a CUDA graph: each replay reads them.
    """

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int | Tensor
    maximize: bool

    def corrections(self) -> tuple[float, float]:
        """What the bias corrections divide the two moments by."""
        first, second = (1 - beta ** float(self.step) for beta in self.betas)
        return first, second

    def apply(self, w: Tensor, moments: tuple[Tensor, ...], grads: Tensor) -> None:
        """Update vertices ``[n, columns]`` from their gradients, in place."""
        average, square = moments
        (beta1, beta2), (first, second) = self.betas, self.corrections()
        d = grads.neg() if self.maximize else grads
        average.mul_(beta1).add_(d, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(d, d, value=1 - beta2)
        lr = float(self.lr)
        w.mul_(1 - lr * self.weight_decay)
        denominator = square.sqrt().div_(math.sqrt(second)).add_(self.eps)
        w.addcdiv_(average, denominator, value=-lr / first)


Rule = Sgd | AdamW


def mix_(vertices: Tensor, alpha: Tensor, params: Sequence[Tensor], columns: Sequence[int]) -> None:
    """Write the point alpha into parameters.

    Shape:
        - vertices: ``[rows, P]``, alpha: ``[rows]``
        - params: dense, each a range of columns in the order of its memory, from ``columns[k]``
    """
    if _in_cpp(vertices, params):
        torch.ops.ensemblayers.mix_.default(vertices, alpha, params, columns)
        return
    if _in_triton(vertices, params):
        _triton().mix_(vertices, alpha, params, columns)
        return
    with torch.no_grad():
        alpha = alpha.to(vertices)
        for p, column in zip(params, columns, strict=True):
            _memory(p).copy_(alpha @ vertices[:, column : column + p.numel()])


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
    """Update the first n vertices by ``alpha_i`` times each gradient, then write the next point.

    Shape:
        - vertices: ``[n + frozen, P]``, moments: ``[n, P]`` each
        - params, grads: alike, of the same memory layout; parameter k from column ``columns[k]``
        - alpha: ``[n]``, next_alpha: ``[n + frozen]``
    """
    if _in_cpp(vertices, params):
        _step_cpp(rule, vertices, moments, params, grads, columns, alpha, next_alpha)
        return
    if _in_triton(vertices, params):
        _triton().step_(rule, vertices, moments, params, grads, columns, alpha, next_alpha)
        return
    with torch.no_grad():
        alpha, next_alpha = alpha.to(vertices), next_alpha.to(vertices)
        n = len(alpha)
        for p, g, column in zip(params, grads, columns, strict=True):
            span = slice(column, column + p.numel())
            own = torch.outer(alpha, _memory(g).to(vertices.dtype))
            rule.apply(vertices[:n, span], tuple(m[:, span] for m in moments), own)
            _memory(p).copy_(next_alpha @ vertices[:, span])


def _step_cpp(rule, vertices, moments, params, grads, columns, alpha, next_alpha) -> None:
    ops = torch.ops.ensemblayers
    if isinstance(rule, Sgd):
        buffer = moments[0] if moments else None
        numbers = (float(rule.lr), rule.momentum, rule.dampening, rule.weight_decay)
        flags = (rule.nesterov, rule.first, rule.maximize)
        ops.sgd_step_.default(
            vertices, buffer, params, grads, columns, alpha, next_alpha, *numbers, *flags
        )
    else:
        numbers = (float(rule.lr), *rule.betas, rule.eps, rule.weight_decay, *rule.corrections())
        ops.adamw_step_.default(
            vertices, *moments, params, grads, columns, alpha, next_alpha, *numbers, rule.maximize
        )


def _in_cpp(vertices: Tensor, params: Sequence[Tensor]) -> bool:
    return vertices.device.type == "cpu" and _known(vertices, params) and native.available()


def _in_triton(vertices: Tensor, params: Sequence[Tensor]) -> bool:
    if vertices.device.type != "cuda" or not _known(vertices, params) or _triton() is None:
        return False
    # What Triton needs of a card, and to round to bfloat16 there.
    least = (8, 0) if params[0].dtype == torch.bfloat16 else (7, 0)
    return (
        torch.version.hip is not None or torch.cuda.get_device_capability(vertices.device) >= least
    )


@functools.cache
def _triton():
    """The Triton kernels, where Triton is installed."""
    try:
        from . import mix_next_triton
    except ImportError:
        return None
    return mix_next_triton


def _known(vertices: Tensor, params: Sequence[Tensor]) -> bool:
    if not params:
        return False
    pair = (vertices.dtype, params[0].dtype)
    return pair == (torch.float64,) * 2 or (pair[0] == torch.float32 and pair[1] in _FLOATS)


def _memory(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of its memory, ``[numel]``, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))
