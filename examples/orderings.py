"""The paper's orderings of the methods, checked on stored results."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .tables import PAPER_SEEDS, read
from .targets import ABLATION_MEMBERS, ABLATION_METHODS, ABLATIONS, Row


@dataclass(frozen=True)
class Ordering:
    """The claim that a method has the higher (or lower) metric of two, on one benchmark."""

    better: Row
    worse: Row
    metric: str = "final_accuracy"
    lower: bool = False


def orderings(benchmarks: Sequence[str]) -> list[Ordering]:
    """What the paper says of those benchmarks."""
    found = []
    for b in benchmarks:
        single, subspace = Row(b, "mc-sgd"), Row(b, "subspace-connectivity", 3)
        ensemble = Row(b, "ensemble-mc-sgd", 3)
        if b in ABLATIONS:
            found += _ablation(b)
            continue
        found.append(Ordering(subspace, single))
        if b == "rotated-mnist":
            found.append(Ordering(subspace, ensemble))
        if b.startswith("split-"):
            found.append(Ordering(ensemble, subspace))
        bagged = [
            (Row(b, "ensemble-mc-sgd", n), Row(b, "ensemble-mc-sgd-bagging", n)) for n in (2, 3)
        ]
        found += [Ordering(*pair) for pair in bagged]
    return found


def _ablation(benchmark: str) -> list[Ordering]:
    """Every ensemble beats the single model and forgets less; the vanilla one learns best."""
    single, found = Row(benchmark, "naive"), []
    for n in ABLATION_MEMBERS:
        vanilla, *others = (Row(benchmark, method, n) for method in ABLATION_METHODS)
        found += [Ordering(row, single) for row in (vanilla, *others)]
        found += [Ordering(row, single, "forgetting", lower=True) for row in (vanilla, *others)]
        found += [Ordering(vanilla, row, "learning_accuracy") for row in others]
    return found


def verdict(ordering: Ordering, folder: Path, seeds: Sequence[int]) -> str:
    """One sentence: the claim, whether it holds on the mean, and in how many of the seeds.

    Of the seeds that both sides have.
    """
    better, worse = (
        {r["seed"]: r["metrics"][ordering.metric] for r in line.results}
        for line in read((ordering.better, ordering.worse), folder, seeds)
    )
    sign = "<" if ordering.lower else ">"
    names = f"{ordering.better.name} {sign} {ordering.worse.name}"
    claim = f"{ordering.better.benchmark}, {ordering.metric.replace('_', ' ')}: {names}"
    both = sorted(better.keys() & worse.keys())
    if not both:
        return f"{claim}: not measured yet"
    gains = [(worse[s] - better[s]) if ordering.lower else (better[s] - worse[s]) for s in both]
    holds = "holds" if statistics.fmean(gains) > 0 else "does NOT hold"
    if len(both) < PAPER_SEEDS:
        holds += " so far"
    digits = 3 if ordering.metric == "forgetting" else 2
    means = [statistics.fmean(values[s] for s in both) for values in (better, worse)]
    numbers = f"{means[0]:.{digits}f} against {means[1]:.{digits}f}"
    return f"{claim}: {holds} ({numbers}; in {sum(g > 0 for g in gains)} of {len(both)} seeds)"
