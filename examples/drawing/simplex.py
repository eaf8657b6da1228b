"""Figures 10 and 11: accuracy inside a subspace of three vertices, and around its points."""

import statistics

import torch
from matplotlib.figure import Figure as Canvas

from .figure import Claim, Figure, Sources, judge
from .paths import TASKS
from .rows import Row, mean, pick, unique
from .style import LABELS, TITLES, panels
from .weights import Run, Trained

VERTICES = 3
STEPS = 10  # of the grid along an edge: 66 points
CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, 3**0.5 / 2))
NOISE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
DRAWS = 10
BELOW = 0.2  # percent points that the centre may be below the best point of the grid


def right_after(name: str, benchmark: str) -> Figure:
    """Figure 10, a and b: accuracy on a task right after it, inside the subspace."""
    run, moments = Run(benchmark, "subspace", VERTICES, TASKS), ((1, 1), (10, 10))

    def claims(rows: list[Row]) -> list[Claim]:
        return [c for task, _ in moments for c in _centre_is_best(rows, benchmark, task)]

    return _simplex_figure(name, benchmark, (run,), moments, claims)


def first_task(name: str, benchmark: str) -> Figure:
    """Figure 11: accuracy on the first task, inside the subspaces of later tasks."""
    methods, after = ("subspace", "subspace-er"), 10
    runs = tuple(Run(benchmark, method, VERTICES, TASKS) for method in methods)

    def claims(rows: list[Row]) -> list[Claim]:
        middle = [r for r in rows if r["point"] == "midpoint" and r["after_task"] == after]
        found = {LABELS[m]: mean(middle, "accuracy", method=m) for m in methods}
        replay = {"midpoint": found[LABELS["subspace-er"]]}
        text = f"{benchmark}: with replay, task 1 falls to 55% (within 5) after task {after}"
        better = f"{benchmark}: replay keeps more of task 1"
        return [
            judge(text, replay, lambda accuracy: abs(accuracy - 55) <= 5),
            judge(better, found, lambda plain, with_replay: with_replay > plain),
        ]

    return _simplex_figure(name, benchmark, runs, ((1, 1), (1, 5), (1, after)), claims)


def noise(name: str, benchmark: str) -> Figure:
    """Figure 10, c: how much noise on the weights the midpoint and the vertices bear."""
    run = Run(benchmark, "subspace", VERTICES, TASKS)

    def rows(sources: Sources) -> list[Row]:
        return [
            {"seed": seed, **row} for seed, own in sources.trained(run) for row in _noise_rows(own)
        ]

    def draw(rows: list[Row]) -> Canvas:
        canvas, [[axes]] = panels(1, 1, 5.0, 4.0)
        colours = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
        for point, colour in zip(unique(rows, "point"), colours, strict=True):
            own = pick(rows, point=point)
            means = [mean(own, "accuracy", std=s) for s in NOISE]
            errors = [statistics.pstdev([r["accuracy"] for r in pick(own, std=s)]) for s in NOISE]
            style = {"marker": "o", "linestyle": "-" if point == "midpoint" else "--"}
            axes.errorbar(NOISE, means, errors, capsize=3, color=colour, label=point, **style)
        axes.set(
            xlabel="standard deviation of Gaussian noise on each weight",
            ylabel="test accuracy on task 1 (%)",
            title=f"{TITLES[benchmark]}, subspace n={VERTICES}, after task 1",
        )
        axes.grid(alpha=0.3)
        axes.legend()
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        drops = {}
        for name, wanted in (("midpoint", True), ("vertices", False)):
            own = [row for row in rows if (row["point"] == "midpoint") == wanted]
            noisy = [row for row in own if row["std"] > 0]
            clean, worse = mean(own, "accuracy", std=0.0), mean(noisy, "accuracy")
            drops[name] = None if clean is None or worse is None else clean - worse
        text = f"{benchmark}: noise costs the midpoint less accuracy than the vertices"
        return [judge(text, drops, lambda midpoint, vertices: midpoint < vertices)]

    return Figure(name, rows, draw, claims, runs=(run,), values=("accuracy",))


def grid(steps: int) -> list[tuple[float, float, float]]:
    """Points of the simplex, equally far apart.

    >>> grid(1)
    [(0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)]
    """
    return [
        (a / steps, b / steps, (steps - a - b) / steps)
        for a in range(steps + 1)
        for b in range(steps + 1 - a)
    ]


def _simplex_figure(name, benchmark, runs, moments, claims) -> Figure:
    """A triangle for each run (in rows) and each pair of a task and the task after which."""

    def rows(sources: Sources) -> list[Row]:
        return [
            {"method": run.method, "seed": seed, **row}
            for run in runs
            for seed, trained in sources.trained(run)
            for task, after in moments
            for row in _simplex_rows(trained, task, after)
        ]

    def draw(rows: list[Row]) -> Canvas:
        methods = unique(rows, "method")
        canvas, axes_of = panels(len(methods), len(moments), 4.2, 3.6)
        for method, line in zip(methods, axes_of, strict=True):
            for (task, after), axes in zip(moments, line, strict=True):
                own = pick(rows, method=method, task=task, after_task=after)
                _triangle(canvas, axes, own)
                axes.set_title(f"{LABELS[method]}\ntask {task} after task {after}", fontsize=10)
        canvas.suptitle(f"{TITLES[benchmark]}, n={VERTICES}: test accuracy (%)")
        return canvas

    return Figure(name, rows, draw, claims, runs=runs, values=("accuracy",))


def _simplex_rows(trained: Trained, task: int, after: int) -> list[Row]:
    middle = (1 / VERTICES,) * VERTICES
    points = [(alpha, "grid") for alpha in grid(STEPS)] + [(middle, "midpoint")]
    out = []
    for alpha, point in points:
        _, accuracy = trained.loss_and_accuracy(trained.at(after - 1, alpha), task - 1)
        shares = {f"alpha_{i + 1}": a for i, a in enumerate(alpha)}
        keys = {"task": task, "after_task": after, "point": point}
        out.append({**keys, **shares, "accuracy": accuracy})
    return out


def _triangle(canvas: Canvas, axes, rows: list[Row]) -> None:
    shares = [[row[f"alpha_{i + 1}"] for i in range(VERTICES)] for row in rows]
    x, y = (
        [sum(a * corner[k] for a, corner in zip(s, CORNERS, strict=True)) for s in shares]
        for k in (0, 1)
    )
    shown = axes.tricontourf(x, y, [row["accuracy"] for row in rows], levels=15, cmap="viridis")
    canvas.colorbar(shown, ax=axes, shrink=0.8, format="%.1f")
    (centre,) = (i for i, row in enumerate(rows) if row["point"] == "midpoint")
    axes.plot(x[centre], y[centre], "r*", markersize=10)
    accuracy = f"{rows[centre]['accuracy']:.1f}"
    axes.annotate(
        accuracy,
        (x[centre], y[centre]),
        textcoords="offset points",
        xytext=(0, 8),
        ha="center",
        color="red",
    )
    for i, (u, v) in enumerate(CORNERS):
        axes.annotate(
            f"vertex {i + 1}",
            (u, v),
            textcoords="offset points",
            xytext=((0, 0, 34)[i], (-12, -12, -4)[i]),
            ha="center",
            fontsize=8,
        )
    axes.margins(0.12)
    axes.set_aspect("equal")
    axes.axis("off")


def _centre_is_best(rows: list[Row], benchmark: str, task: int) -> list[Claim]:
    own = pick(rows, task=task)
    centre, of_grid = mean(own, "accuracy", point="midpoint"), pick(own, point="grid")
    shares = dict.fromkeys((r["alpha_1"], r["alpha_2"], r["alpha_3"]) for r in of_grid)
    means = {
        alpha: mean(of_grid, "accuracy", alpha_1=alpha[0], alpha_2=alpha[1], alpha_3=alpha[2])
        for alpha in shares
    }
    vertices = [accuracy for alpha, accuracy in means.items() if 1.0 in alpha]
    best = {"midpoint": centre, "best point": max(means.values(), default=None)}
    ends = {"midpoint": centre, "best vertex": max(vertices, default=None)}
    where = f"{benchmark}: on task {task}, right after it, the midpoint is"
    return [
        judge(f"{where} better than the vertices", ends, lambda middle, end: middle > end),
        judge(
            f"{where} at most {BELOW} below the best point",
            best,
            lambda middle, top: middle >= top - BELOW,
        ),
    ]


def _noise_rows(trained: Trained) -> list[Row]:
    points = {"midpoint": trained.midpoint(0)}
    points |= {f"vertex {i + 1}": trained.member(0, i) for i in range(VERTICES)}
    out = []
    for point, weights in points.items():
        generator = torch.Generator().manual_seed(0)  # The same noise for all points.
        for std in NOISE:
            for draw in range(DRAWS if std else 1):
                moved = {
                    name: w + std * torch.randn(w.shape, generator=generator)
                    for name, w in weights.items()
                }
                _, accuracy = trained.loss_and_accuracy(moved, 0)
                out.append({"point": point, "std": std, "draw": draw, "accuracy": accuracy})
    return out
