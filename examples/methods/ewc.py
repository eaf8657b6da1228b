"""EWC: a quadratic penalty holds the weights that the last task needs.

Kirkpatrick et al. 2017, https://arxiv.org/abs/1612.00796, in the form of the A-GEM authors' code:
one anchor, the weights after the last task, and a running Fisher information that is scaled to
[0, 1] at the end of each task. Of that the new weighs 1 - DECAY here, .9 in their code (PILOTS.md).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Memory
from ..settings import Settings
from .method import Criterion, Method

DECAY = 0.9  # of the running Fisher information


class EWC(Method):
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
        self.params = list(self.model.parameters())
        self.fisher = [torch.zeros_like(p) for p in self.params]
        self.squares = [torch.zeros_like(p) for p in self.params]
        self.steps = 0
        self.anchor: list[Tensor] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        self._record()
        if self.anchor:
            self._penalise()
        self.optimizer.step()

    def finish(self, task: int) -> None:
        self.anchor = [p.detach().clone() for p in self.params]
        self.importance = normalised(self.fisher)

    def _record(self) -> None:
        """Let the gradient of the loss, without the penalty, into the Fisher information."""
        for s, p in zip(self.squares, self.params, strict=True):
            s.addcmul_(p.grad, p.grad)
        self.steps += 1
        steps = self.settings.fisher_steps
        if self.steps % steps:
            return
        for f, s in zip(self.fisher, self.squares, strict=True):
            f.lerp_(s / steps, 1 - DECAY)
            s.zero_()

    @torch.no_grad()
    def _penalise(self) -> None:
        """Add the gradient of ``penalty * sum F (w - anchor)^2``."""
        weight = 2 * self.settings.penalty
        for p, f, w in zip(self.params, self.importance, self.anchor, strict=True):
            p.grad.addcmul_(f, p - w, value=weight)


def normalised(fisher: list[Tensor]) -> list[Tensor]:
    """Scale so that the least of all elements is 0 and the greatest 1."""
    least = torch.stack([f.min() for f in fisher]).min()
    span = torch.stack([f.max() for f in fisher]).max() - least
    return [(f - least) / span.clamp(min=torch.finfo(span.dtype).tiny) for f in fisher]
