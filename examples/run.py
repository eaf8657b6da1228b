"""One run: a method on a benchmark with a seed, from the first task to the result on disk."""

import dataclasses
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ensemblayers as el

from . import metrics
from .benchmarks import Benchmark
from .checkpoint import Checkpoint
from .costs import paper_cost, relative_flops
from .errors import UsageError
from .files import whole_file
from .memory import Memory
from .methods import METHODS, Method
from .settings import Settings, single_hidden


def run(
    benchmark: Benchmark,
    method: str,
    settings: Settings,
    n: int,
    seed: int,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
    learned: Callable[[Method], None] = lambda trained: None,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Train a method on all tasks in turn and evaluate after each; return the result.

    Args:
        checkpoint: the file from which a run that was stopped goes on after its last task.
        progress: called after each task with the number of tasks done and their total.
        learned: called after each task with the method, to look at its weights.

    Returns:
        What is stored as JSON: the accuracy matrix (percent; null where not measured), its
        metrics, relative FLOPs, the configuration, versions and seconds.
    """
    identity = {"method": method, "settings": settings, "n": n, "seed": seed, "device": device}
    kept = checkpoint and Checkpoint(checkpoint, benchmark, identity)
    state = kept.load() if kept else None

    def make() -> torch.nn.Module:
        return benchmark.network(settings.hidden, settings.dropout)

    def single() -> torch.nn.Module:
        return benchmark.network(single_hidden(benchmark.name), settings.dropout)

    total = benchmark.num_tasks
    if state is None:
        torch.manual_seed(seed)
        order, drawn = (torch.Generator().manual_seed(seed) for _ in range(2))
        memory = Memory(drawn)
        trained = METHODS[method](lambda: make().to(device), settings, n, memory, benchmark.loss)
        state = _State(trained, memory, order, drawn, torch.full((total, total), torch.nan))
    trained, accuracy = state.trained, state.accuracy
    # Joint training meets all tasks at once: one round, whose row is the last.
    rounds = (
        [(total - 1, list(range(total)))] if trained.joint else [(t, [t]) for t in range(total)]
    )
    for task, tasks in rounds[state.done :]:
        started = time.perf_counter()
        trained.start(0 if trained.joint else task)
        for _ in range(settings.epochs):
            for x, y in benchmark.batches(tasks, settings.batch, state.order):
                trained.step(x, y)
        state.memory.store(*benchmark.one_per_class(task, state.drawn))
        trained.finish(task)
        learned(trained)
        accuracy[task, : task + 1] = evaluate(trained.predictor(), benchmark, task + 1)
        state.done += 1
        state.seconds += time.perf_counter() - started
        if kept:
            kept.save(state)
        progress(task + 1, total)
    images = torch.zeros(10, *benchmark.shape)
    return {
        "benchmark": benchmark.name,
        "method": method,
        "n": n if trained.ensemble else 1,
        "seed": seed,
        "tasks": total,
        "examples": benchmark.examples,
        "whole": benchmark.whole,
        "settings": dataclasses.asdict(settings),
        "accuracy": [[None if a.isnan() else round(a.item(), 4) for a in row] for row in accuracy],
        "metrics": {
            "final_accuracy": metrics.final_accuracy(accuracy),
            "forgetting": _finite(metrics.forgetting(accuracy)),
            "learning_accuracy": _finite(metrics.learning_accuracy(accuracy)),
        },
        "relative_flops": {
            **relative_flops(method, make, settings, n, benchmark.shape, single),
            "paper": paper_cost(method, n, make(), images, single()),
        },
        "seconds": round(state.seconds, 2),
        "device": device.type,
        "versions": {
            "ensemblayers": el.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


@dataclasses.dataclass
class _State:
    """A run between two tasks."""

    trained: Method
    memory: Memory
    order: torch.Generator
    drawn: torch.Generator
    accuracy: Tensor
    done: int = 0  # Rounds.
    seconds: float = 0.0


@torch.no_grad()
def evaluate(predict: Callable[[Tensor], Tensor], benchmark: Benchmark, tasks: int) -> Tensor:
    """Test accuracy on each of the first tasks, in percent: ``[tasks]``.

    Args:
        predict: images of one task to the members' scores ``[n, B, classes]``.
    """
    rates = []
    for task in range(tasks):
        x, y = benchmark.test_task(task)
        own = benchmark.task_classes(task)
        # The members are combined over the task's own classes.
        scores = [
            predict(part)[..., own.start : own.stop] for part in x.split(benchmark.test_batch)
        ]
        predicted = own.start + torch.cat([el.combine(s).argmax(-1) for s in scores])
        rates.append((predicted == y).double().mean() * 100)
    return torch.stack(rates).float().cpu()


def accuracy_matrix(result: dict[str, Any]) -> Tensor:
    """The accuracy matrix of a stored result, NaN where it was not measured."""
    rows = result["accuracy"]
    return torch.tensor([[torch.nan if a is None else a for a in row] for row in rows])


def check_writable(folder: Path, option: str = "--out") -> None:
    """Make a folder for what is written; a UsageError, which names the option, if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"can't write to {folder} ({error.strerror}): pass {option} with another folder"
        ) from None


def file_name(method: str, n: int, seed: int, hidden: int | None = None) -> str:
    """The name of a result's file; ``hidden`` where the width is not the benchmark's own."""
    width = f"-h{hidden}" if hidden else ""
    return f"{method}-n{n}{width}-seed{seed}.json"


def save(result: dict[str, Any], folder: Path, hidden: int | None = None) -> Path:
    """Write a result as JSON, atomically: the file is whole or not there."""
    path = folder / file_name(result["method"], result["n"], result["seed"], hidden)
    with whole_file(path, "w") as file:
        file.write(_json(result))
    return path


def _json(result: dict[str, Any]) -> str:
    """JSON with a line an entry, and a line a row of the accuracy matrix."""
    lines = []
    for name, value in result.items():
        text = json.dumps(value)
        if name == "accuracy":
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _finite(value: float) -> float | None:
    return None if value != value else value
