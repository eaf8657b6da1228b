"""How the figures look: colours, names, panels and legends."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

# Okabe and Ito's palette, which the colour-blind can tell apart, and a marker for each colour.
COLOURS = {
    "naive": "#000000",
    "single": "#000000",
    "vanilla-ensemble": "#0072B2",
    "subspace": "#D55E00",
    "batch-ensemble": "#009E73",
    "subspace-er": "#CC79A7",
    "subspace-connectivity": "#E69F00",
    "mc-sgd": "#56B4E9",
    "ensemble-mc-sgd": "#0072B2",
    "ensemble-mc-sgd-bagging": "#009E73",
    "ewc": "#999999",
    "a-gem": "#D55E00",
    "er-reservoir": "#CC79A7",
    "stable-sgd": "#0072B2",
    "multitask": "#F0E442",
}
LABELS = {
    "naive": "naive SGD",
    "vanilla-ensemble": "vanilla ensemble (VE)",
    "subspace": "subspace (SE)",
    "batch-ensemble": "BatchEnsemble (BE)",
    "subspace-er": "subspace + replay (SE+ER)",
    "subspace-connectivity": "Subspace-Connectivity (S-C)",
    "mc-sgd": "MC-SGD",
    "ensemble-mc-sgd": "ensemble MC-SGD",
    "ensemble-mc-sgd-bagging": "ensemble MC-SGD, bagging",
    "ewc": "EWC",
    "a-gem": "A-GEM",
    "er-reservoir": "ER-Reservoir",
    "stable-sgd": "Stable SGD",
    "multitask": "multitask",
}
TITLES = {
    "rotated-digits": "Rotated digits",
    "rotated-mnist": "Rotated MNIST",
    "permuted-mnist": "Permuted MNIST",
    "rotated-mnist-5": "Rotated MNIST, 5 tasks",
    "split-cifar-100": "Split CIFAR-100",
    "split-cifar-100-5": "Split CIFAR-100, 5 tasks",
    "split-miniimagenet": "Split miniImageNet",
}


def panels(
    rows: int, columns: int, width: float = 3.6, height: float = 3.2, **options: Any
) -> tuple[Canvas, list[list[Axes]]]:
    """A canvas of panels."""
    canvas = Canvas(figsize=(width * columns, height * rows), layout="constrained")
    axes = canvas.subplots(rows, columns, squeeze=False, **options)
    return canvas, axes.tolist()


def legend_below(canvas: Canvas) -> None:
    """One legend for all panels, in as many columns as are no wider than the canvas."""
    entries = {}
    for axes in canvas.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    for columns in range(len(entries), 0, -1):
        place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
        legend = canvas.legend(entries.values(), entries.keys(), **place)
        if columns == 1 or legend.get_window_extent().width <= canvas.bbox.width:
            return
        legend.remove()
