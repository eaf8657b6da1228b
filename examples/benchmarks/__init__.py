"""The benchmarks, by name: each a function of the seed, the data root and whether to download."""

from .benchmark import Benchmark
from .pixels import (
    PixelTasks,
    permutation_maps,
    permuted_mnist,
    rotated_digits,
    rotated_mnist,
    rotated_mnist_5,
    rotation_maps,
)
from .split import SplitTasks, split_cifar_100, split_cifar_100_5, split_miniimagenet

BENCHMARKS = {
    "rotated-digits": rotated_digits,
    "rotated-mnist": rotated_mnist,
    "permuted-mnist": permuted_mnist,
    "rotated-mnist-5": rotated_mnist_5,
    "split-cifar-100": split_cifar_100,
    "split-miniimagenet": split_miniimagenet,
    "split-cifar-100-5": split_cifar_100_5,
}

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "PixelTasks",
    "SplitTasks",
    "permutation_maps",
    "permuted_mnist",
    "rotated_digits",
    "rotated_mnist",
    "rotation_maps",
    "split_cifar_100",
    "split_cifar_100_5",
    "split_miniimagenet",
]
