"""The weights of a run after each task, kept on disk: what the figures look into.

They are made by the run itself, and found by what identifies it. They count only where the run's
settings are those of today's table.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

import ensemblayers as el

from ..benchmarks import BENCHMARKS, Benchmark
from ..errors import UsageError
from ..files import whole_file
from ..methods import Method
from ..methods.subspace import SubspaceMethod
from ..run import file_name, run
from ..settings import Settings, equals_stored, settings_for
from ..store import Key, keep
from ..store import load as load_result
from ..workers import ends_with

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """A run whose weights a figure needs.

    Args:
        tasks: only the benchmark's first tasks, None for all.
    """

    benchmark: str
    method: str
    n: int
    tasks: int | None = None

    @property
    def settings(self) -> Settings:
        return settings_for(self.benchmark, self.method, self.n)

    def file(self, folder: Path, seed: int) -> Path:
        """Where its weights lie."""
        name = file_name(self.method, self.n, seed)
        return (folder / self.benchmark / name).with_suffix(".pt")


class Trained:
    """The networks of a run after each task, to be evaluated at any point between them.

    Args:
        benchmark: what they were trained on.
        network: a plain network of their architecture.
        weights: after each task, all parameters of the members, ``[n, *shape]`` each.
    """

    def __init__(self, benchmark: Benchmark, network: nn.Module, weights: list[Weights]) -> None:
        self.benchmark = benchmark
        self.network = network.eval()
        self.weights = weights
        # The same few tasks are shown to many networks.
        self.test_task = functools.lru_cache(maxsize=2)(benchmark.test_task)

    def member(self, task: int, i: int) -> Weights:
        """Member i after a task."""
        return {name: w[i] for name, w in self.weights[task].items()}

    def at(self, task: int, alpha: Sequence[float]) -> Weights:
        """The point alpha between the members after a task."""
        return {
            name: torch.tensordot(w.new_tensor(alpha), w, 1)
            for name, w in self.weights[task].items()
        }

    def midpoint(self, task: int) -> Weights:
        """The mean of the members after a task."""
        return {name: w.mean(0) for name, w in self.weights[task].items()}

    @torch.no_grad()
    def scores(self, weights: Weights, task: int) -> Tensor:
        """Outputs for a task's test images and its own classes: ``[N, classes of the task]``."""
        x, _ = self.test_task(task)
        own = self.benchmark.task_classes(task)
        parts = [
            functional_call(self.network, weights, part)[:, own.start : own.stop]
            for part in x.split(self.benchmark.test_batch)
        ]
        return torch.cat(parts)

    def labels(self, task: int) -> Tensor:
        """The test images' labels, counted from a task's first class."""
        return self.test_task(task)[1] - self.benchmark.task_classes(task).start

    def loss_and_accuracy(self, weights: Weights, task: int) -> tuple[float, float]:
        """Mean test loss, and test accuracy in percent."""
        scores, y = self.scores(weights, task), self.labels(task)
        return nn.functional.cross_entropy(scores, y).item(), percent(scores, y)


def percent(scores: Tensor, y: Tensor) -> float:
    """Accuracy of scores ``[N, classes]`` for labels ``[N]``, in percent."""
    return (scores.argmax(-1) == y).double().mean().item() * 100


def is_stored(run: Run, seed: int, folder: Path) -> bool:
    """Whether there are weights of a run that count."""
    return _read(run, seed, folder) is not None


def load(run: Run, seed: int, folder: Path, data_root: Path) -> Trained | None:
    """The networks of a run, None where there are none that count."""
    entry = _read(run, seed, folder)
    if entry is None:
        return None
    benchmark = BENCHMARKS[run.benchmark](seed, data_root, False)
    return Trained(benchmark, benchmark.network(run.settings.hidden), entry)


def make(
    wanted: Run,
    seed: int,
    folder: Path,
    results: Path,
    data_root: Path,
    device: str,
    threads: int,
    parent: int | None = None,
) -> tuple[Run, int]:
    """Make a run and keep its weights, unless that was done; and its result, if none is stored.

    Args:
        parent: the process that wants it: see :func:`examples.workers.ends_with`.
    """
    go_on = ends_with(parent)
    go_on(0, 0)
    if not is_stored(wanted, seed, folder):
        torch.set_num_threads(threads)
        benchmark = BENCHMARKS[wanted.benchmark](seed, data_root, False)
        benchmark = benchmark.shortened(wanted.tasks, None).to(torch.device(device))
        kept: list[Weights] = []
        result = run(
            benchmark,
            wanted.method,
            wanted.settings,
            wanted.n,
            seed,
            torch.device(device),
            go_on,
            learned=lambda trained: kept.append(member_weights(trained)),
        )
        path = wanted.file(folder, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            torch.save({"settings": dataclasses.asdict(wanted.settings), "weights": kept}, file)
        key = Key(wanted.benchmark, wanted.method, wanted.n, None, seed)
        if result["whole"] and not load_result(results, key):
            keep(result, results, key)
    return wanted, seed


def member_weights(trained: Method) -> Weights:
    """All parameters of a method's members as plain networks, ``[n, *shape]`` each, on the CPU."""
    if isinstance(trained, SubspaceMethod):
        names = [name for name, _ in trained.model.named_parameters()]
        stacked = zip(names, trained.optimizer.vertices(), strict=True)
    else:
        plain = not trained.ensemble
        members = [
            trained.model if plain else el.member(trained.model, i)
            for i in range(1 if plain else trained.n)
        ]
        own = [dict(member.named_parameters()) for member in members]
        stacked = ((name, torch.stack([w[name] for w in own])) for name in own[0])
    return {name: w.detach().to("cpu", copy=True) for name, w in stacked}


def _read(run: Run, seed: int, folder: Path) -> list[Weights] | None:
    path = run.file(folder, seed)
    if not path.exists():
        return None
    try:
        entry = torch.load(path, weights_only=True, mmap=True)
        counts = equals_stored(run.settings, entry["settings"])
        weights = entry["weights"]
    except OSError:
        raise
    except Exception:
        raise UsageError(f"{path} holds no weights of a run: move it away") from None
    return weights if counts else None
