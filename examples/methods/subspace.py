"""Subspace ensembles: a point drawn at each step trains, the midpoint predicts.

With experience replay, each batch is joined by examples of the earlier tasks.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import ensemblayers as el

from .method import Method


class SubspaceMethod(Method):
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        return el.to_subspace(make(), n=self.n, sigma=self.settings.sigma)

    def predictor(self) -> Callable[[Tensor], Tensor]:
        return el.collapse(self.model).eval()


class SubspaceReplay(SubspaceMethod):
    def step(self, x: Tensor, y: Tensor) -> None:
        if len(self.memory):
            x_old, y_old = self.memory.sample(self.settings.replay)
            x, y = torch.cat([x, x_old]), torch.cat([y, y_old])
        super().step(x, y)
