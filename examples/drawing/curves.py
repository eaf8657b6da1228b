"""Figures 1, 4 and 16: accuracy and forgetting from stored results."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from ..metrics import forgetting_improvement, seen_accuracy
from ..targets import ABLATION_MEMBERS, ABLATION_METHODS
from ..targets import rows as table_rows
from .figure import Claim, Figure, Sources, judge, rising
from .rows import Row, mean, pick, spread, unique
from .style import COLOURS, LABELS, TITLES, legend_below, panels

MEMBERS = (1, *ABLATION_MEMBERS)
METRICS = {
    "final_accuracy": "final accuracy (%)",
    "forgetting_improvement": "forgetting improvement",
    "learning_accuracy": "learning accuracy (%)",
}

CONNECTED = ("mc-sgd", "ensemble-mc-sgd", "subspace-connectivity")
MARKERS = {
    "naive": "x",
    "ewc": "v",
    "a-gem": "s",
    "er-reservoir": "^",
    "stable-sgd": "D",
    "batch-ensemble": "P",
    "subspace-connectivity": "o",
}


def accuracy_against_n(name: str, benchmark: str) -> Figure:
    """Figure 1: the final accuracy of a vanilla ensemble grows with its members."""

    def rows(sources: Sources) -> list[Row]:
        found = _ablation(sources, benchmark)
        return [row for row in found if row["method"] in ("naive", "vanilla-ensemble")]

    def draw(rows: list[Row]) -> Canvas:
        canvas, [[axes]] = panels(1, 1, 4.2)
        members = sorted(unique(rows, "n"))
        means = [mean(rows, "final_accuracy", n=n) for n in members]
        errors = [spread(rows, "final_accuracy", n=n) for n in members]
        colour = COLOURS["vanilla-ensemble"]
        axes.errorbar(members, means, errors, marker="o", capsize=3, color=colour)
        axes.set(xlabel="members n", ylabel=METRICS["final_accuracy"], title=TITLES[benchmark])
        axes.set_xticks(members)
        axes.grid(alpha=0.3)
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        means = {f"n={n}": mean(rows, "final_accuracy", n=n) for n in MEMBERS}
        text = f"{benchmark}: the vanilla ensemble's accuracy grows with n"
        return [judge(text, means, rising)]

    return Figure(name, rows, draw, claims, table="ablation")


def metrics_against_n(name: str, benchmarks: Sequence[str]) -> Figure:
    """Figure 4: three metrics of the ensembles against their number of members."""

    def rows(sources: Sources) -> list[Row]:
        return [row for benchmark in benchmarks for row in _ablation(sources, benchmark)]

    def draw(rows: list[Row]) -> Canvas:
        found = unique(rows, "benchmark")
        canvas, grid = panels(len(found), len(METRICS))
        for benchmark, line in zip(found, grid, strict=True):
            own = pick(rows, benchmark=benchmark)
            for axes, (metric, label) in zip(line, METRICS.items(), strict=True):
                _lines(axes, own, metric)
                axes.set(xlabel="members n", ylabel=label, title=TITLES[benchmark])
                axes.set_xticks(MEMBERS)
                axes.grid(alpha=0.3)
        legend_below(canvas)
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        return [claim for benchmark in benchmarks for claim in _claims(rows, benchmark)]

    return Figure(name, rows, draw, claims, table="ablation")


def average_accuracy(name: str, benchmarks: Sequence[str]) -> Figure:
    """Figure 16: mean accuracy on the tasks seen so far."""

    def rows(sources: Sources) -> list[Row]:
        chosen = [
            row
            for benchmark in benchmarks
            for row in table_rows("main_results")
            if row.benchmark == benchmark and row.method != "multitask"  # It meets all at once.
        ]
        return [
            {
                "benchmark": row.benchmark,
                "method": row.method,
                "n": row.n,
                "seed": result["seed"],
                "tasks_seen": t + 1,
                "accuracy": accuracy,
            }
            for row in chosen
            for result in sources.stored(row.benchmark, row.method, row.n)
            for t, accuracy in enumerate(seen_accuracy(result["matrix"]))
        ]

    def draw(rows: list[Row]) -> Canvas:
        found = unique(rows, "benchmark")
        canvas, [line] = panels(1, len(found), 4.8, 4.8, sharey=True)
        for axes, benchmark in zip(line, found, strict=True):
            own = pick(rows, benchmark=benchmark)
            for method, n in dict.fromkeys((row["method"], row["n"]) for row in own):
                mine = pick(own, method=method, n=n)
                seen = sorted(unique(mine, "tasks_seen"))
                means = [mean(mine, "accuracy", tasks_seen=t) for t in seen]
                count = len(unique(mine, "seed"))
                label = LABELS[method] + (f", n={n}" if n > 1 else "") + f" ({_seeds(count)})"
                style = {"marker": MARKERS.get(method), "markersize": 4, "markevery": 3}
                style["linestyle"] = "-" if method in CONNECTED else "--"
                axes.plot(seen, means, color=COLOURS[method], label=label, **style)
            axes.set(xlabel="tasks seen", title=TITLES[benchmark])
            axes.set_xticks(range(2, 21, 3))
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
        line[0].set_ylabel("mean test accuracy on them (%)")
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        # The paper says nothing of these curves but their ends: those are Table 6's orderings.
        return []

    return Figure(name, rows, draw, claims, table="main_results")


def _ablation(sources: Sources, benchmark: str) -> list[Row]:
    """Every run of the ablation on a benchmark; the single network as naive SGD."""
    results = sources.ablation(benchmark)
    single = {r["seed"]: r["matrix"] for r in results if r["method"] == "naive"}
    return [
        {
            "benchmark": benchmark,
            "method": r["method"],
            "n": r["n"],
            "seed": r["seed"],
            "final_accuracy": r["metrics"]["final_accuracy"],
            "forgetting_improvement": forgetting_improvement(single[r["seed"]], r["matrix"]),
            "learning_accuracy": r["metrics"]["learning_accuracy"],
        }
        for r in results
    ]


def _lines(axes, rows: list[Row], metric: str) -> None:
    for method in ABLATION_METHODS:
        own = pick(rows, method=method)
        members = sorted(unique(own, "n"))
        means = [mean(own, metric, n=n) for n in members]
        errors = [spread(own, metric, n=n) for n in members]
        style = {"marker": "o", "capsize": 3, "color": COLOURS[method], "label": LABELS[method]}
        axes.errorbar(members, means, errors, **style)
    single = mean(rows, metric, method="naive")
    if single is not None:
        axes.axhline(single, color="black", linestyle="--", label="single network")


def _claims(rows: list[Row], benchmark: str) -> list[Claim]:
    own = [row for row in rows if row["benchmark"] == benchmark]

    def of(metric: str, method: str, n: int) -> float | None:
        return mean(own, metric, method=method, n=n)

    def least_gain(metric: str, method: str, other: str) -> float | None:
        """The least that a method is above another, over all n."""
        pairs = [
            (of(metric, method, n), of(metric, other, 1 if other == "naive" else n))
            for n in ABLATION_MEMBERS
        ]
        return None if None in sum(pairs, ()) else min(a - b for a, b in pairs)

    def positive(*numbers: float) -> bool:
        return min(numbers) > 0

    beat = {m: least_gain("final_accuracy", m, "naive") for m in ABLATION_METHODS}
    improve = {m: least_gain("forgetting_improvement", m, "naive") for m in ABLATION_METHODS}
    learn = {
        f"over {m}": least_gain("learning_accuracy", "vanilla-ensemble", m)
        for m in ("naive", "subspace", "batch-ensemble")
    }
    out = [
        judge(f"{benchmark}: all ensembles beat the single network", beat, positive),
        judge(f"{benchmark}: all forget less (improvement > 0)", improve, positive, 3),
        judge(f"{benchmark}: the vanilla ensemble learns best", learn, positive),
    ]
    if benchmark.startswith("split-"):
        ends = {f"n={n}": of("final_accuracy", "subspace", n) for n in (5, 10)}
        text = f"{benchmark}: the subspace's accuracy levels off (+0.5 at most) or falls after n=5"
        out.append(judge(text, ends, lambda five, ten: ten <= five + 0.5))
    return out


def _seeds(count: int) -> str:
    return f"{count} seed" + ("s" if count > 1 else "")
