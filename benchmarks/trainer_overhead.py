"""What the trainers add to a training step: batches and bookkeeping beside forward, backward, step.

``python -m benchmarks.trainer_overhead`` prints a line a method, for images of MNIST's size.
"""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.benchmarks import PixelTasks, permutation_maps
from examples.memory import Memory
from examples.methods import METHODS
from examples.models import mlp
from examples.settings import settings_for

BENCHMARK = "permuted-mnist"
EXAMPLES = 20_000
ROUNDS = 7
CASES = (("naive", 1), ("mc-sgd", 1), ("subspace-connectivity", 3))


def images() -> PixelTasks:
    x = torch.randint(256, (EXAMPLES, 784), dtype=torch.uint8)
    y = torch.randint(10, (EXAMPLES,))
    return PixelTasks(BENCHMARK, (x, y), (x, y), permutation_maps(784, 2, 0))


def measure(method: str, n: int) -> tuple[float, float]:
    """Seconds of a whole training step, and of forward, backward and optimizer step alone."""
    data, settings = images(), settings_for(BENCHMARK, method, n)
    generator = torch.Generator().manual_seed(0)

    def make() -> torch.nn.Module:
        return mlp(784, settings.hidden, 10, settings.dropout)

    trained = METHODS[method](make, settings, n, Memory(generator))
    trained.start(1)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        return data.batches([1], settings.batch, generator)

    def bare(x: Tensor, y: Tensor) -> None:
        trained.optimizer.zero_grad()
        F.cross_entropy(trained.model(x), y).backward()
        trained.optimizer.step()

    held = list(batches())
    whole, core = [], []
    for _ in range(ROUNDS):
        # In turn, and the best of each: other work on the machine comes and goes.
        whole.append(_seconds(batches, trained.step))
        core.append(_seconds(lambda: iter(held), bare))
    return min(whole) / len(held), min(core) / len(held)


def _seconds(
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], step: Callable[[Tensor, Tensor], None]
) -> float:
    started = time.perf_counter()
    for x, y in batches():
        step(x, y)
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for method, n in CASES:
        whole, core = measure(method, n)
        print(
            f"{method} n={n}: {whole * 1e6:.0f} us a step, {core * 1e6:.0f} us without the "
            f"trainer, overhead {1 - core / whole:.0%}"
        )


if __name__ == "__main__":
    main()
