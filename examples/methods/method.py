"""What a method is: how it starts a task, takes a batch, ends a task, and predicts."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ensemblayers as el

from ..graphs import GraphedBackward
from ..memory import Memory
from ..settings import Settings

Criterion = Callable[[Tensor, Tensor], Tensor]


class Method:
    """A network trained by SGD on one task after the other: the base of all methods.

    Args:
        make: makes a new plain network.
        settings: the hyper-parameters.
        n: number of members; methods of a single network don't use it.
        memory: the buffer; whoever runs the method fills it after each task, before :meth:`finish`.
        criterion: mean loss of scores ``[B, classes]`` for labels ``[B]``.
    """

    ensemble = True  # False: a single network, whatever n
    joint = False  # True: trains on all tasks at once

    def __init__(
        self,
        make: Callable[[], nn.Module],
        settings: Settings,
        n: int,
        memory: Memory,
        criterion: Criterion = F.cross_entropy,
    ) -> None:
        self.settings = settings
        self.n = n
        self.memory = memory
        self.criterion = criterion
        self.model = self.build(make)
        self.graphed: GraphedBackward | None = None

    @property
    def update_flops(self) -> int:
        """FLOPs of the optimizer in a step, which torch's counter does not see: SGD's."""
        return 2 * sum(p.numel() for p in self.model.parameters())

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Make the model that is trained."""
        return make()

    def start(self, task: int) -> None:
        """Begin a task: a new optimizer, at the task's learning rate."""
        s = self.settings
        lr = s.lr * s.decay**task
        # Fused: else a sixth of a small network's step goes to the calls of the optimizer.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr, momentum=s.momentum, fused=True
        )
        self.model.train()

    def step(self, x: Tensor, y: Tensor) -> None:
        """Train on one batch."""
        self.backward(x, y)
        self.optimizer.step()

    def backward(self, x: Tensor, y: Tensor) -> None:
        """Give the parameters the gradients of a batch's loss."""
        if x.is_cuda:
            if self.graphed is None:
                self.graphed = GraphedBackward(self.loss, self.model.parameters())
            self.graphed(x, y)
        else:
            self.optimizer.zero_grad()
            self.loss(x, y).backward()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss of one batch."""
        return self.criterion(self.model(x), y)

    def finish(self, task: int) -> None:
        """End a task, its examples in the memory."""

    def predictor(self) -> Callable[[Tensor], Tensor]:
        """The function that predicts: images ``[B, ...]`` to its members' scores.

        Shape:
            - Output: ``[n, B, classes]``, to be combined; n is 1 where one network predicts.
        """
        return functools.partial(el.members, self.model.eval())
