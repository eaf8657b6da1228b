"""Vanilla ensemble: n independent networks, their probabilities averaged."""

from collections.abc import Callable

from torch import Tensor, nn

import ensemblayers as el

from .method import Method


class VanillaEnsemble(Method):
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        return el.StackedEnsemble([make() for _ in range(self.n)])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return el.ensemble_loss(self.criterion, self.model(x, shared=True), y)
