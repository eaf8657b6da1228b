"""What the suites share: the eager forms of a subspace, and results in float64 to compare with."""

import os
import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import ensemblayers as el

MIXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda alpha, stack: torch.einsum("n,n...->...", alpha, stack),
    "sum": lambda alpha, stack: sum(a * w for a, w in zip(alpha, stack, strict=True)),
}


class Eager(nn.Module):
    """A linear layer, or several with ReLU between them, at a point that each forward draws."""

    def __init__(self, net: nn.Module, *, n: int, mix: str = "einsum", sigma: float = 0.1) -> None:
        super().__init__()
        self.n, self.mix = n, MIXES[mix]
        self.stacks = nn.ParameterList(
            p.detach() * (1 + sigma * torch.randn(n, *p.shape)) for p in net.parameters()
        )

    def forward(self, x: Tensor) -> Tensor:
        self.alpha = el.sample_simplex(self.n)
        stacks = list(self.stacks)
        for k in range(0, len(stacks), 2):
            weight, bias = (self.mix(self.alpha, stack) for stack in stacks[k : k + 2])
            x = F.linear(x if k == 0 else F.relu(x), weight, bias)
        return x


def compiled(module: nn.Module) -> nn.Module:
    """torch.compile of a module; skips the case where there is no C++ compiler."""
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler")
    torch._dynamo.reset()
    return torch.compile(module)


def at_points(plain: nn.Module, points: Sequence[Sequence[Tensor]], x: Tensor) -> list[Tensor]:
    """Outputs of a plain module with each of several sets of parameters, in x's dtype."""
    names = [name for name, _ in plain.named_parameters()]
    return [functional_call(plain, dict(zip(names, p, strict=True)), (x,)) for p in points]


def mixed(alpha: Tensor, stacks: Sequence[Tensor]) -> list[Tensor]:
    """The point alpha ``[n]`` of stacked tensors, in float64."""
    return [torch.tensordot(alpha.double(), stack.double(), 1) for stack in stacks]


def close(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float, what: str) -> None:
    """Raise unless tensors differ from float64 ones by a relative RMS error below a tolerance."""
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        b = b.detach()
        error = float((a.detach().double() - b).norm() / b.norm())
        assert error < tolerance, f"{what} {k} is off by {error:.1e} of its norm"
