"""Initial values: each member as one plain layer, and the vertices around the first."""

import math

import torch
from torch import Tensor, nn


def reset_affine_(weight: Tensor, bias: Tensor | None) -> None:
    """Fill one member's weight and bias as nn.Linear and nn.Conv do."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    fan_in = weight[0].numel() if len(weight) else 0
    if bias is not None and fan_in > 0:
        nn.init.uniform_(bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


@torch.no_grad()
def vertices(first: Tensor, n: int, sigma: float) -> Tensor:
    """Stack n vertices: ``first`` itself, then ``first * N(1, sigma)`` elementwise.

    Shape:
        - first: ``[*shape]``
        - Output: ``[n, *shape]``
    """
    stacked = first.detach().expand(n, *first.shape).clone(memory_format=torch.contiguous_format)
    perturb_(stacked[1:], sigma)
    return stacked


@torch.no_grad()
def perturb_(tensor: Tensor, sigma: float) -> Tensor:
    """Multiply each element by a draw of N(1, sigma), in place; sigma is a standard deviation."""
    return tensor.mul_(torch.randn_like(tensor).mul_(sigma).add_(1))


def check_sigma(sigma: float) -> None:
    """Raise a ValueError unless sigma is a finite standard deviation."""
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"expected a standard deviation sigma >= 0, got sigma={sigma!r}")
