"""Stored results: one JSON file a run, found by the run's key.

A result counts only where its settings are those of today's table and its benchmark was whole.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .benchmarks import BENCHMARKS
from .errors import UsageError
from .run import accuracy_matrix, file_name, run, save
from .settings import Settings, equals_stored, settings_for
from .workers import ends_with


@dataclass(frozen=True)
class Key:
    """What identifies a run.

    Args:
        n: number of members, 1 for a single network.
        hidden: the width of the network, None for the benchmark's own.
    """

    benchmark: str
    method: str
    n: int
    hidden: int | None
    seed: int

    @property
    def settings(self) -> Settings:
        return settings_for(self.benchmark, self.method, self.n, self.hidden)

    @property
    def file(self) -> Path:
        """Where its result lies in a folder of results."""
        return Path(self.benchmark) / file_name(self.method, self.n, self.seed, self.hidden)


def load(folder: Path, key: Key) -> dict[str, Any] | None:
    """The stored result of a run, None where there is none that counts.

    Raises:
        UsageError: a file that is not a result.
    """
    path = folder / key.file
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text())
        counts = result["whole"] and equals_stored(key.settings, result["settings"])
        _check(result, key)
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a result: move it away") from None
    return result if counts else None


def _check(result: dict[str, Any], key: Key) -> None:
    """An error where a result is not this run's, or lacks what the tables and figures show."""
    metrics, flops = result["metrics"], result["relative_flops"]
    always = [metrics["final_accuracy"], flops["predict"], flops["step"]]
    maybe = [metrics["forgetting"], metrics["learning_accuracy"]]  # Joint training has none.
    numbers = always + [value for value in maybe if value is not None]
    same = all(result[name] == getattr(key, name) for name in ("benchmark", "method", "n", "seed"))
    matrix = accuracy_matrix(result)
    if not same or not all(isinstance(value, int | float) for value in numbers):
        raise ValueError
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError


def set_aside(folder: Path, key: Key) -> Path | None:
    """Move a result that does not count out of the way; return where it went."""
    path = folder / key.file
    if not path.exists() or load(folder, key):
        return None
    text = path.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    aside = path.parent / "other-settings" / f"{path.stem}-{digest}.json"
    aside.parent.mkdir(exist_ok=True)
    os.replace(path, aside)
    return aside


def execute(
    key: Key, folder: Path, device: str, threads: int, data_root: Path, parent: int | None = None
) -> Key:
    """Make a run and store its result, unless another process did so meanwhile.

    Args:
        parent: the process that wants it: see :func:`.workers.ends_with`.
    """

    go_on = ends_with(parent)
    go_on(0, 0)
    if load(folder, key):
        return key
    torch.set_num_threads(threads)
    benchmark = BENCHMARKS[key.benchmark](key.seed, data_root, False).to(torch.device(device))
    where = torch.device(device)
    path = folder / key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # Ignored by git.
    identity = (key.method, key.settings, key.n, key.seed)
    result = run(benchmark, *identity, where, progress=go_on, checkpoint=part)
    keep(result, folder, key)
    part.unlink(missing_ok=True)
    return key


def keep(result: dict[str, Any], folder: Path, key: Key) -> None:
    """Store the result of a run."""
    path = folder / key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    set_aside(folder, key)
    save(result, path.parent, key.hidden)
