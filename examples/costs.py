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
    method: str, make: Callable[[], nn.Module], settings: Settings, n: int, inputs: int
) -> dict[str, float]:
    """FLOPs of a prediction and of a training step (both on a batch of 10), single network = 1.

    Counted by torch: matrix products and convolutions, the mix of weights among them.
    """
    with torch.random.fork_rng(devices=[]):
        counts = [_flops(name, make, settings, n, inputs) for name in (method, "naive")]
    (predict, step), (single_predict, single_step) = counts
    return {"predict": predict / single_predict, "step": step / single_step}


def _flops(
    method: str, make: Callable[[], nn.Module], settings: Settings, n: int, inputs: int
) -> tuple[int, int]:
    trained = METHODS[method](make, settings, n, Memory(torch.Generator()))
    rows = BATCH // n * n if method == "batch-ensemble" else BATCH
    x, y = torch.zeros(BATCH, inputs), torch.zeros(BATCH, dtype=torch.long)
    trained.start(0)
    step = (_count(lambda: trained.step(x, y)) + trained.fused_flops) * BATCH // max(rows, 1)
    predict = trained.predictor()
    with torch.no_grad():
        return _count(lambda: predict(x)), step


def _count(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def paper_cost(method: str, n: int, model: nn.Module, x: Tensor) -> float | None:
    """The relative FLOPs that the paper prints for a method, None where it prints none.

    An ensemble: n; bagging: 1 (its training cost). A subspace: ``1 + (n - 1) P / (B MACs)``, P
    parameters mixed with n - 1 additions each, MACs the multiplications of one forward pass.
    """
    if method in ("naive", "mc-sgd", "ensemble-mc-sgd-bagging"):
        return 1.0
    if method in ("ensemble-mc-sgd", "vanilla-ensemble"):
        return float(n)
    if not method.startswith("subspace"):
        return None
    parameters = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    with torch.no_grad():
        macs = _count(lambda: model(x)) / 2 / len(x)
    return 1 + (n - 1) * parameters / (BATCH * macs)
