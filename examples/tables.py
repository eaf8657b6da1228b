"""The paper's tables, ours beside the paper's, from stored results."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table

from .store import Key, load
from .targets import METRICS, TITLES, Number, Row

PAPER_SEEDS = 5
LEGEND = (
    "Mean ± standard deviation over the seeds (the population's; their number in the last "
    "column; - where there is nothing: no result yet, or no such number). n: members; h: "
    "width of the network, where it is not the benchmark's own. Accuracy: of all tasks after "
    "the last one, in percent; learning: of each task right after it was learned; forgetting: "
    "a fraction. After each, the paper's number, and Δ: ours less the paper's, * where they "
    "do not match; they match where z = |Δ| / sqrt(s² / seeds + s_paper² / 5) is at most 2, "
    "or, for forgetting, where the printed hundredths differ by at most one. A wide spread "
    "makes a small z: look at Δ too. There is no z, and no verdict, with fewer than five "
    "seeds. FLOPs: of a prediction and of a training step, replayed examples included, a "
    "second phase not, single network = 1, as counted; last, the paper's count. Where the "
    "paper's tables print different numbers for one run, the number that its other tables or "
    "its text support stands in all of them, but for rounding, and but for Table 5's MC-SGD, "
    "of runs of its own."
)
_COMPARED = ("paper", "Δ", "z")
_HEADER = (
    *("method", "n", "h", "accuracy", *_COMPARED, "forgetting", *_COMPARED, "learning"),
    *("FLOPs predict", "FLOPs step", "FLOPs paper", "seeds"),
)


@dataclass(frozen=True)
class Cell:
    """A metric of one row over the seeds, and the paper's number."""

    metric: str
    values: tuple[float, ...]
    paper: Number | None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Over the seeds, divided by their number; None for a single one."""
        return statistics.pstdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        if self.mean is None or self.paper is None:
            return None
        return self.mean - self.paper.mean

    @property
    def z(self) -> float | None:
        """The difference in standard errors; None with fewer seeds than the paper's."""
        if self.difference is None or not self._enough or self.paper.std is None:
            return None
        error = math.sqrt(self.std**2 / len(self.values) + self.paper.std**2 / PAPER_SEEDS)
        return abs(self.difference) / error if error else None

    @property
    def _enough(self) -> bool:
        return len(self.values) >= PAPER_SEEDS

    @property
    def matches(self) -> bool | None:
        """Whether ours is the paper's but for chance and rounding; None where that is unknown."""
        if self.metric == "forgetting" and self.difference is not None and self._enough:
            hundredths = round(100 * self.mean) - round(100 * self.paper.mean)
            if abs(hundredths) <= 1:
                return True
        return None if self.z is None else self.z <= 2


@dataclass(frozen=True)
class Line:
    """A row of a table with its stored results."""

    row: Row
    results: tuple[dict[str, Any], ...]

    def cell(self, metric: str) -> Cell:
        """A metric: accuracy, forgetting or learning."""
        name = {"accuracy": "final_accuracy", "learning": "learning_accuracy"}.get(metric, metric)
        values = (result["metrics"][name] for result in self.results)
        # Joint training has no forgetting.
        return Cell(
            metric, tuple(v for v in values if v is not None), getattr(self.row, metric, None)
        )


def keys(row: Row, seeds: Sequence[int]) -> list[Key]:
    """The runs behind a row."""
    return [Key(row.benchmark, row.method, row.n, row.hidden, seed) for seed in seeds]


def read(rows: Sequence[Row], folder: Path, seeds: Sequence[int]) -> list[Line]:
    """The rows with what is stored of them."""
    found = [[load(folder, key) for key in keys(row, seeds)] for row in rows]
    return [Line(row, tuple(filter(None, r))) for row, r in zip(rows, found, strict=True)]


def rich_tables(name: str, lines: Sequence[Line]) -> list[rich.table.Table]:
    """For the terminal, a table a benchmark."""
    out = []
    for benchmark, own in _by_benchmark(lines).items():
        table = rich.table.Table(
            title=f"{TITLES[name]}: {benchmark}", box=None, padding=(0, 1, 0, 0)
        )
        for column in ("method", "acc.", *_COMPARED, "forg.", *_COMPARED, "seeds"):
            justify = "left" if column == "method" else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for line in own:
            texts = [*_compared(line, "accuracy", 2), *_compared(line, "forgetting", 3)]
            narrow = [text.replace(" ", "") for text in texts]
            table.add_row(line.row.name, *narrow, str(len(line.results)))
        out.append(table)
    return out


def markdown(name: str, lines: Sequence[Line]) -> str:
    """A section of a Markdown document, a table a benchmark."""
    parts = [f"## {TITLES[name]}\n"]
    for benchmark, own in _by_benchmark(lines).items():
        body = [_HEADER, ["---", *["---:"] * (len(_HEADER) - 1)], *map(_texts, own)]
        parts.append(f"### {benchmark}\n")
        parts.append("".join(f"| {' | '.join(texts)} |\n" for texts in body))
    return "\n".join(parts)


def comma_separated(name: str, lines: Sequence[Line]) -> str:
    """CSV, a line a number, everything in full precision."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ("table", "benchmark", "method", "n", "hidden", "metric", "mean", "std", "seeds")
    writer.writerow([*head, "paper_mean", "paper_std", "difference", "z", "matches"])
    for line in lines:
        r = line.row
        for metric in (*METRICS, "learning"):
            c = line.cell(metric)
            paper = (c.paper.mean, c.paper.std) if c.paper else (None, None)
            ours = (c.mean, c.std, len(c.values))
            run = (name, r.benchmark, r.method, r.n, r.hidden)
            writer.writerow([*run, metric, *ours, *paper, c.difference, c.z, c.matches])
    return out.getvalue()


def _by_benchmark(lines: Sequence[Line]) -> dict[str, list[Line]]:
    out: dict[str, list[Line]] = {}
    for line in lines:
        out.setdefault(line.row.benchmark, []).append(line)
    return out


def _texts(line: Line) -> list[str]:
    row = line.row
    flops = line.results[0]["relative_flops"] if line.results else {"predict": None, "step": None}
    return [
        row.method,
        str(row.n),
        str(row.hidden or ""),
        *_compared(line, "accuracy", 2),
        *_compared(line, "forgetting", 3),
        spread(line.cell("learning"), 2),
        *(number(flops[name], 2) for name in ("predict", "step")),
        number(row.flops, 2),
        str(len(line.results)),
    ]


def _compared(line: Line, metric: str, digits: int) -> list[str]:
    """Ours, the paper's, the difference, z."""
    cell, paper = line.cell(metric), "-"
    if cell.paper:
        std = "" if cell.paper.std is None else f" ± {cell.paper.std:.2f}"
        paper = f"{cell.paper.mean:.2f}{std}"
    difference = "-" if cell.difference is None else f"{cell.difference:+.{digits}f}"
    if cell.matches is False:
        difference += "*"
    return [spread(cell, digits), paper, difference, number(cell.z, 1)]


def spread(cell: Cell, digits: int) -> str:
    """A mean and its standard deviation, in words."""
    std = "" if cell.std is None else f" ± {cell.std:.{digits}f}"
    return number(cell.mean, digits) + std


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
