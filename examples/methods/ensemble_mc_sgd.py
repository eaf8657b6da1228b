"""Ensemble MC-SGD: n runs of MC-SGD from different starts, their probabilities averaged.

With bagging, each batch trains one member only, chosen at random.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .connectivity import MCSGD
from .method import Method


class EnsembleMCSGD(Method):
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        self.members = [
            MCSGD(make, self.settings, 1, self.memory, self.criterion) for _ in range(self.n)
        ]
        return nn.ModuleList(member.model for member in self.members)

    @property
    def update_flops(self) -> int:
        return sum(member.update_flops for member in self.members)

    def start(self, task: int) -> None:
        for member in self.members:
            member.start(task)

    def step(self, x: Tensor, y: Tensor) -> None:
        for member in self.members:
            member.step(x, y)

    def finish(self, task: int) -> None:
        for member in self.members:
            member.finish(task)

    def predictor(self) -> Callable[[Tensor], Tensor]:
        predictors = [member.predictor() for member in self.members]
        return lambda x: torch.cat([predict(x) for predict in predictors])


class Bagging(EnsembleMCSGD):
    @property
    def update_flops(self) -> int:
        return self.members[0].update_flops

    def step(self, x: Tensor, y: Tensor) -> None:
        self.members[torch.randint(self.n, ()).item()].step(x, y)
