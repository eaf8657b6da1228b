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

BENCHMARKS = {
    "rotated-digits": rotated_digits,
    "rotated-mnist": rotated_mnist,
    "permuted-mnist": permuted_mnist,
    "rotated-mnist-5": rotated_mnist_5,
}

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "PixelTasks",
    "permutation_maps",
    "permuted_mnist",
    "rotated_digits",
    "rotated_mnist",
    "rotation_maps",
]
