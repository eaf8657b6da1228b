"""BatchEnsemble: members that share their weights up to rank-1 factors; a batch is divided."""

from collections.abc import Callable

from torch import Tensor, nn

import ensemblayers as el

from ..errors import UsageError
from .method import Method


class BatchEnsembleMethod(Method):
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        if self.settings.batch < self.n:
            raise UsageError(
                f"batch-ensemble: a batch of {self.settings.batch} can't be divided among "
                f"{self.n} members"
            )
        return el.to_batch_ensemble(make(), n=self.n)

    def step(self, x: Tensor, y: Tensor) -> None:
        rows = len(x) // self.n * self.n
        if rows:  # The end of an epoch may hold fewer rows than members.
            super().step(x[:rows], y[:rows])
