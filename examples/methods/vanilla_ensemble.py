"""Vanilla ensemble: n independent networks, their probabilities averaged."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

import ensemblayers as el

from .method import Method


class VanillaEnsemble(Method):
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        return el.StackedEnsemble([make() for _ in range(self.n)])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return el.ensemble_loss(F.cross_entropy, self.model(x, shared=True), y)

    def predictor(self) -> Callable[[Tensor], Tensor]:
        model = self.model.eval()
        return lambda x: el.combine(model(x, shared=True), "average")
