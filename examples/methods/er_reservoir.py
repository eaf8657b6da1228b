"""ER-Reservoir: each batch is joined by examples of a reservoir of the whole stream.

Chaudhry et al. 2019, https://arxiv.org/abs/1902.10486.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Memory, Reservoir
from ..settings import Settings
from .method import Criterion, Method


class ReservoirReplay(Method):
    ensemble = False

    def __init__(
        self,
        make: Callable[[], nn.Module],
        settings: Settings,
        n: int,
        memory: Memory,
        criterion: Criterion = F.cross_entropy,
    ) -> None:
        super().__init__(make, settings, n, memory, criterion)
        self.reservoir = Reservoir(settings.buffer, memory.generator)

    def step(self, x: Tensor, y: Tensor) -> None:
        joined = (x, y)
        if len(self.reservoir):
            x_old, y_old = self.reservoir.sample(self.settings.replay)
            joined = (torch.cat([x, x_old]), torch.cat([y, y_old]))
        super().step(*joined)
        self.reservoir.add(x, y)
