"""Figure 5, left: how sharp the loss of the first task is where each ensemble ends up."""

import copy

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

from ..targets import ABLATION_MEMBERS
from .figure import Claim, Figure, Sources, judge, rising
from .rows import Row, mean, pick, unique
from .style import COLOURS, TITLES, panels
from .weights import Run, Trained, Weights

TOP = 20
EXAMPLES = 5_000
TOLERANCE = 1e-3  # relative, of an eigenvalue
VANILLA = 3  # members of the vanilla ensemble that is shown

SUBSPACES = {
    2: {"color": "#E69F00", "marker": "o"},
    3: {"color": "#D55E00", "marker": "s"},
    5: {"color": "#CC79A7", "marker": "^"},
    10: {"color": "#56B4E9", "marker": "D"},
}


def spectrum(name: str, benchmark: str) -> Figure:
    """The top eigenvalues of the first task's training loss after that task."""
    single = Run(benchmark, "naive", 1)
    subspaces = tuple(Run(benchmark, "subspace", n) for n in ABLATION_MEMBERS)
    vanilla = Run(benchmark, "vanilla-ensemble", VANILLA)

    def rows(sources: Sources) -> list[Row]:
        out = []
        for run in (single, *subspaces):
            for seed, trained in sources.trained(run):
                out += _rows(trained, trained.midpoint(0), run, "midpoint", seed)
        for seed, trained in sources.trained(vanilla):
            for i in range(vanilla.n):
                out += _rows(trained, trained.member(0, i), vanilla, f"member {i + 1}", seed)
        return out

    def draw(rows: list[Row]) -> Canvas:
        canvas, [[axes]] = panels(1, 1, 5.6, 4.2)
        for method, n, point in dict.fromkeys((r["method"], r["n"], r["point"]) for r in rows):
            own = pick(rows, method=method, n=n, point=point)
            style = {"color": COLOURS[method], "marker": ".", "linestyle": ":"}
            label = f"vanilla ensemble n={n}, {point}"
            if method == "naive":
                style, label = {"color": "black", "marker": "x"}, "single network (n=1)"
            if method == "subspace":
                style, label = SUBSPACES[n], f"subspace n={n}"
            places, values = (unique(own, "index"), [r["eigenvalue"] for r in own])
            axes.plot(places, values, markersize=4, label=label, **style)
        axes.set(
            xlabel="eigenvalue, from the greatest",
            ylabel="eigenvalue of the training loss's Hessian",
            title=f"{TITLES[benchmark]}: loss of task 1 after task 1",
            yscale="log",
        )
        axes.set_xticks([1, 5, 10, 15, 20])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        return canvas

    def claims(rows: list[Row]) -> list[Claim]:
        out = []
        for what, chosen in (
            ("greatest eigenvalue", [r for r in rows if r["index"] == 1]),
            (f"mean of the top {TOP}", rows),
        ):
            means = {"n=1": mean(chosen, "eigenvalue", method="naive")}
            for n in ABLATION_MEMBERS:
                means[f"n={n}"] = mean(chosen, "eigenvalue", method="subspace", n=n)
            text = f"{benchmark}: the more members a subspace has, the less its {what}"
            out.append(judge(text, means, lambda *found: rising(*reversed(found))))
        return out

    runs = (single, *subspaces, vanilla)
    return Figure(name, rows, draw, claims, runs=runs, values=("eigenvalue",))


def top_eigenvalues(network: nn.Module, x: Tensor, y: Tensor, count: int) -> list[float]:
    """The greatest eigenvalues of the Hessian of a network's mean cross-entropy, by Lanczos.

    Shape:
        - x: ``[N, ...]``
        - y: ``[N]``
        - Output: ``count`` numbers, from the greatest
    """
    from curvlinops import HessianLinearOperator

    parameters = list(network.parameters())
    operator = HessianLinearOperator(
        network, nn.CrossEntropyLoss(), parameters, [(x, y)], check_deterministic=False
    ).to_scipy()
    start = np.random.default_rng(0).standard_normal(operator.shape[0]).astype(operator.dtype)
    options = {"which": "LA", "tol": TOLERANCE, "v0": start, "return_eigenvectors": False}
    return sorted(eigsh(operator, count, **options).tolist(), reverse=True)


def _rows(trained: Trained, weights: Weights, run: Run, point: str, seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    x, y = next(trained.benchmark.batches([0], EXAMPLES, generator))
    network = copy.deepcopy(trained.network)
    network.load_state_dict(weights)
    keys = {"method": run.method, "n": run.n, "point": point, "seed": seed}
    return [
        {**keys, "index": i + 1, "eigenvalue": value}
        for i, value in enumerate(top_eigenvalues(network, x, y, TOP))
    ]
