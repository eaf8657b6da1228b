"""What a method costs relative to a single network, measured and by the paper's count."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .memory import Memory
from .methods import METHODS
from .settings import Settings

BATCH = 10  # the paper counts for batches of 10


def relative_flops(
    method: str,
    make: Callable[[], nn.Module],
    settings: Settings,
    n: int,
    shape: tuple[int, ...],
    single: Callable[[], nn.Module] | None = None,
) -> dict[str, float]:
    """FLOPs of a prediction and of a training step (both on a batch of 10), single network = 1.

    Counted by torch, matrix products and convolutions, and the optimizer's update. The step is one
    of a later task, with the examples that a method replays; a second phase is not counted.

    Args:
        make: makes a network of the method.
        shape: the shape of an image.
        single: makes the single network, by default the same.
    """
    with torch.random.fork_rng(devices=[]):
        predict, step = _flops(method, make, settings, n, shape)
        single_predict, single_step = _flops("naive", single or make, settings, n, shape)
    return {"predict": predict / single_predict, "step": step / single_step}


def _flops(
    method: str, make: Callable[[], nn.Module], settings: Settings, n: int, shape: tuple[int, ...]
) -> tuple[int, int]:
    memory = Memory(torch.Generator())
    trained = METHODS[method](make, settings, n, memory)
    rows = BATCH // n * n if method == "batch-ensemble" else BATCH
    x, y = torch.zeros(BATCH, *shape), torch.zeros(BATCH, dtype=torch.long)
    # As many examples as a step replays, in either kind of buffer.
    past = torch.zeros(settings.replay, *shape), torch.zeros(settings.replay, dtype=torch.long)
    trained.start(0)
    trained.step(*past)
    memory.store(*past)
    trained.finish(0)
    trained.start(1)
    step = (_count(lambda: trained.step(x, y)) + trained.update_flops) * BATCH // max(rows, 1)
    predict = trained.predictor()
    with torch.no_grad():
        return _count(lambda: predict(x)), step


def _count(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def paper_cost(
    method: str, n: int, model: nn.Module, x: Tensor, single: nn.Module | None = None
) -> float | None:
    """The relative FLOPs that the paper prints for a method, None where it prints none.

    A network of another width: the ratio of the weights. An ensemble: n; bagging: 1 (its training
    cost). A subspace: ``1 + (n - 1) P / (B MACs)``, P parameters mixed with n - 1 additions each,
    MACs the multiplications of one forward pass.
    """
    parameters = _weights(model)
    if method in ("naive", "mc-sgd", "ensemble-mc-sgd-bagging"):
        return parameters / _weights(single or model)
    if method in ("ensemble-mc-sgd", "vanilla-ensemble"):
        return float(n)
    if not method.startswith("subspace"):
        return None
    with torch.no_grad():
        macs = _count(lambda: model(x)) / 2 / len(x)
    return 1 + (n - 1) * parameters / (BATCH * macs)


def _weights(model: nn.Module) -> int:
    """The parameters without the linear layers' biases, as the paper counts them."""
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return sum(p.numel() for p in model.parameters()) - sum(m.bias.numel() for m in linear)
