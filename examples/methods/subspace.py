"""Subspace ensembles: a point drawn at each step trains, the midpoint predicts.

The model stays a plain network; the subspace lives in its optimizer. With experience replay, each
batch is joined by examples of the earlier tasks.
"""

import copy
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ensemblayers as el
from ensemblayers.optim import SubspaceSGD

from ..memory import Memory
from ..settings import Settings
from .method import Criterion, Method


class SubspaceMethod(Method):
    def __init__(
        self,
        make: Callable[[], nn.Module],
        settings: Settings,
        n: int,
        memory: Memory,
        criterion: Criterion = F.cross_entropy,
    ) -> None:
        super().__init__(make, settings, n, memory, criterion)
        s = settings
        self.optimizer = SubspaceSGD(
            self.model.parameters(), s.lr, n=self.n, sigma=s.sigma, momentum=s.momentum
        )

    @property
    def update_flops(self) -> int:
        """Of the mix, and of the vertices' updates by their shares of the gradient."""
        return 4 * self.n * sum(p.numel() for p in self.model.parameters())

    def start(self, task: int) -> None:
        self.optimizer.forget()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * self.settings.decay**task
        self.optimizer.train()
        self.model.train()

    def midpoint(self) -> nn.Module:
        """A copy of the network at the midpoint."""
        self.optimizer.eval()
        plain = copy.deepcopy(self.model).eval()
        self.optimizer.train()
        return plain

    def predictor(self) -> Callable[[Tensor], Tensor]:
        return functools.partial(el.members, self.midpoint())


class SubspaceReplay(SubspaceMethod):
    def step(self, x: Tensor, y: Tensor) -> None:
        if len(self.memory):
            x_old, y_old = self.memory.sample(self.settings.replay)
            x, y = torch.cat([x, x_old]), torch.cat([y, y_old])
        super().step(x, y)
