"""Figures 2, 3, 7, 8 and 9: the members of vanilla ensembles, from their weights."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from torch import Tensor

import ensemblayers as el

from ..targets import ABLATION_MEMBERS
from .figure import Claim, Figure, Sources, judge, rising
from .rows import Row, mean, pick, spread, unique
from .style import TITLES, panels
from .weights import Run, Trained, percent

RULES = {
    "average": ("#0072B2", "o", "average"),
    "hard": ("#D55E00", "s", "hard: the most confident member's"),
    "majority": ("#009E73", "^", "majority of votes"),
}
ENSEMBLE = "ensemble"  # in the place of a member's number
SAMPLE_CLASS = 1
NEARLY_ALWAYS = 0.8


def voting(name: str, benchmarks: Sequence[str]) -> Figure:
    """Figure 3: three ways to combine the members."""
    members = (1, *ABLATION_MEMBERS)

    def rows(sources: Sources) -> list[Row]:
        out = []
        for run in _runs(benchmarks, members):
            for seed, trained in sources.trained(run):
                scores = [_last_scores(trained, task) for task in range(len(trained.weights))]
                for rule in RULES:
                    rates = [
                        percent(el.combine(own, rule), trained.labels(task))
                        for task, own in enumerate(scores)
                    ]
                    final = sum(rates) / len(rates)
                    keys = {"benchmark": run.benchmark, "n": run.n, "seed": seed, "rule": rule}
                    out.append({**keys, "final_accuracy": final})
        return out

    def draw(rows: list[Row]) -> Canvas:
        found = unique(rows, "benchmark")
        canvas, [line] = panels(1, len(found), 4.6, 3.6)
        for axes, benchmark in zip(line, found, strict=True):
            for offset, (rule, (colour, marker, label)) in enumerate(RULES.items()):
                own = pick(rows, benchmark=benchmark, rule=rule)
                sizes = sorted(unique(own, "n"))
                means = [mean(own, "final_accuracy", n=n) for n in sizes]
                errors = [spread(own, "final_accuracy", n=n) for n in sizes]
                x = [n + 0.12 * (offset - 1) for n in sizes]
                style = {"marker": marker, "capsize": 3, "color": colour, "label": label}
                axes.errorbar(x, means, errors, **style)
            axes.set(xlabel="members n", ylabel="final accuracy (%)", title=TITLES[benchmark])
            axes.set_xticks(members)
            axes.grid(alpha=0.3)
            axes.legend()
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        out = []
        for benchmark in benchmarks:
            several = [r for r in rows if r["benchmark"] == benchmark and r["n"] > 2]
            whole = {r["n"] for r in several} == {n for n in ABLATION_MEMBERS if n > 2}
            means = {
                rule: mean(several, "final_accuracy", rule=rule) if whole else None
                for rule in RULES
            }
            text = f"{benchmark}: averaging is the best rule (mean over n=3, 5, 10)"
            out.append(judge(text, means, lambda average, *others: average > max(others)))
        return out

    return Figure(name, rows, draw, claims, runs=_runs(benchmarks, members))


def each_member(name: str, benchmark: str, sizes: Sequence[int] = ABLATION_MEMBERS) -> Figure:
    """Figures 2, 7 and 8: the members and the ensemble on each task, after the last one."""

    def rows(sources: Sources) -> list[Row]:
        out = []
        for run in _runs([benchmark], sizes):
            for seed, trained in sources.trained(run):
                for task in range(len(trained.weights)):
                    scores, y = _last_scores(trained, task), trained.labels(task)
                    accuracies = {
                        **{i + 1: percent(own, y) for i, own in enumerate(scores)},
                        ENSEMBLE: percent(el.combine(scores), y),
                    }
                    keys = {"n": run.n, "seed": seed, "task": task + 1}
                    out += [{**keys, "member": m, "accuracy": a} for m, a in accuracies.items()]
        return out

    def draw(rows: list[Row]) -> Canvas:
        numbers, tasks = unique(rows, "n"), unique(rows, "task")
        canvas, grid = panels(len(numbers), len(tasks), 2.6, 2.2, sharey="col")
        for n, line in zip(numbers, grid, strict=True):
            for task, axes in zip(tasks, line, strict=True):
                _boxes(axes, pick(rows, n=n, task=task), n)
                if n == numbers[0]:
                    axes.set_title(f"task {task}")
                if n == numbers[-1]:
                    axes.set_xlabel("member")
            line[0].set_ylabel(f"n={n}\naccuracy (%)")
        seeds = ", ".join(str(seed) for seed in unique(rows, "seed"))
        canvas.suptitle(f"{TITLES[benchmark]}, after the last task (seeds: {seeds})")
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        out = []
        if len(sizes) > 1:
            gaps = {f"n={n}": _gap(rows, n) for n in sizes}
            text = f"{benchmark}: the ensemble's lead over its mean member grows with n"
            out.append(judge(text, gaps, rising))
        shares = {f"n={n}": _beats_best(rows, n) for n in sizes}
        text = (
            f"{benchmark}: the ensemble nearly always beats its best member "
            f"(in {NEARLY_ALWAYS:.0%} of tasks and seeds)"
        )
        out.append(judge(text, shares, lambda *found: min(found) >= NEARLY_ALWAYS))
        return out

    return Figure(name, rows, draw, claims, runs=_runs([benchmark], sizes))


def predictions(name: str, benchmark: str) -> Figure:
    """Figure 9: what the members say of one image of the first task, after each task."""

    def rows(sources: Sources) -> list[Row]:
        out = []
        for run in _runs([benchmark], ABLATION_MEMBERS):
            for seed, trained in sources.trained(run):
                first = int((trained.labels(0) == SAMPLE_CLASS).nonzero()[0])
                for task in range(len(trained.weights)):
                    scores = _scores(trained, task, 0)[:, first].softmax(-1)
                    keys = {"n": run.n, "seed": seed, "after_task": task + 1}
                    out += [
                        {**keys, "member": i + 1, "class": c, "probability": p}
                        for i, own in enumerate(scores.tolist())
                        for c, p in enumerate(own)
                    ]
        return out

    def draw(rows: list[Row]) -> Canvas:
        sizes, tasks = unique(rows, "n"), unique(rows, "after_task")
        canvas, grid = panels(len(sizes), len(tasks), 2.4, 2.2)
        for n, line in zip(sizes, grid, strict=True):
            for task, axes in zip(tasks, line, strict=True):
                table = _table(pick(rows, n=n, after_task=task))
                image = axes.imshow(table.T.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
                chosen = int(table.mean(0).argmax())
                _frame(axes, SAMPLE_CLASS, n, color="#E69F00", linewidth=3)
                _frame(axes, chosen, n, color="red", linewidth=2, linestyle="--")
                axes.set_xticks(range(n), range(1, n + 1), fontsize=7)
                axes.set_yticks(range(table.shape[1]))
                if n == sizes[0]:
                    axes.set_title(f"after task {task}")
            line[0].set_ylabel(f"n={n}\nclass")
        for axes in grid[-1]:
            axes.set_xlabel("member")
        canvas.colorbar(image, ax=[a for line in grid for a in line], label="probability")
        canvas.suptitle(
            f"{TITLES[benchmark]}: an image of task 1; truth: orange, the ensemble's choice: red"
        )
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        largest, last = max(ABLATION_MEMBERS), (4, 5)
        found = {f"after task {t}": _truth(rows, largest, t) for t in last}
        text = f"{benchmark}: the ensemble of {largest} keeps the answer (truth - best other class)"
        return [judge(text, found, lambda *leads: min(leads) > 0)]

    runs = _runs([benchmark], ABLATION_MEMBERS)
    return Figure(name, rows, draw, claims, runs=runs, values=("probability",))


def _runs(benchmarks: Sequence[str], sizes: Sequence[int]) -> tuple[Run, ...]:
    return tuple(
        Run(b, "vanilla-ensemble" if n > 1 else "naive", n) for b in benchmarks for n in sizes
    )


def _scores(trained: Trained, after: int, task: int) -> Tensor:
    """The members' outputs for a task, after another one: ``[n, N, classes]``."""
    count = len(next(iter(trained.weights[after].values())))
    return torch.stack([trained.scores(trained.member(after, i), task) for i in range(count)])


def _last_scores(trained: Trained, task: int) -> Tensor:
    return _scores(trained, len(trained.weights) - 1, task)


def _boxes(axes, rows: list[Row], n: int) -> None:
    places = [*range(1, n + 1), ENSEMBLE]
    data = [[r["accuracy"] for r in pick(rows, member=m)] for m in places]
    boxes = axes.boxplot(data, patch_artist=True, widths=0.7, medianprops={"color": "black"})
    for place, values, box in zip(places, data, boxes["boxes"], strict=True):
        colour = "#999999" if place == ENSEMBLE else "#56B4E9"
        box.set_facecolor(colour)
        if len(values) == 1:  # No box to be seen.
            axes.plot(places.index(place) + 1, values, marker="o", color=colour)
    axes.set_xticklabels([*range(1, n + 1), "Avg"], fontsize=7)
    axes.grid(axis="y", alpha=0.3)


def _of_members(rows: list[Row], n: int) -> dict[tuple[int, int], tuple[float, list[float]]]:
    """By seed and task: the ensemble's accuracy, and its members'."""
    groups: dict[tuple[int, int], tuple[float, list[float]]] = {}
    for seed, task in dict.fromkeys((r["seed"], r["task"]) for r in pick(rows, n=n)):
        own = pick(rows, n=n, seed=seed, task=task)
        single = [r["accuracy"] for r in own if r["member"] != ENSEMBLE]
        groups[seed, task] = mean(own, "accuracy", member=ENSEMBLE), single
    return groups


def _gap(rows: list[Row], n: int) -> float | None:
    groups = _of_members(rows, n).values()
    leads = [whole - sum(single) / len(single) for whole, single in groups]
    return sum(leads) / len(leads) if leads else None


def _beats_best(rows: list[Row], n: int) -> float | None:
    groups = _of_members(rows, n).values()
    wins = [whole > max(single) for whole, single in groups]
    return sum(wins) / len(wins) if wins else None


def _table(rows: list[Row]) -> Tensor:
    """Probabilities ``[n, classes]``."""
    n, classes = len(unique(rows, "member")), len(unique(rows, "class"))
    return torch.tensor([r["probability"] for r in rows]).view(n, classes)


def _frame(axes, place: int, n: int, **style) -> None:
    axes.add_patch(Rectangle((-0.5, place - 0.5), n, 1, fill=False, **style))


def _truth(rows: list[Row], n: int, task: int) -> float | None:
    """The mean probability of the true class less that of the best other one."""
    own = pick(rows, n=n, after_task=task)
    if not own:
        return None
    means = {c: mean(own, "probability", **{"class": c}) for c in unique(own, "class")}
    return means.pop(SAMPLE_CLASS) - max(means.values())
