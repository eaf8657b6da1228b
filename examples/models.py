"""The networks of the experiments."""

from torch import nn


def mlp(inputs: int, hidden: int, classes: int, dropout: float = 0.0) -> nn.Sequential:
    """Two hidden layers, each followed by ReLU and dropout.

    Shape:
        - Input: ``[B, inputs]``
        - Output: ``[B, classes]``
    """

    def after() -> list[nn.Module]:
        return [nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]

    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(first, *after(), second, *after(), nn.Linear(hidden, classes))
