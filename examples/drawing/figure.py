"""What a figure is: its data, its drawing, and the paper's statements about it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from ..reproduce import SEEDS
from ..run import accuracy_matrix
from ..store import Key
from ..store import load as load_result
from ..targets import rows as table_rows
from .rows import Row
from .weights import Run, Trained
from .weights import load as load_weights


@dataclass(frozen=True)
class Sources:
    """Where a figure's data comes from.

    Args:
        results: folder of stored results.
        weights: folder of the weights of runs.
        data_root: folder of the data sets.
        seeds: of the runs whose weights are looked into; stored results: all five.
    """

    results: Path
    weights: Path
    data_root: Path
    seeds: tuple[int, ...]

    def stored(
        self, benchmark: str, method: str, n: int = 1, hidden: int | None = None
    ) -> list[dict[str, Any]]:
        """The stored results of a run, of all seeds that there are."""
        keys = [Key(benchmark, method, n, hidden, seed) for seed in SEEDS]
        results = [r for r in (load_result(self.results, key) for key in keys) if r]
        return [{**r, "matrix": accuracy_matrix(r)} for r in results]

    def ablation(self, benchmark: str) -> list[dict[str, Any]]:
        """The stored results of all methods of the ablation, of the seeds that all of them have."""
        runs = [(row.method, row.n) for row in table_rows("ablation") if row.benchmark == benchmark]
        found = [self.stored(benchmark, method, n) for method, n in runs]
        common = set.intersection(*({r["seed"] for r in results} for results in found))
        return [r for results in found for r in results if r["seed"] in common]

    def trained(self, run: Run) -> list[tuple[int, Trained]]:
        """The networks of a run with their seeds, as many as there are."""
        found = [
            (seed, load_weights(run, seed, self.weights, self.data_root)) for seed in self.seeds
        ]
        return [(seed, trained) for seed, trained in found if trained]


@dataclass(frozen=True)
class Claim:
    """A statement that a figure should show, and what was found.

    Args:
        holds: None where something is missing.
        numbers: what decides it, in words.
    """

    text: str
    holds: bool | None
    numbers: str = ""

    def __str__(self) -> str:
        if self.holds is None:
            return f"{self.text}: not measured yet"
        return f"{self.text}: {'met' if self.holds else 'NOT met'} ({self.numbers})"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    Args:
        name: its number in the paper, and what it shows.
        rows: gathers the data, a row a line of the CSV file; with the seed in a column of its own.
        draw: draws rows.
        claims: judges rows.
        runs: whose weights it needs.
        table: that of ``examples.reproduce`` whose stored results it needs.
        values: the measured columns, for a figure that draws a single seed: their means over the
            seeds go into a file of their own.
    """

    name: str
    rows: Callable[[Sources], list[Row]]
    draw: Callable[[list[Row]], Canvas]
    claims: Callable[[list[Row]], list[Claim]]
    runs: tuple[Run, ...] = ()
    table: str | None = None
    values: tuple[str, ...] = ()


def judge(
    text: str,
    numbers: dict[str, float | None],
    holds: Callable[..., bool],
    digits: int = 2,
) -> Claim:
    """A claim about some numbers, undecided where one is missing.

    Args:
        numbers: by name.
        holds: takes them in their order.
    """
    if not numbers or None in numbers.values():
        return Claim(text, None)
    words = ", ".join(f"{name} {value:.{digits}f}" for name, value in numbers.items())
    return Claim(text, holds(*numbers.values()), words)


def rising(*numbers: float) -> bool:
    """Whether each number is greater than the one before."""
    return all(a < b for a, b in itertools.pairwise(numbers))
