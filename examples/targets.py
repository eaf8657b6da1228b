"""The paper's numbers, and which runs each of its tables needs.

``targets.json`` holds them: Doan et al. 2023, https://arxiv.org/abs/2202.09826. Accuracy is in
percent, forgetting a fraction, each with its standard deviation over five seeds. Where the paper's
tables contradict each other on one run, one number stands in all: Permuted MNIST, S-C n=3: 87.8 ±
.53 and F .06 (Tables 2 and 5 repeat the line of n=5); miniImageNet: MC-SGD F .05, ensemble 59.1,
S-C n=2 ± .79; CIFAR-100: h=35 60.5; MNIST, S-C n=3: 1.2 FLOPs (the batch is 10). What stays:
Table 5's MC-SGD on MNIST, printed as runs of its own, and means that differ by rounding.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = ("accuracy", "forgetting")
TITLES = {
    "results_cnn": "Table 2: MC-SGD and its ensembles",
    "varying_n": "Table 4: Subspace-Connectivity with n members",
    "parameters": "Table 5: models of about the same number of parameters",
    "main_results": "Table 6: all methods",
    "image_results": "Table 7: all methods on images",
    "beyond": "Beyond the paper: an ensemble's accuracy at one network's cost",
    "ablation": "The ablation: ensembles on five tasks, without a buffer (figures 3 and 4)",
}
ABLATIONS = ("rotated-mnist-5", "split-cifar-100-5")
ABLATION_MEMBERS = (2, 3, 5, 10)
ABLATION_METHODS = ("vanilla-ensemble", "subspace", "batch-ensemble")


@dataclass(frozen=True)
class Number:
    """A printed mean, and its standard deviation where that is printed too."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Row:
    """A line of a table on one benchmark: a method, and what the paper has for it."""

    benchmark: str
    method: str
    n: int = 1
    hidden: int | None = None
    accuracy: Number | None = None
    forgetting: Number | None = None
    flops: float | None = None

    @property
    def name(self) -> str:
        """The method with its variant."""
        members = f" n={self.n}" if self.n > 1 else ""
        return self.method + members + (f" h={self.hidden}" if self.hidden else "")


@functools.cache
def rows(table: str) -> tuple[Row, ...]:
    """The lines of a table, in the paper's order."""
    if table == "ablation":
        # The paper shows it in figures, without numbers.
        ensembles = [(m, n) for m in ABLATION_METHODS for n in ABLATION_MEMBERS]
        return tuple(Row(b, m, n) for b in ABLATIONS for m, n in [("naive", 1), *ensembles])
    if table == "beyond":
        b = "split-cifar-100"
        paper = [row for row in rows("results_cnn") if row.benchmark == b and row.n > 1]
        return (*paper, *(Row(b, "subspace-distillation", n) for n in (1, 3)))
    return tuple(_row(entry) for entry in _targets()[table])


@functools.cache
def _targets() -> dict[str, list[dict[str, Any]]]:
    return json.loads((Path(__file__).parent / "targets.json").read_text())


def _row(entry: dict[str, Any]) -> Row:
    numbers = {metric: Number(*entry[metric]) for metric in METRICS}
    return Row(**{**entry, **numbers})
