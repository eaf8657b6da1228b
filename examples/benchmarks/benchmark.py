"""What a benchmark is: tasks with their examples, the network for them, and which labels count."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 2**24  # pixels that are made ready at once


@dataclass
class Benchmark(ABC):
    """A stream of tasks that show images: the base of all benchmarks.

    Subclasses say which images a task has, and how it shows them; they have a field ``whole``,
    False where tasks or training examples were left out.

    Args:
        name: the benchmark's name.
        train, test: images, uint8 or floats in [0, 1], and labels ``[N]``.
    """

    test_batch: ClassVar[int] = 2_500  # a CPU is slower with more at a time

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    @abstractmethod
    def num_tasks(self) -> int: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of an image as the network sees it."""

    @abstractmethod
    def network(self, hidden: int, dropout: float = 0.0) -> nn.Module:
        """A new network of a width."""

    @abstractmethod
    def shortened(self, tasks: int | None, examples: int | None) -> Self:
        """The first tasks, and at most so many training examples of each."""

    @abstractmethod
    def task_classes(self, task: int) -> range:
        """The labels that a task's images can have, which a prediction chooses from."""

    @abstractmethod
    def _rows(self, y: Tensor, task: int) -> Tensor:
        """Where in the labels the examples of a task are: ``[examples]``."""

    @abstractmethod
    def _show(self, x: Tensor, tasks: Tensor) -> Tensor:
        """Stored images ``[B, ...]`` as the tasks ``[B]`` show them, floats in [0, 1]."""

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of the network's outputs ``[B, classes]`` for labels ``[B]``."""
        return F.cross_entropy(scores, y)

    @property
    def examples(self) -> int:
        """Number of training examples of a task."""
        return len(self._rows(self.train[1], 0))

    def test_task(self, task: int) -> tuple[Tensor, Tensor]:
        """Test images of a task, floats ``[N, *shape]``, and their labels."""
        x, y = self.test
        rows = self._rows(y, task)
        return self._show(x.index_select(0, rows), torch.full_like(rows, task)), y[rows]

    def batches(
        self, tasks: list[int], size: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch over the training images of the given tasks, in one shuffle.

        Shape:
            - Output: images ``[size, *shape]``, labels ``[size]``; the last batch may be smaller.
        """
        x, y = self.train
        parts = [self._rows(y, task) for task in tasks]
        rows = torch.cat(parts)
        which = torch.cat([torch.full_like(p, t) for p, t in zip(parts, tasks, strict=True)])
        order = torch.randperm(len(rows), generator=generator).to(rows.device)
        # Many batches at a time: a gather and a conversion each costs more than a training step.
        many = CHUNK // x[0].numel() // size
        for chunk in order.split(size * max(1, many)):
            index = rows[chunk]
            shown = self._show(x.index_select(0, index), which[chunk])
            yield from zip(shown.split(size), y[index].split(size), strict=True)

    def one_per_class(self, task: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One random training example of each class that a task has."""
        x, y = self.train
        rows = self._rows(y, task)
        chosen = []
        for label in y[rows].unique():
            found = rows[y[rows] == label]
            chosen.append(found[torch.randint(len(found), (), generator=generator)])
        index = torch.stack(chosen)
        return self._show(x[index], torch.full_like(index, task)), y[index]

    def to(self, device: torch.device) -> Self:
        """The same benchmark with its tensors on a device."""
        train, test = ((x.to(device), y.to(device)) for x, y in (self.train, self.test))
        return replace(self, train=train, test=test)


def as_floats(x: Tensor) -> Tensor:
    """Images of bytes as floats in [0, 1]; floats stay as they are."""
    return x.float().div_(255) if x.dtype == torch.uint8 else x
