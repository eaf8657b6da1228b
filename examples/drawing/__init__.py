"""The paper's figures: their data, their drawings, and what they should show."""

from .costs import long_costs, short_costs
from .curves import accuracy_against_n, average_accuracy, metrics_against_n
from .figure import Claim, Figure, Sources
from .hessian import spectrum
from .members import each_member, predictions, voting
from .paths import barrier, early_paths, later_paths, losses
from .simplex import first_task, noise, right_after

_ROTATED, _PERMUTED, _CIFAR, _MINI = (
    "rotated-mnist",
    "permuted-mnist",
    "split-cifar-100",
    "split-miniimagenet",
)
_SHORT_ROTATED, _SHORT_CIFAR = "rotated-mnist-5", "split-cifar-100-5"

FIGURES = {
    figure.name: figure
    for figure in (
        accuracy_against_n("1-accuracy-against-n", _SHORT_CIFAR),
        each_member("2-members", _SHORT_CIFAR, sizes=(10,)),
        voting("3-voting", (_SHORT_ROTATED, _SHORT_CIFAR)),
        metrics_against_n("4-metrics-against-n", (_SHORT_ROTATED, _SHORT_CIFAR)),
        spectrum("5-hessian", _SHORT_ROTATED),
        short_costs("5-cost", _SHORT_ROTATED),
        long_costs("6-cost", (_PERMUTED, _ROTATED, _CIFAR, _MINI)),
        each_member("7-members", _SHORT_ROTATED),
        each_member("8-members", _SHORT_CIFAR),
        predictions("9-predictions", _SHORT_CIFAR),
        right_after("10-simplex", _ROTATED),
        noise("10-noise", _ROTATED),
        first_task("11-simplex-of-task-1", _ROTATED),
        barrier("12-barrier", _ROTATED),
        early_paths("13-paths", _ROTATED),
        later_paths("14-later-paths", _ROTATED),
        losses("15-losses", _ROTATED),
        average_accuracy("16-average-accuracy", (_PERMUTED, _ROTATED, _CIFAR)),
    )
}

__all__ = ["FIGURES", "Claim", "Figure", "Sources"]
