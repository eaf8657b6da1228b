"""Throughput of every layer, forward and forward + backward, against the plain layer.

    pytest benchmarks/test_layers.py
    pytest benchmarks/test_layers.py -k "batch_ensemble and 2048"

A row's ratio is to the plain layer of the same shape: for BatchEnsemble on the same n * b rows, for
stacked networks to a Python loop over them. Forward runs in training mode (a new point each time)
without a graph; forward + backward computes the gradients of the input and of all parameters. How
to read the table: conftest.py.
"""

import copy

import pytest
import torch
from references import Eager, at_points, close, compiled, mixed
from torch import nn

import ensemblayers as el

LINEAR = [(256, 784, 10), (256, 784, 64), (2048, 2048, 10), (2048, 2048, 64), (2048, 2048, 512)]
SPACE = {1: (256,), 2: (16, 16), 3: (8, 8, 8)}
CHANNELS = {1: 64, 2: 64, 3: 32}

linear = pytest.mark.parametrize("shape", LINEAR, ids=str)
mode = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
dims = pytest.mark.parametrize("k", [1, 2, 3], ids=lambda k: f"{k}d")


class Loop(nn.Module):
    """The members of an ensemble, one after the other."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x):
        return torch.stack([model(x) for model in self.models])


@linear
@mode
@pytest.mark.parametrize(
    "form,n", [("layer", 3), ("layer", 5), ("einsum", 3), ("sum", 3), ("compile", 3)]
)
def test_subspace_linear(compare, shape, form, n, backward):
    plain, x, case = _linear(shape)
    if form == "layer":
        layer = el.SubspaceLinear(plain.in_features, plain.out_features, n=n)
        name, call = f"SubspaceLinear n={n}", layer
    else:
        layer = Eager(plain, n=n, mix="sum" if form == "sum" else "einsum")
        call = compiled(layer) if form == "compile" else layer
        label = {"einsum": "eager einsum", "sum": "eager sum", "compile": "compiled einsum"}[form]
        name = f"{label} n={n}"
    _time(compare, case, (name, layer, call), ("nn.Linear", plain), x, backward, _at_alpha)


@linear
@mode
def test_batch_ensemble_linear(compare, shape, backward):
    n = 4
    out, inputs, batch = shape
    plain, x, case = _linear((out, inputs, min(batch, 128)), members=n)
    layer = el.BatchEnsembleLinear(plain.in_features, plain.out_features, n=n)
    candidate = (f"BatchEnsembleLinear n={n}", layer, layer)
    baseline = ("nn.Linear", plain)
    _time(compare, f"{case}x{n}", candidate, baseline, x, backward, _by_member, goal=1.15)


@pytest.mark.parametrize("shape", LINEAR[:4], ids=str)
@mode
def test_stacked(compare, shape, backward):
    plain, x, case = _linear(shape)
    models = [copy.deepcopy(plain).requires_grad_() for _ in range(3)]
    layer, loop = el.StackedEnsemble(models), Loop(models)
    candidate = ("StackedEnsemble n=3", layer, layer)
    _time(compare, case, candidate, ("loop over 3", loop), x, backward, _each(plain), goal=1.0)


@dims
@mode
@pytest.mark.parametrize("kind,n", [("Subspace", 3), ("Subspace", 5), ("BatchEnsemble", 4)])
def test_conv(compare, kind, n, k, backward):
    name, c, batch = f"{kind}Conv{k}d", CHANNELS[k], 16 if kind == "Subspace" else 4
    plain = getattr(nn, f"Conv{k}d")(c, c, 3, padding=1)
    layer = getattr(el, name)(c, c, 3, padding=1, n=n)
    rows = batch if kind == "Subspace" else n * batch
    x = torch.randn(rows, c, *SPACE[k])
    case = f"{c}->{c}, {'x'.join('3' * k)}, {'x'.join(map(str, SPACE[k]))}, B={rows}"
    reference = _at_alpha if kind == "Subspace" else _by_member
    candidate = (f"{name} n={n}", layer, layer)
    _time(compare, case, candidate, (f"nn.Conv{k}d", plain), x, backward, reference)


@mode
@pytest.mark.parametrize("norm", ["BatchNorm2d", "LayerNorm"])
def test_norm(compare, norm, backward):
    x = torch.randn(16, 64, 16, 16) if norm == "BatchNorm2d" else torch.randn(64, 512)
    plain = nn.BatchNorm2d(64) if norm == "BatchNorm2d" else nn.LayerNorm(512)
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_(1, 0.5)
    layer = el.Subspace(plain, n=3)
    candidate = (f"Subspace({norm}) n=3", layer, layer)
    case = "x".join(map(str, x.shape))
    _time(compare, case, candidate, (f"nn.{norm}", plain), x, backward, _at_alpha)


def _linear(shape, members=1):
    out, inputs, batch = shape
    return (
        nn.Linear(inputs, out),
        torch.randn(members * batch, inputs),
        f"{out}x{inputs}, B={batch}",
    )


def _time(compare, case, candidate, baseline, x, backward, reference, goal=None):
    """``reference(plain, layer, parameters, x)``: the layer's output from the plain layer's."""
    (name, layer, call), (base_name, base) = candidate, baseline
    x.requires_grad_(backward)

    def check():
        _check(layer, call, base, x, reference, backward)

    compare(
        f"{case}, {'forward + backward' if backward else 'forward'}",
        (name, _runner(call, layer, x, backward)),
        (base_name, _runner(base, base, x, backward)),
        check=check,
        goal=goal,
    )


def _runner(call, layer, x, backward):
    if not backward:
        return torch.no_grad()(lambda: call(x))
    with torch.no_grad():
        upstream = torch.randn_like(call(x))
    inputs = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(call(x), inputs, upstream)


def _check(layer, call, base, x, reference, backward):
    """Compare output and gradients with those of float64 layers at the members' parameters."""
    plain = copy.deepcopy(base).double()
    _equal(base, base, x, lambda own, x: at_points(plain, [own], x)[0], backward)
    _equal(layer, call, x, lambda own, x: reference(plain, layer, own, x), backward)


def _equal(layer, call, x, reference, backward):
    # Of many rows of features, every eighth: the others get no gradient from above.
    every = (..., slice(None, None, 8 if x.dim() == 2 and len(x) >= 512 else 1), slice(None))
    own = [p.detach().double().requires_grad_() for p in layer.parameters()]
    exact = x.detach()[every].double().requires_grad_()
    with torch.set_grad_enabled(backward):
        y, want = call(x), reference(own, exact)
    close([y[every]], [want], 1e-5, "output")
    if backward:
        g = torch.zeros_like(y)
        g[every] = torch.randn_like(g[every])
        dx, *got = torch.autograd.grad(y, [x, *layer.parameters()], g)
        wanted = torch.autograd.grad(want, [exact, *own], g[every].double())
        close([dx[every], *got], wanted, 1e-5, "gradient")


def _at_alpha(plain, layer, own, x):
    alpha = layer.alpha if isinstance(layer, Eager) else layer.subspace_point.alpha
    return at_points(plain, [mixed(alpha, own)], x)[0]


def _by_member(plain, layer, own, x):
    p = dict(zip((name for name, _ in layer.named_parameters()), own, strict=True))
    ones = (1,) * (p["weight"].dim() - 2)
    rows = x.chunk(layer.n)
    outputs = []
    for i in range(layer.n):
        fast = torch.outer(p["s"][i], p["r"][i])
        weight = p["weight"] * fast.view(*fast.shape, *ones)
        outputs += at_points(plain, [[weight, p["bias"][i]]], rows[i])
    return torch.cat(outputs)


def _each(plain):
    exact = copy.deepcopy(plain).double()
    return lambda _loop, layer, own, x: torch.stack(
        at_points(exact, list(zip(*own, strict=True)), x)
    )
