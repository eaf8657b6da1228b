"""BatchEnsemble: members that share their weights up to rank-1 factors; a batch is divided."""

from collections.abc import Callable

from torch import Tensor, nn

import ensemblayers as el

from .method import Method


class BatchEnsembleMethod(Method):
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        return el.to_batch_ensemble(make(), n=self.n)

    def step(self, x: Tensor, y: Tensor) -> None:
        rows = len(x) // self.n * self.n
        if rows:  # The end of an epoch may hold fewer rows than members.
            super().step(x[:rows], y[:rows])
