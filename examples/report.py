"""Tables and figures of results."""

from pathlib import Path
from typing import Any

from rich.table import Table

from .metrics import forgetting_improvement, seen_accuracy
from .run import accuracy_matrix

_CAPTION = (
    "acc.: accuracy in percent, final on all tasks, learn. on each task right after training on it;"
    " forg.: forgetting; impr.: how much less than naive SGD forgets; FLOPs: of a prediction and of"
    " a training step, single network = 1, and the paper's own count"
)


def table(results: list[dict[str, Any]]) -> Table:
    """One line a result: metrics, relative FLOPs and seconds.

    Forgetting improvement is against naive SGD, where that is among the results.
    """
    title = f"{results[0]['benchmark']}, seed {results[0]['seed']}"
    out = Table(title=title, caption=_CAPTION, box=None, padding=(0, 1, 0, 0))
    out.add_column("method", no_wrap=True)
    for name in ("n", "final\nacc.", "learn.\nacc.", "forg.", "impr."):
        out.add_column(name, justify="right", no_wrap=True)
    for name in ("FLOPs\npredict", "FLOPs\nstep", "FLOPs\npaper", "sec."):
        out.add_column(name, justify="right", no_wrap=True)
    single = next((accuracy_matrix(r) for r in results if r["method"] == "naive"), None)
    for r in results:
        m, flops = r["metrics"], r["relative_flops"]
        improvement = None
        if single is not None and r["method"] != "naive" and m["forgetting"] is not None:
            improvement = forgetting_improvement(single, accuracy_matrix(r))
        out.add_row(
            r["method"],
            str(r["n"]),
            _number(m["final_accuracy"], 1),
            _number(m["learning_accuracy"], 1),
            _number(m["forgetting"], 3),
            _number(improvement, 3),
            *(_number(flops[name], 2) for name in ("predict", "step", "paper")),
            _number(r["seconds"], 0),
        )
    return out


def figure(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the mean accuracy on the tasks seen so far, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for r in results:
        label = r["method"] + (f" (n={r['n']})" if r["n"] > 1 else "")
        seen = seen_accuracy(accuracy_matrix(r))
        ax.plot(range(1, len(seen) + 1), seen, marker="o", markersize=3, label=label)
    ax.set_xlabel("tasks seen")
    ax.set_ylabel("mean test accuracy on them (%)")
    ax.set_title(f"{results[0]['benchmark']}, seed {results[0]['seed']}")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.3)
    ax.legend()
    fig.savefig(path, dpi=150)
    plt.close(fig)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
