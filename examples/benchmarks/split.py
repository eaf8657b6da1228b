"""Streams of tasks that each have classes of their own: those of an image set, a few a task."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import reduced_resnet
from . import images
from .benchmark import Benchmark, as_floats

NUM_TASKS = 20
SHORT_TASKS = 5  # The ablation's: the first 25 classes.


@dataclass
class SplitTasks(Benchmark):
    """A benchmark whose task t has the classes from ``t * per_task``, in the order of the labels.

    The task of an image is given: in the loss as in predictions, its own classes alone count.

    Args:
        name: the benchmark's name.
        train, test: square images ``[N, side, side, channels]``, uint8, and labels ``[N]``. The
            test images are to be shuffled: BatchNorm sees a batch of them at a time.
        tasks: number of tasks.
        per_task: number of classes a task.
        classes: number of classes, the network's outputs.
        whole: whether it has all its tasks and training examples.
    """

    # BatchNorm takes the batch's statistics in evaluation too: the batch is part of the protocol.
    test_batch = 100

    tasks: int = NUM_TASKS
    per_task: int = 5
    classes: int = images.CLASSES
    whole: bool = True

    @property
    def num_tasks(self) -> int:
        return self.tasks

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self.train[0].shape[1:]
        return (channels, height, width)

    def network(self, hidden: int, dropout: float = 0.0) -> nn.Module:
        return reduced_resnet(hidden, self.classes, side=self.shape[1], dropout=dropout)

    def task_classes(self, task: int) -> range:
        return range(task * self.per_task, (task + 1) * self.per_task)

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy, each example's over the classes of its task.

        It is that of scores that are minus infinity for all other classes.
        """
        own = torch.arange(self.per_task, device=y.device)
        within = y % self.per_task
        return F.cross_entropy(scores.gather(1, (y - within).unsqueeze(1) + own), within)

    def shortened(self, tasks: int | None, examples: int | None) -> Self:
        """The first tasks, and at most so many training examples of each.

        The examples are divided equally among the task's classes, of which each keeps one at least.
        """
        x, y = self.train
        if examples is not None:
            each = max(1, examples // self.per_task)
            first = [(y == label).nonzero().squeeze(1)[:each] for label in range(self.classes)]
            rows = torch.cat(first).sort().values
            x, y = x[rows], y[rows]
        whole = self.whole and tasks is None and examples is None
        return replace(self, train=(x, y), tasks=tasks or self.tasks, whole=whole)

    def _rows(self, y: Tensor, task: int) -> Tensor:
        return (y // self.per_task == task).nonzero().squeeze(1)

    def _show(self, x: Tensor, tasks: Tensor) -> Tensor:
        # Channels last in memory, as they are stored: convolutions on a CPU are faster so.
        return as_floats(x.movedim(-1, 1))


def split_cifar_100(seed: int, root: Path, download: bool) -> SplitTasks:
    """CIFAR-100 in 20 tasks of five classes."""
    train, test = images.cifar_100(root, download)
    return SplitTasks("split-cifar-100", train, _shuffled(*test))


def split_cifar_100_5(seed: int, root: Path, download: bool) -> SplitTasks:
    """The first five tasks of Split CIFAR-100: the paper's ablation."""
    whole = split_cifar_100(seed, root, download)
    return replace(whole, name="split-cifar-100-5", tasks=SHORT_TASKS)


def split_miniimagenet(seed: int, root: Path, download: bool) -> SplitTasks:
    """miniImageNet in 20 tasks of five classes, drawn without replacement: another order each seed.

    In the order of the files the classes of a task are of one kind: birds, dogs, and so on.
    """
    order = torch.randperm(images.CLASSES, generator=torch.Generator().manual_seed(seed))
    place = order.argsort()
    (x, y), (test_x, test_y) = images.miniimagenet(root)
    return SplitTasks("split-miniimagenet", (x, place[y]), _shuffled(test_x, place[test_y]))


def _shuffled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """In one random order, the same for all seeds."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]
