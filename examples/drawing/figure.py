"""What a figure is: its data, its drawing, and the paper's statements about it."""

import csv
import io
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from ..run import accuracy_matrix
from ..store import Key
from ..store import load as load_result
from .weights import Run, Trained
from .weights import load as load_weights

SEEDS = (0, 1, 2, 3, 4)

Row = dict[str, Any]


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


def pick(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows with given values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def mean(rows: Sequence[Row], value: str, **wanted: Any) -> float | None:
    """The mean of a column over the rows with given values, None where there are none."""
    found = [row[value] for row in pick(rows, **wanted)]
    return statistics.fmean(found) if found else None


def spread(rows: Sequence[Row], value: str, **wanted: Any) -> float:
    """The standard deviation of a column, divided by the number of rows; 0 for none."""
    found = [row[value] for row in pick(rows, **wanted)]
    return statistics.pstdev(found) if found else 0.0


def unique(rows: Sequence[Row], column: str) -> list[Any]:
    """The values in a column, in the order of the rows."""
    return list(dict.fromkeys(row[column] for row in rows))


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


def mean_over_seeds(rows: Sequence[Row], values: Sequence[str]) -> list[Row]:
    """Rows without their seed: the means of the measured columns over the seeds."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        rest = tuple(item for item in row.items() if item[0] not in ("seed", *values))
        groups.setdefault(rest, []).append(row)
    return [
        {**dict(rest), "seeds": len(own), **{v: mean(own, v) for v in values}}
        for rest, own in groups.items()
    ]


def comma_separated(rows: Sequence[Row]) -> str:
    """CSV, floats with six digits."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return out.getvalue()


# Okabe and Ito's palette, which the colour-blind can tell apart, and a marker for each colour.
COLOURS = {
    "naive": "#000000",
    "single": "#000000",
    "vanilla-ensemble": "#0072B2",
    "subspace": "#D55E00",
    "batch-ensemble": "#009E73",
    "subspace-er": "#CC79A7",
    "subspace-connectivity": "#E69F00",
    "mc-sgd": "#56B4E9",
    "ensemble-mc-sgd": "#0072B2",
    "ensemble-mc-sgd-bagging": "#009E73",
    "ewc": "#999999",
    "a-gem": "#009E73",
    "er-reservoir": "#CC79A7",
    "stable-sgd": "#0072B2",
    "multitask": "#F0E442",
}
LABELS = {
    "naive": "naive SGD",
    "vanilla-ensemble": "vanilla ensemble (VE)",
    "subspace": "subspace (SE)",
    "batch-ensemble": "BatchEnsemble (BE)",
    "subspace-er": "subspace + replay (SE+ER)",
    "subspace-connectivity": "Subspace-Connectivity (S-C)",
    "mc-sgd": "MC-SGD",
    "ensemble-mc-sgd": "ensemble MC-SGD",
    "ensemble-mc-sgd-bagging": "ensemble MC-SGD, bagging",
    "ewc": "EWC",
    "a-gem": "A-GEM",
    "er-reservoir": "ER-Reservoir",
    "stable-sgd": "Stable SGD",
    "multitask": "multitask",
}
TITLES = {
    "rotated-digits": "Rotated digits",
    "rotated-mnist": "Rotated MNIST",
    "permuted-mnist": "Permuted MNIST",
    "rotated-mnist-5": "Rotated MNIST, 5 tasks",
    "split-cifar-100": "Split CIFAR-100",
    "split-cifar-100-5": "Split CIFAR-100, 5 tasks",
    "split-miniimagenet": "Split miniImageNet",
}


def panels(
    rows: int, columns: int, width: float = 3.6, height: float = 3.2, **options: Any
) -> tuple[Canvas, list[list[Axes]]]:
    """A canvas of panels."""
    canvas = Canvas(figsize=(width * columns, height * rows), layout="constrained")
    axes = canvas.subplots(rows, columns, squeeze=False, **options)
    return canvas, axes.tolist()


def legend_below(canvas: Canvas, axes: Axes, columns: int = 4) -> None:
    """One legend for all panels, from the entries of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
