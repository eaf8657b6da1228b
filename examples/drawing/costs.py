"""Figure 5, right, and figure 6: accuracy against cost, from stored results."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas
from matplotlib.patheffects import withStroke
from torch import nn

from ..costs import BATCH
from ..models import mlp
from ..settings import single_hidden
from ..targets import ABLATION_MEMBERS, ABLATION_METHODS
from .figure import Claim, Figure, Sources, judge
from .rows import Row, mean, pick, spread, unique
from .style import COLOURS, LABELS, TITLES, legend_below, panels

COSTS = {
    "counted": "relative FLOPs of a prediction, counted",
    "paper": "relative FLOPs by the paper's count",
}
WIDTHS = {"mlp": (450, 600), "resnet": (29, 35)}
CLOSE = 0.5  # percent points that "on par" may be below


def short_costs(name: str, benchmark: str) -> Figure:
    """Figure 5, right: the ablation's ensembles, by torch's count and by the paper's."""

    def rows(sources: Sources) -> list[Row]:
        network = mlp(28 * 28, single_hidden(benchmark), 10)
        return [
            {
                "method": r["method"],
                "n": r["n"],
                "seed": r["seed"],
                "counted": r["relative_flops"]["predict"],
                "paper": _paper_count(r["method"], r["n"], network),
                "accuracy": r["metrics"]["final_accuracy"],
            }
            for r in sources.ablation(benchmark)
        ]

    def draw(rows: list[Row]) -> Canvas:
        canvas, [line] = panels(1, 2, 4.6, 3.8, sharey=True)
        for axes, (cost, label) in zip(line, COSTS.items(), strict=True):
            for method in unique(rows, "method"):
                own, place = pick(rows, method=method), _PLACES.get(method, (5, 4))
                _curve(axes, own, cost, "n", LABELS[method], COLOURS[method], place)
            axes.set(xlabel=label, title=TITLES[benchmark])
            axes.margins(0.1)
            axes.grid(alpha=0.3)
        line[0].set_ylabel("final accuracy (%)")
        legend_below(canvas)
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        top = {method: _best(rows, ABLATION_MEMBERS, method=method) for method in ABLATION_METHODS}
        ve_cost = {f"n={n}": _cost(rows, "counted", n) for n in ABLATION_MEMBERS}
        above = {f"n={n}": _lead(rows, n) for n in ABLATION_MEMBERS}
        return [
            judge(
                f"{benchmark}: the vanilla ensemble reaches the highest accuracy",
                top,
                lambda vanilla, *others: vanilla > max(others),
            ),
            judge(
                f"{benchmark}: its cost grows linearly with n",
                ve_cost,
                lambda *costs: all(
                    abs(c - n) < 0.05 * n for c, n in zip(costs, ABLATION_MEMBERS, strict=True)
                ),
            ),
            judge(
                f"{benchmark}: the subspace is above BatchEnsemble, of about the same cost",
                above,
                lambda *gains: min(gains) > 0,
            ),
        ]

    return Figure(name, rows, draw, claims, table="ablation")


def long_costs(name: str, benchmarks: Sequence[str]) -> Figure:
    """Figure 6: wider networks, ensembles and subspaces on 20 tasks."""

    def rows(sources: Sources) -> list[Row]:
        return [row for benchmark in benchmarks for row in _twenty_tasks(sources, benchmark)]

    def draw(rows: list[Row]) -> Canvas:
        found = unique(rows, "benchmark")
        # One scale of costs: else a thousandth would look like twice as much.
        canvas, [line] = panels(1, len(found), 4.0, 3.8, sharex=True)
        for axes, benchmark in zip(line, found, strict=True):
            own = pick(rows, benchmark=benchmark)
            for family, (label, colour, place) in _FAMILIES.items():
                _curve(axes, pick(own, family=family), "paper", "size", label, colour, place)
            axes.margins(x=0.1)
            axes.set(xlabel=COSTS["paper"], title=TITLES[benchmark])
            axes.grid(alpha=0.3)
        line[0].set_ylabel("final accuracy (%)")
        legend_below(canvas)
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        out = []
        for benchmark in benchmarks:
            own = [row for row in rows if row["benchmark"] == benchmark]
            common, best = _best_of_families(own, _runs(benchmark))
            of = f"{benchmark}, over seeds {', '.join(map(str, common))}" if common else benchmark
            if not benchmark.startswith("split-"):
                text = f"{of}: S-C is at least on par (-{CLOSE} at most) with all others"
                out.append(judge(text, best, _subspace_leads))
                continue
            text = f"{of}: ensemble MC-SGD is the best"
            out.append(judge(text, best, _ensemble_leads))
            cost = {f"n={n}": mean(own, "paper", family="subspace", size=n) for n in (2, 3)}
            text = f"{benchmark}: S-C costs about one network (1.05 at most)"
            out.append(judge(text, cost, lambda *found: max(found) <= 1.05))
        return out

    return Figure(name, rows, draw, claims, table="parameters")


_PLACES = {"naive": (-10, -11), "subspace": (5, -11), "batch-ensemble": (-14, 3)}

# Label, colour, and where the sizes stand beside the points, in points: each on a side of its own.
_FAMILIES = {
    "scaled": ("MC-SGD, width h", COLOURS["mc-sgd"], (5, -11)),
    "ensemble": ("ensemble MC-SGD, n members", COLOURS["ensemble-mc-sgd"], (-9, 6)),
    "bagging": ("the same, bagging", COLOURS["ensemble-mc-sgd-bagging"], (-10, -11)),
    "subspace": ("Subspace-Connectivity (S-C), n", COLOURS["subspace-connectivity"], (-10, 4)),
}


def _runs(benchmark: str) -> list[tuple[str, int, str, int, int | None]]:
    """The families' runs: family, size, and what the results are stored by."""
    widths = WIDTHS["resnet" if benchmark.startswith("split-") else "mlp"]
    single = single_hidden(benchmark)
    return [
        ("scaled", single, "mc-sgd", 1, None),
        *(("scaled", width, "mc-sgd", 1, width) for width in widths),
        ("ensemble", 1, "mc-sgd", 1, None),
        *(("ensemble", n, "ensemble-mc-sgd", n, None) for n in (2, 3)),
        *(("bagging", n, "ensemble-mc-sgd-bagging", n, None) for n in (2, 3)),
        *(("subspace", n, "subspace-connectivity", n, None) for n in (2, 3)),
    ]


def _twenty_tasks(sources: Sources, benchmark: str) -> list[Row]:
    return [
        {
            "benchmark": benchmark,
            "family": family,
            "size": size,
            "seed": result["seed"],
            "counted": result["relative_flops"]["predict"],
            "paper": result["relative_flops"]["paper"],
            "accuracy": result["metrics"]["final_accuracy"],
        }
        for family, size, method, n, hidden in _runs(benchmark)
        for result in sources.stored(benchmark, method, n, hidden)
    ]


def _paper_count(method: str, n: int, network: nn.Module) -> float:
    """The cost of a prediction by the paper's Table 1, on batches of 10.

    A vanilla ensemble: n. A subspace: n - 1 additions more for each weight and batch.
    BatchEnsemble: two products of vectors more for each layer and example.
    """
    if method == "subspace":
        return 1 + (n - 1) / BATCH
    if method == "batch-ensemble":
        layers = [m for m in network if isinstance(m, nn.Linear)]
        macs = sum(layer.weight.numel() for layer in layers)
        return 1 + sum(layer.in_features + layer.out_features for layer in layers) / macs
    return float(n)


def _best_of_families(
    rows: list[Row], runs: Sequence[tuple[str, int, str, int, int | None]]
) -> tuple[list[int], dict[str, float | None]]:
    """The seeds that all families' runs have, and each family's highest mean accuracy over them."""
    found = [
        {row["seed"]: row["accuracy"] for row in pick(rows, family=family, size=size)}
        for family, size, *_ in runs
    ]
    common = sorted(set.intersection(*map(set, found)))
    best: dict[str, float | None] = dict.fromkeys(_FAMILIES)
    for (family, *_), accuracies in zip(runs, found, strict=True):
        if common:
            average = sum(accuracies[seed] for seed in common) / len(common)
            best[family] = max(average, best[family] or average)
    return common, best


def _curve(
    axes,
    rows: list[Row],
    cost: str,
    size: str,
    label: str,
    colour: str,
    place: tuple[int, int],
) -> None:
    """A point a size, with the standard deviation over the seeds and the size beside it."""
    if not rows:
        return
    sizes = unique(rows, size)
    x = [mean(rows, cost, **{size: s}) for s in sizes]
    y = [mean(rows, "accuracy", **{size: s}) for s in sizes]
    errors = [spread(rows, "accuracy", **{size: s}) for s in sizes]
    axes.errorbar(x, y, errors, marker="o", capsize=3, color=colour, label=label)
    near = {"textcoords": "offset points", "fontsize": 8, "color": colour, "zorder": 5}
    near["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
    for one, other, s in zip(x, y, sizes, strict=True):
        axes.annotate(str(s), (one, other), xytext=place, **near)


def _best(rows: list[Row], sizes: Sequence[int], method: str) -> float | None:
    """A method's highest mean accuracy over its numbers of members."""
    means = [mean(rows, "accuracy", method=method, n=n) for n in sizes]
    return None if None in means else max(means)


def _cost(rows: list[Row], cost: str, n: int) -> float | None:
    return mean(rows, cost, method="vanilla-ensemble", n=n)


def _lead(rows: list[Row], n: int) -> float | None:
    """By how much the subspace's accuracy is above BatchEnsemble's."""
    subspace, other = (
        mean(rows, "accuracy", method=m, n=n) for m in ("subspace", "batch-ensemble")
    )
    return None if subspace is None or other is None else subspace - other


def _subspace_leads(scaled: float, ensemble: float, bagging: float, subspace: float) -> bool:
    return subspace >= max(scaled, ensemble, bagging) - CLOSE


def _ensemble_leads(scaled: float, ensemble: float, bagging: float, subspace: float) -> bool:
    return ensemble > max(scaled, bagging, subspace)
