"""Figures 12 to 15: loss and accuracy on the straight lines between successive midpoints."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure as Canvas

from .figure import Claim, Figure, Sources, judge
from .rows import Row, pick, unique
from .style import COLOURS, LABELS, TITLES, legend_below, panels
from .weights import Run, Trained

TASKS = 12  # that the runs whose weights are looked into train on
VERTICES = 3
POINTS = 41
METHODS = ("subspace-connectivity", "subspace", "subspace-er")
SHORT = {"subspace-connectivity": "S-C", "subspace": "SE", "subspace-er": "SE+ER"}
MARKERS = {"subspace-connectivity": "o", "subspace": "s", "subspace-er": "^"}
VALUES = {"loss": "test loss", "accuracy": "test accuracy (%)"}

Path = tuple[int, int]  # from the midpoint after a task to that after another one


def barrier(name: str, benchmark: str) -> Figure:
    """Figure 12: the loss of task 1 between a subspace's first two midpoints."""
    methods, paths = ("subspace",), ((1, 2),)

    def draw(rows: list[Row]) -> Canvas:
        canvas, [[axes]] = panels(1, 1, 4.6, 3.6)
        _line(axes, rows, "loss", "subspace", (1, 2))
        _finish(axes, "loss", 1, (1, 2))
        axes.set_title(f"{TITLES[benchmark]}, {LABELS['subspace']} n={VERTICES}")
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        losses = _curve(rows, "loss", "subspace", (1, 2), 1)
        numbers = {
            "start": losses[0] if losses else None,
            "greatest on the way": max(losses, default=None),
            "end": losses[-1] if losses else None,
        }
        text = f"{benchmark}: a barrier of loss (1.1 times both ends) between midpoints 1 and 2"
        return [judge(text, numbers, lambda start, top, end: top > 1.1 * max(start, end), 3)]

    return _figure(name, benchmark, methods, paths, (1,), draw, claims)


def early_paths(name: str, benchmark: str) -> Figure:
    """Figure 13: loss and accuracy of task 1 along the first three paths."""
    columns = ((1, 2), (2, 3), (3, 4))

    def draw(rows: list[Row]) -> Canvas:
        canvas, grid = panels(2, len(columns), 4.0, 3.0, sharey="row")
        for value, line in zip(VALUES, grid, strict=True):
            for path, axes in zip(columns, line, strict=True):
                for method in unique(rows, "method"):
                    _line(axes, pick(rows, task=1), value, method, path, label=LABELS[method])
                _finish(axes, value, 1, path)
        canvas.suptitle(f"{TITLES[benchmark]}, n={VERTICES}")
        legend_below(canvas)
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        second, third = (
            {SHORT[m]: _lost(rows, m, path, 1) for m in METHODS} for path in columns[1:]
        )
        growth = {
            SHORT[m]: None if a is None or b is None else b - a
            for m, a, b in zip(METHODS, second.values(), third.values(), strict=True)
        }
        del growth["S-C"]
        return [
            judge(
                f"{benchmark}: S-C loses about 1 point (at most 1.5) of task 1 from midpoint 2 to "
                "3, the others more than 2",
                second,
                lambda ours, *others: ours <= 1.5 and min(others) > 2,
            ),
            judge(
                f"{benchmark}: from 3 to 4 the others lose still more than from 2 to 3",
                growth,
                lambda *found: min(found) > 0,
            ),
        ]

    return _figure(name, benchmark, METHODS, columns, (1,), draw, claims)


def later_paths(name: str, benchmark: str) -> Figure:
    """Figure 14: accuracy along later paths of Subspace-Connectivity."""
    method, columns, tasks = "subspace-connectivity", ((1, 2), (6, 7), (11, 12)), (1, 5, 10)
    colours = {(1, 2): "#0072B2", (6, 7): "#009E73", (11, 12): "#D55E00"}
    styles = {(1, 2): ":", (6, 7): "--", (11, 12): "-"}

    def draw(rows: list[Row]) -> Canvas:
        canvas, [line] = panels(1, len(tasks), 4.0, 3.4, sharey=True)
        for task, axes in zip(tasks, line, strict=True):
            own = pick(rows, task=task)
            for path in columns:
                label = rf"$\omega_{{{path[0]}}} \to \omega_{{{path[1]}}}$"
                # A task's curves begin where it was learned.
                if task <= path[0]:
                    style = {"color": colours[path], "linestyle": styles[path], "marker": ""}
                    _line(axes, own, "accuracy", method, path, label=label, **style)
            _finish(axes, "accuracy", task, None)
        canvas.suptitle(f"{TITLES[benchmark]}, {LABELS[method]} n={VERTICES}")
        legend_below(canvas)
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        first, middle = (_curve(rows, "accuracy", method, p, 1) for p in columns[:2])
        green, red = (_lost(rows, method, p, 1) for p in columns[1:])
        mean_of_middle = sum(middle) / len(middle) if middle else None
        return [
            judge(
                f"{benchmark}: S-C loses about 1 point of task 1 from midpoint 6 to 7 and about 2 "
                "from 11 to 12 (each within 1)",
                {"6 to 7": green, "11 to 12": red},
                lambda early, late: abs(early - 1) <= 1 and abs(late - 2) <= 1,
            ),
            judge(
                f"{benchmark}: task 1 is at about 96% at midpoint 1 and at about 94% from 6 to 7 "
                "(each within 1.5)",
                {"midpoint 1": first[0] if first else None, "6 to 7": mean_of_middle},
                lambda start, later: abs(start - 96) <= 1.5 and abs(later - 94) <= 1.5,
            ),
        ]

    return _figure(name, benchmark, (method,), columns, tasks, draw, claims)


def losses(name: str, benchmark: str) -> Figure:
    """Figure 15: the loss of task 1 from midpoint to midpoint."""
    chain = ((1, 2), (2, 3), (3, 4), (4, 5))
    shown = (("subspace",), ("subspace-er",), METHODS)

    def draw(rows: list[Row]) -> Canvas:
        canvas, [line] = panels(1, len(shown), 4.2, 3.4, sharey=True)
        for methods, axes in zip(shown, line, strict=True):
            for method in methods:
                if method not in unique(rows, "method"):
                    continue
                for path in chain:
                    label = LABELS[method] if path == chain[0] else None
                    _line(axes, rows, "loss", method, path, start=path[0], label=label)
            ends = range(chain[0][0], chain[-1][1] + 1)
            axes.set_xticks(ends, [rf"$\omega_{{{i}}}$" for i in ends])
            axes.set(xlabel="midpoint after each task")
            axes.grid(alpha=0.3)
        line[0].set_ylabel("test loss of task 1")
        canvas.suptitle(f"{TITLES[benchmark]}, n={VERTICES}")
        legend_below(canvas)
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        rises = {}
        for method in METHODS:
            found = [loss for p in chain for loss in _curve(rows, "loss", method, p, 1)]
            rises[SHORT[method]] = max(found) - found[0] if found else None
        text = (
            f"{benchmark}: only S-C's loss of task 1 is flat (its rise a third at most of the "
            "others') from midpoint 1 to 5"
        )
        return [judge(text, rises, lambda ours, *others: ours <= min(others) / 3, 3)]

    return _figure(name, benchmark, METHODS, chain, (1,), draw, claims)


def _figure(name, benchmark, methods, along, tasks, draw, claims) -> Figure:
    """A figure of some paths, on some tasks."""
    runs = tuple(Run(benchmark, method, VERTICES, TASKS) for method in methods)

    def rows(sources: Sources) -> list[Row]:
        return [
            {"method": run.method, "seed": seed, **row}
            for run in runs
            for seed, trained in sources.trained(run)
            for task in tasks
            for path in along
            for row in _rows(trained, path, task)
        ]

    return Figure(name, rows, draw, claims, runs=runs, values=tuple(VALUES))


def _rows(trained: Trained, path: Path, task: int) -> list[Row]:
    start, end = (trained.midpoint(t - 1) for t in path)
    out = []
    for step in torch.linspace(0, 1, POINTS, dtype=torch.float64).tolist():
        between = {name: torch.lerp(start[name], end[name], step) for name in start}
        loss, accuracy = trained.loss_and_accuracy(between, task - 1)
        keys = {"task": task, "from": path[0], "to": path[1], "step": step}
        out.append({**keys, "loss": loss, "accuracy": accuracy})
    return out


def _curve(rows: Sequence[Row], value: str, method: str, path: Path, task: int) -> list[float]:
    """A value along a path, the mean over the seeds; empty where it was not measured."""
    own = pick(rows, method=method, task=task, **{"from": path[0], "to": path[1]})
    of_steps = [[r[value] for r in pick(own, step=step)] for step in unique(own, "step")]
    return [sum(found) / len(found) for found in of_steps]


def _lost(rows: Sequence[Row], method: str, path: Path, task: int) -> float | None:
    """By how much the accuracy falls along a path, from its start to its least."""
    found = _curve(rows, "accuracy", method, path, task)
    return found[0] - min(found) if found else None


def _line(
    axes, rows: list[Row], value: str, method: str, path: Path, start: float = 0.0, **style
) -> None:
    own = pick(rows, method=method, **{"from": path[0], "to": path[1]})
    steps = [start + row["step"] for row in own]
    usual = {"color": COLOURS[method], "marker": MARKERS[method], "markevery": 8, "markersize": 4}
    axes.plot(steps, [row[value] for row in own], **{**usual, **style})


def _finish(axes, value: str, task: int, path: Path | None) -> None:
    ends = path or ("i", "i+1")
    axes.set_xticks(
        [0, 0.5, 1], [rf"$\omega_{{{ends[0]}}}$", "half-way", rf"$\omega_{{{ends[1]}}}$"]
    )
    axes.set(ylabel=f"{VALUES[value]}, task {task}")
    axes.grid(alpha=0.3)
