"""BatchEnsemble on a GPU, n = 4: its layers against nn.Linear and nn.Conv2d on the same rows."""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import ensemblayers as el
from ensemblayers.ops import batch_ensemble_linear as op
from ensemblayers.ops import batch_ensemble_linear_triton as kernels
from ensemblayers.ops import member_scale

from .gpu_bench import LIMITS, Bench, dtype_of, error, precision

N = 4
Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # x, weight, r, s, bias


def _linear(b: Bench, size: int, batch: int, dtype: str) -> Layer:
    t = dtype_of(dtype)
    x, weight = b.randn(N * batch, size, dtype=t), b.randn(size, size, dtype=t) / size**0.5
    r, s, bias = (b.randn(N, size, dtype=t) for _ in range(3))
    return x, weight, r, s, bias


def _shapes(b: Bench) -> Iterator[tuple[int, int, str]]:
    for batch in b.plan.batches:
        for dtype in b.plan.dtypes:
            for size in b.plan.sizes:
                if not b.left():
                    return
                yield size, batch, dtype


def tune_batch_ensemble(b: Bench) -> None:
    """Tile sizes for a step of each layer that the fused kernels would take."""
    for size, batch, dtype in _shapes(b):
        x, weight, *fast = _linear(b, size, batch, dtype)
        with precision(dtype):
            if op.algorithm(x, weight, N, False) == "fused":
                kernels.forward(x, weight, *fast, None)
                kernels.backward(x, x, weight, *fast, None, [True] * 5 + [False])


def batch_ensemble(b: Bench) -> None:
    """A forward pass without gradients and a training step of each layer."""
    for size, batch, dtype in _shapes(b):
        _linear_rows(b, _linear(b, size, batch, dtype), size, dtype)
    for channels in b.plan.channels:
        _conv_rows(b, channels)


def _by_rule(*layer: Tensor) -> Tensor:
    return el.functional.batch_ensemble_linear(*layer)


def _forced(name: str, *layer: Tensor) -> Tensor:
    with op.forced(name):
        return el.functional.batch_ensemble_linear(*layer)


def _by_index(members: Tensor, *layer: Tensor) -> Tensor:
    return el.functional.batch_ensemble_linear(*layer, members=members)


def _on_nn_linear(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias[0])


def _linear_rows(b: Bench, layer: Layer, size: int, dtype: str) -> None:
    x, rows = layer[0], len(layer[0])
    members = torch.arange(N, device=x.device).repeat_interleave(rows // N)
    ways = {"nn.Linear": _on_nn_linear, "ours": _by_rule}
    ways |= {name: functools.partial(_forced, name) for name in op.forced.names}
    ways |= {"by index": functools.partial(_by_index, members), "eager": op.plain_linear}
    about = {"in = out": size, "rows": rows, "n": N, "dtype": dtype}
    with precision(dtype):
        _compare(b, "BatchEnsemble", ways, layer, LIMITS[dtype], about)


def _conv_rows(b: Bench, channels: int) -> None:
    """3x3 convolutions in float32 with tf32, as cuDNN has it by default."""
    x, weight = b.randn(N * b.plan.batches[0], channels, 32, 32), b.randn(channels, channels, 3, 3)
    factors = [b.randn(N, channels) for _ in range(3)]
    layer = (x, weight / (9 * channels) ** 0.5, *factors)

    def plain(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias[0], padding=1)

    def elementwise(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, bias: Tensor) -> Tensor:
        y = F.conv2d(member_scale.plain_scale(x, r, None, None), weight, padding=1)
        return member_scale.plain_scale(y, s, bias, None)

    def ours(*layer: Tensor) -> Tensor:
        return el.functional.batch_ensemble_conv(*layer, padding=1)

    ways = {"nn.Conv2d": plain, "ours": ours, "eager": elementwise}
    about = {"channels": channels, "rows": len(x), "n": N}
    _compare(b, "BatchEnsemble conv", ways, layer, LIMITS["tf32"], about)


def _compare(
    b: Bench,
    section: str,
    ways: dict[str, Callable[..., Tensor]],
    layer: Layer,
    limit: float,
    about: dict[str, object],
) -> None:
    """Two rows: a forward pass, and forward, backward and momentum SGD.

    The first way is a plain layer; the others are right if they agree with the last in float64.
    """
    plain, *_, last = ways
    grad = torch.randn_like(ways[plain](*layer))
    exact = {}
    for name in (plain, last):
        leaves = [t.double().requires_grad_() for t in layer]
        y = ways[name](*leaves)
        exact[name] = y.detach(), torch.autograd.grad(y, leaves[1], grad.double())[0]

    steps = {name: _step(way, layer, grad) for name, way in ways.items()}

    def check_output(name: str) -> float:
        return error(ways[name](*layer), exact[plain if name == plain else last][0])

    def check_gradient(name: str) -> float:
        run, weight = steps[name]
        run()
        return error(weight.grad, exact[plain if name == plain else last][1])

    with torch.no_grad():
        calls = {name: functools.partial(way, *layer) for name, way in ways.items()}
        b.compare(f"{section} forward", calls, check_output, limit, **about)
    b.compare(
        f"{section} step", {k: run for k, (run, _) in steps.items()}, check_gradient, limit, **about
    )


def _step(way: Callable[..., Tensor], layer: Layer, grad: Tensor):
    leaves = [t.clone().requires_grad_() for t in layer]
    x, weight, *_ = leaves
    # A plain layer leaves r and s without gradients, and the optimizer leaves these out.
    optimizer = torch.optim.SGD(leaves[1:], 1e-6, momentum=0.9, fused=x.is_cuda or None)

    def run() -> None:
        x.grad = None
        optimizer.zero_grad()
        way(*leaves).backward(grad)
        optimizer.step()

    return run, weight
