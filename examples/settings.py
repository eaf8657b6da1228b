"""The hyper-parameters of every method on every benchmark: data, nothing else.

Source: Doan et al. 2023, https://arxiv.org/abs/2202.09826 (appendix, bold choices); where the paper
leaves a value open, the note beside it says what stands here.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Connect:
    """The second phase, which connects a task's solution with the previous one."""

    previous: float  # weight of the previous midpoint in the start, the paper's a
    lr: float
    momentum: float
    samples: int  # points of the simplex in each step's loss
    sigma: float = 0.005  # standard deviation of the members around the start
    steps: int = 40  # open in the paper; each step sees the whole buffer


@dataclass(frozen=True)
class Settings:
    """How a method trains on a benchmark."""

    lr: float
    decay: float = 1.0  # learning rate at task t: lr * decay ** t
    batch: int = 10
    momentum: float = 0.0
    dropout: float = 0.0
    hidden: int = 256
    epochs: int = 1
    sigma: float = 1.0  # standard deviation of the vertices around the first, at the start
    replay: int = 10  # examples of the buffer in each step of experience replay
    connect: Connect | None = None


# Decay 1 and momentum 0 of naive SGD, the momentum 0 of BatchEnsemble: open in the paper.
_NAIVE = Settings(lr=0.1)
_BATCH_ENSEMBLE = Settings(lr=0.1, decay=0.8)
# Multitask training: all open.
_MULTITASK = Settings(lr=0.1, batch=64)


def _mc_sgd(*, decay: float, dropout: float, previous: float) -> Settings:
    # The weight of the previous solution is not given for MC-SGD: Subspace-Connectivity's.
    connect = Connect(previous=previous, lr=0.05, momentum=0.8, samples=5)
    common = {"lr": 0.1, "decay": decay, "dropout": dropout}
    return Settings(**common, batch=64, momentum=0.8, connect=connect)


def _subspace(*, decay: float, dropout: float, momentum: float, previous: float) -> Settings:
    connect = Connect(previous=previous, lr=0.05, momentum=momentum, samples=5)
    common = {"lr": 0.1, "decay": decay, "dropout": dropout}
    return Settings(**common, momentum=momentum, connect=connect)


_ROTATED = {
    "naive": _NAIVE,
    "mc-sgd": _mc_sgd(decay=0.95, dropout=0.0, previous=0.85),
    "subspace-connectivity": _subspace(decay=0.95, dropout=0.0, momentum=0.8, previous=0.85),
    "batch-ensemble": replace(_BATCH_ENSEMBLE, lr=0.01),
    "multitask": _MULTITASK,
}
_PERMUTED = {
    "naive": _NAIVE,
    "mc-sgd": _mc_sgd(decay=0.8, dropout=0.25, previous=0.25),
    "subspace-connectivity": _subspace(decay=0.8, dropout=0.25, momentum=0.4, previous=0.25),
    "batch-ensemble": _BATCH_ENSEMBLE,
    "multitask": _MULTITASK,
}

# Methods that train as another one does.
_SAME_AS = {
    "ensemble-mc-sgd": "mc-sgd",
    "ensemble-mc-sgd-bagging": "mc-sgd",
    "subspace": "subspace-connectivity",
    "subspace-er": "subspace-connectivity",
    "vanilla-ensemble": "naive",
}

_TABLE = {
    # A fortieth of MNIST's images: several passes over them.
    "rotated-digits": {name: replace(s, epochs=3) for name, s in _ROTATED.items()},
    "rotated-mnist": _ROTATED,
    "permuted-mnist": _PERMUTED,
}


def settings_for(benchmark: str, method: str, n: int) -> Settings:
    """The settings of a method with n members on a benchmark."""
    settings = _TABLE[benchmark][_SAME_AS.get(method, method)]
    if method.startswith("subspace") and n > 3:
        settings = replace(settings, sigma=1.5)
    if method == "batch-ensemble":
        # The batch is divided equally among the members.
        settings = replace(settings, batch=max(1, settings.batch // n) * n)
    return settings
