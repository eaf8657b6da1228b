"""Metrics of continual learning as functions of the accuracy matrix.

``accuracy[t, k]`` is the test accuracy on task k after training on task t, in percent, NaN where it
was not measured: above the diagonal, and in all but the last row for multitask training.
"""

import torch
from torch import Tensor


def final_accuracy(accuracy: Tensor) -> float:
    """Mean accuracy over all tasks after the last one, in percent.

    >>> final_accuracy(torch.tensor([[90.0, torch.nan], [80.0, 100.0]]))
    90.0
    """
    return accuracy[-1].mean().item()


def forgetting(accuracy: Tensor) -> float:
    """Mean over the earlier tasks of the best accuracy before the last task less the final one.

    A fraction; NaN for a single task or where the earlier rows were not measured.

    >>> round(forgetting(torch.tensor([[90.0, torch.nan], [80.0, 100.0]])), 4)
    0.1
    """
    last = len(accuracy) - 1
    if last == 0:
        return float("nan")
    drops = [accuracy[k:last, k].max() - accuracy[last, k] for k in range(last)]
    return torch.stack(drops).mean().item() / 100


def learning_accuracy(accuracy: Tensor) -> float:
    """Mean accuracy on each task right after training on it, in percent.

    >>> learning_accuracy(torch.tensor([[90.0, torch.nan], [80.0, 100.0]]))
    95.0
    """
    return accuracy.diagonal().mean().item()


def forgetting_improvement(single: Tensor, method: Tensor) -> float:
    """How much less a method forgets than a single model with the same seed; a fraction."""
    return forgetting(single) - forgetting(method)


def seen_accuracy(accuracy: Tensor) -> list[float]:
    """Mean accuracy on the tasks seen so far, after each task, in percent.

    >>> seen_accuracy(torch.tensor([[90.0, torch.nan], [80.0, 100.0]]))
    [90.0, 90.0]
    """
    return [accuracy[t, : t + 1].mean().item() for t in range(len(accuracy))]
