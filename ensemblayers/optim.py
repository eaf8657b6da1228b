"""Optimizers that hold a subspace around an untouched model.

The model stays a plain module and holds one point of the simplex; the n vertices live in the
optimizer. A training step is the model's own forward and backward pass and at most one fused pass
over the vertices: see :mod:`ensemblayers.ops.mix_next`.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ._optimizer import SubspaceOptimizer
from .ops.mix_next import AdamW, Rule, Sgd

__all__ = ["SubspaceAdamW", "SubspaceSGD"]


class SubspaceSGD(SubspaceOptimizer):
    """torch.optim.SGD for a subspace of n vertices around an untouched model.

    The model holds the point that was drawn; each step shares its gradient out to the vertices and
    writes the next point. ``opt.eval()`` puts the midpoint into the model, which predicts;
    ``opt.train()`` puts the drawn point back.

    On a CPU, from three vertices with momentum on, most steps don't touch the vertices: one pass in
    three writes the points of all three steps. Up to 256 MB are taken for that, for each group.

    Call ``opt.eval()`` before an evaluation and before saving the model's weights, ``opt.train()``
    before training goes on; or ``opt.follow(model)`` once, where a wrapper hides the two. Without
    either, ``model.eval()`` evaluates the drawn point.

    A step writes the parameters anew. What else wrote to them is an error, but for writes through
    ``p.data``, which torch does not count: they are lost.

    All draws are functions of one seed, drawn at construction (where ``torch.distributed`` runs,
    that of rank 0), and a count: the points are the same on every rank, and a run that resumes from
    a checkpoint goes on as it would have.

    Build it on every rank, after ``init_process_group``, and after ``fully_shard`` where that is
    used: the vertices and what is made of them are then DTensors, sharded as the parameters.

    Args:
        params: parameters or groups of them, as for torch.optim.SGD. Those that are frozen
            (requires_grad=False) at construction stay as they are, and have no vertices.
        lr, momentum, dampening, weight_decay, nesterov: as for torch.optim.SGD.
        n: number of vertices.
        sigma: vertex i > 0 starts as the parameters times N(1, sigma), elementwise.
        generator: draws the seed; by default torch's own.

    Raises:
        ValueError: an argument out of its range; parameters that overlap or are no floats.

    >>> from torch import nn
    >>> net = nn.Linear(4, 2)
    >>> opt = SubspaceSGD(net.parameters(), lr=0.1, n=3, sigma=0.1)
    >>> net(torch.zeros(8, 4)).sum().backward()
    >>> opt.step()
    >>> opt.vertices()[0].shape
    torch.Size([3, 2, 4])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        n: int,
        sigma: float = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"expected {name} >= 0, got {name}={value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov needs a momentum > 0 and dampening 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, n, sigma, generator)

    def _kind(self, steps: int) -> int:
        return min(steps, 1)

    def _moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        first = step == 1 and group["momentum"] > 0
        return Sgd(lr=float(group["lr"]), first=first, **{k: group[k] for k in names})


class SubspaceAdamW(SubspaceOptimizer):
    """torch.optim.AdamW for a subspace of n vertices around an untouched model.

    As :class:`SubspaceSGD`, with AdamW's rule for each vertex: ``opt.eval()`` before an evaluation
    and before saving the model's weights, ``opt.train()`` before training goes on.

    Args:
        params: parameters or groups of them, as for torch.optim.AdamW. Those that are frozen
            (requires_grad=False) at construction stay as they are, and have no vertices.
        lr, betas, eps, weight_decay: as for torch.optim.AdamW.
        n: number of vertices.
        sigma: vertex i > 0 starts as the parameters times N(1, sigma), elementwise.
        generator: draws the seed; by default torch's own.

    Raises:
        ValueError: an argument out of its range; parameters that overlap or are no floats.

    >>> from torch import nn
    >>> net = nn.Linear(4, 2)
    >>> opt = SubspaceAdamW(net.parameters(), lr=1e-3, n=3, sigma=0.1)
    >>> net(torch.zeros(8, 4)).sum().backward()
    >>> opt.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        n: int,
        sigma: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"expected {name} >= 0, got {name}={value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"expected two betas in [0, 1), got betas={betas}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, n, sigma, generator)

    def _moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        names = ("betas", "eps", "weight_decay", "maximize")
        return AdamW(lr=float(group["lr"]), step=step, **{k: group[k] for k in names})
