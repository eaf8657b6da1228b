"""Streams of tasks: the same images, each task with its own rearrangement of the pixels."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import MNIST
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from ..errors import UsageError
from ..models import mlp
from .benchmark import Benchmark, as_floats

NUM_TASKS = 20
ROTATION_STEP = 9.0  # degrees; task t is turned by 9 t, 0 to 171
SHORT_TASKS = 5  # The ablation's, turned by 22.5 t degrees, 0 to 90.
SHORT_STEP = 22.5


@dataclass
class PixelTasks(Benchmark):
    """A benchmark whose task t shows every image through the pixel map ``maps[t]``.

    Args:
        name: the benchmark's name.
        train, test: images ``[N, pixels]``, uint8 or floats in [0, 1], and labels ``[N]``.
        maps: ``[tasks, pixels]``, for each pixel the one that it shows; ``pixels`` shows black.
        classes: number of labels, shared by all tasks.
        whole: whether it has all its tasks and training examples.
    """

    maps: Tensor
    classes: int = 10
    whole: bool = True

    @property
    def num_tasks(self) -> int:
        return len(self.maps)

    @property
    def shape(self) -> tuple[int]:
        return (self.maps.shape[1],)

    def network(self, hidden: int, dropout: float = 0.0) -> nn.Module:
        return mlp(*self.shape, hidden, self.classes, dropout)

    def task_classes(self, task: int) -> range:
        return range(self.classes)

    def to(self, device: torch.device) -> Self:
        return replace(super().to(device), maps=self.maps.to(device))

    def shortened(self, tasks: int | None, examples: int | None) -> Self:
        train = (self.train[0][:examples], self.train[1][:examples])
        whole = self.whole and tasks is None and examples is None
        return replace(self, train=train, maps=self.maps[:tasks], whole=whole)

    def _rows(self, y: Tensor, task: int) -> Tensor:
        return torch.arange(len(y), device=y.device)

    def _show(self, x: Tensor, tasks: Tensor) -> Tensor:
        x = F.pad(x, (0, 1))  # The pixel that the maps take for black.
        one = (tasks == tasks[:1]).all()
        # Of one row, repeated, where all examples are of one task: no index of the images' size.
        maps = self.maps[tasks[:1]].expand(len(x), -1) if one else self.maps[tasks]
        return as_floats(x.gather(1, maps))


def rotation_maps(side: int, angles: list[float]) -> Tensor:
    """Pixel maps of rotations about the centre, counter-clockwise, nearest, same canvas."""
    numbers = torch.arange(1.0, side * side + 1).view(1, side, side)
    turned = [rotate(numbers, a, InterpolationMode.NEAREST, fill=[0.0]) for a in angles]
    maps = torch.stack(turned).flatten(1).long() - 1
    return maps.where(maps >= 0, side * side)


def permutation_maps(pixels: int, tasks: int, seed: int) -> Tensor:
    """Pixel maps of random permutations; the first task's is the identity."""
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randperm(pixels, generator=generator) for _ in range(tasks - 1)]
    return torch.stack([torch.arange(pixels), *maps])


def rotated_digits(seed: int, root: Path, download: bool) -> PixelTasks:
    """Rotated MNIST's tasks on scikit-learn's 1,797 images of 8x8: 1,437 train, 360 test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=360, stratify=y, random_state=0)
    x_train, x_test, y_train, y_test = map(torch.tensor, parts)
    maps = rotation_maps(8, [ROTATION_STEP * t for t in range(NUM_TASKS)])
    train, test = (x_train.float(), y_train.long()), (x_test.float(), y_test.long())
    return PixelTasks("rotated-digits", train, test, maps)


def rotated_mnist(seed: int, root: Path, download: bool) -> PixelTasks:
    """MNIST turned by 0, 9, ... 171 degrees."""
    train, test = _mnist(root, download)
    maps = rotation_maps(28, [ROTATION_STEP * t for t in range(NUM_TASKS)])
    return PixelTasks("rotated-mnist", train, test, maps)


def rotated_mnist_5(seed: int, root: Path, download: bool) -> PixelTasks:
    """MNIST turned by 0, 22.5, ... 90 degrees: the five tasks of the paper's ablation."""
    train, test = _mnist(root, download)
    maps = rotation_maps(28, [SHORT_STEP * t for t in range(SHORT_TASKS)])
    return PixelTasks("rotated-mnist-5", train, test, maps)


def permuted_mnist(seed: int, root: Path, download: bool) -> PixelTasks:
    """MNIST with its pixels in a random order for each task, drawn from the seed."""
    train, test = _mnist(root, download)
    maps = permutation_maps(28 * 28, NUM_TASKS, seed)
    return PixelTasks("permuted-mnist", train, test, maps)


def _mnist(root: Path, download: bool) -> list[tuple[Tensor, Tensor]]:
    folder, sets = root / "MNIST" / "raw", []
    for train, count in ((True, 60_000), (False, 10_000)):
        try:
            data = MNIST(str(root), train=train, download=download)
            x, y = data.data.flatten(1), data.targets
            if (x.shape, y.shape) != ((count, 28 * 28), (count,)):
                raise ValueError(
                    f"expected {count:,} images of 28x28 and as many labels, got "
                    f"{tuple(data.data.shape)} and {tuple(y.shape)}"
                )
        except (RuntimeError, OSError, AssertionError, ValueError, EOFError) as error:
            missing = isinstance(error, OSError) or any(
                words in str(error) for words in ("not found", "Error downloading")
            )
            if not missing:
                problem = f"the MNIST files in {folder} are damaged ({error or 'wrong header'})"
                raise UsageError(f"{problem}: remove them, and pass --download") from None
            if download:
                reason = " ".join(str(error).split())
                raise UsageError(f"MNIST can't be downloaded to {root}: {reason}") from None
            raise UsageError(
                f"no MNIST in {folder}: pass --download, or --data-root with a folder that holds it"
            ) from None
        sets.append((x, y))
    return sets
