"""The steps: those of n explicit copies, in every rule, precision and backend."""

import pytest
import torch
import torch.nn.functional as F
from explicit import RULES, Explicit, backward, close, net
from torch import nn

import ensemblayers as el
from ensemblayers.ops import mix_next, native
from ensemblayers.optim import SubspaceAdamW, SubspaceSGD


# In C++, up to 6 vertices go side by side: 7 are 3 and 4, 13 are 4, 4 and 5.
@pytest.mark.parametrize("n", [1, 2, 3, 7, 13])
@pytest.mark.parametrize(("subspace", "rule", "options"), RULES)
def test_trajectory_is_that_of_explicit_copies(backend, subspace, rule, options, n):
    model = net()
    opt = subspace(model.parameters(), lr=0.01, n=n, sigma=0.5, **options)
    explicit = Explicit(model, opt, rule, lr=0.01, **options)
    for _ in range(50):
        alpha = opt.alpha.clone()
        close(model.parameters(), explicit.weights(alpha).values(), rtol=1e-9, atol=1e-11)
        opt.zero_grad()
        explicit.backward(alpha, backward(model))
        opt.step()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("subspace", "rule", "options"), RULES)
def test_trajectory_is_that_of_the_layers(subspace, rule, options):
    model = net()
    opt = subspace(model.parameters(), lr=0.01, n=3, sigma=0.5, **options)
    layers = el.to_subspace(net(), n=3)
    for p, v in zip(layers.parameters(), opt.vertices(), strict=True):
        p.data.copy_(v)
    other = rule(layers.parameters(), lr=0.01, **options)
    for _ in range(50):
        el.set_point(layers, opt.alpha)
        opt.zero_grad()
        other.zero_grad()
        x = backward(model)
        layers(x).square().mean().backward()
        opt.step()
        other.step()
    close(opt.vertices(), layers.parameters(), rtol=1e-9, atol=1e-11)
    opt.eval()
    close(model.parameters(), el.collapse(_released(layers)).parameters())


def _released(layers):
    el.set_point(layers)
    return layers


def test_the_start_is_the_model_and_vertices_around_it():
    model = nn.Linear(300, 300)
    before = [p.detach().clone() for p in model.parameters()]
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.2)
    weight, bias = opt.vertices()
    close([weight[0], bias[0]], before, rtol=0, atol=0)
    ratio = weight[1:] / weight[0]
    assert (ratio.mean() - 1).abs() < 0.01 and (ratio.std() - 0.2).abs() < 0.01
    assert not torch.equal(ratio[0], ratio[1])


def test_points_are_uniform_on_the_simplex():
    opt = SubspaceSGD(nn.Linear(1, 1).parameters(), lr=0.0, n=3)
    draws = []
    for _ in range(2000):
        draws.append(opt.alpha.clone())
        opt._draw()
    draws = torch.stack(draws)
    # Mean 1 / n, variance (n - 1) / (n^2 (n + 1)): three standard errors and a bit.
    assert (draws.mean(0) - 1 / 3).abs().max() < 0.02
    assert (draws.var(0) - 2 / 36).abs().max() < 0.006
    torch.testing.assert_close(draws.sum(1), torch.ones(2000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
@pytest.mark.parametrize("n", [3, 8])
def test_low_precision_parameters_have_float32_vertices(backend, n, subspace, dtype):
    model = net(dtype)
    opt = subspace(model.parameters(), lr=0.01, n=n, sigma=0.1)
    for _ in range(3):
        opt.zero_grad()
        backward(model, dtype)
        opt.step()
    for p, v in zip(model.parameters(), opt.vertices(), strict=True):
        assert v.dtype == torch.float32 and p.dtype == dtype
        exact = torch.einsum("n,n...->...", opt.alpha.double(), v.double())
        torch.testing.assert_close(p.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("n", [3, 11])
def test_the_backends_agree_in_every_precision(n, monkeypatch):
    if not native.available():
        pytest.skip("no C++ compiler")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        runs = []
        for cpp in (True, False):
            torch.manual_seed(0)
            model = nn.Linear(67, 53).to(dtype)  # More than a block of the C++ pass, and a rest.
            opt = SubspaceSGD(model.parameters(), lr=0.01, n=n, sigma=0.1, momentum=0.9)
            if not cpp:
                monkeypatch.setattr(mix_next, "_in_cpp", lambda vertices, params: False)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            opt.step()
            runs.append(opt.vertices())
            monkeypatch.undo()
        eps = torch.finfo(runs[0][0].dtype).eps
        close(*runs, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize(("subspace", "rule", "options"), [RULES[3], RULES[-2]])
def test_a_parameter_that_joins_late_starts_as_in_torch(backend, subspace, rule, options):
    model = net()
    opt = subspace(model.parameters(), lr=0.01, n=2, sigma=0.5, **options)
    explicit = Explicit(model, opt, rule, lr=0.01, **options)
    for step in range(4):
        alpha = opt.alpha.clone()
        opt.zero_grad()
        explicit.backward(alpha, backward(model))
        if step < 2:
            model[0].bias.grad = explicit.copies[1].grad = None
        opt.step()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)


def test_it_learns_what_the_midpoint_predicts():
    x = torch.randn(200, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))
    opt = SubspaceSGD(model.parameters(), lr=0.1, n=3, sigma=0.1, momentum=0.9)
    for _ in range(200):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    opt.eval()
    assert (model(x).argmax(1) == y).float().mean() > 0.95


@pytest.mark.parametrize("built", [0.0, 0.9])
@pytest.mark.parametrize("values", [(0.0, 0.9), (0.9, 0.0), (0.9, 0.5), (0.9, 0.0, 0.9)])
def test_momentum_may_change_on_the_way(built, values):
    model = net()
    opt = SubspaceSGD(model.parameters(), lr=0.05, n=2, sigma=0.5, momentum=built)
    explicit = Explicit(model, opt, torch.optim.SGD, lr=0.05, momentum=built)
    for step in range(3 * len(values)):
        for o in (opt, explicit.opt):
            o.param_groups[0]["momentum"] = values[step // 3]
            o.param_groups[0]["dampening"] = 0.25
        alpha = opt.alpha.clone()
        opt.zero_grad()
        explicit.backward(alpha, backward(model))
        opt.step()
        explicit.step()
    close(opt.vertices(), explicit.copies, rtol=1e-9, atol=1e-11)
