"""Arguments, starts and names of the layers and of the wrapper."""

import math

import pytest
import torch
from distinct import telltale
from fast_weights import conv_pair, leaves, linear_pair
from torch import nn

import ensemblayers as el


@pytest.mark.parametrize(
    "kind", [lambda **k: linear_pair({}, **k), lambda **k: conv_pair(2, {}, **k)]
)
def test_init(kind):
    torch.manual_seed(1)
    sign, normal, ones = (kind(n=2000, init=i)[0] for i in ("random_sign", "normal", "ones"))
    for fast in (sign.r, sign.s):
        assert set(fast.unique().tolist()) == {-1, 1} and abs(fast.mean()) < 0.05
    for fast in (normal.r, normal.s):
        assert abs(fast.mean() - 1) < 0.03 and abs(fast.std() - 0.5) < 0.03
    assert (ones.r == 1).all() and (ones.s == 1).all()
    assert not torch.equal(sign.r[:, 0], sign.r[:, 1]) and not torch.equal(sign.r[0], sign.r[1])


@pytest.mark.parametrize(
    "layer, fan_in",
    [
        (lambda: el.BatchEnsembleLinear(256, 512, n=4), 256),
        (lambda: el.BatchEnsembleConv2d(32, 256, 3, n=4), 288),
        (lambda: el.BatchEnsembleConv1d(128, 512, 5, n=4, groups=4), 160),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_init_is_a_plain_layers(layer, fan_in, meta):
    if meta:
        with torch.device("meta"):
            layer_ = layer()
        layer_ = layer_.to_empty(device="cpu")
        layer_.reset_parameters()
    else:
        layer_ = layer()
    bound = 1 / math.sqrt(fan_in)
    assert layer_.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert layer_.bias.abs().max() <= bound
    for own in layer_.bias:
        assert own.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    assert not torch.equal(layer_.bias[0], layer_.bias[1])
    assert set(layer_.r.unique().tolist()) == {-1, 1}


def test_reset_fast_weights_leaves_the_rest():
    layer, _ = linear_pair({}, n=4)
    before = leaves(layer)
    layer.reset_fast_weights()
    assert torch.equal(layer.weight, before["weight"]) and torch.equal(layer.bias, before["bias"])
    assert not (torch.equal(layer.r, before["r"]) and torch.equal(layer.s, before["s"]))


@pytest.mark.parametrize("name", ["Linear", "Conv1d"])
@pytest.mark.parametrize(
    "options, match",
    [
        ({"init": "zeros", "n": 2}, "random_sign, normal, ones.*'zeros'"),
        ({"n": 0}, "n=0"),
        ({"n": 2.0}, "n=2.0"),
    ],
)
def test_layer_errors(name, options, match):
    args = (3, 4) if name == "Linear" else (3, 4, 1)
    with pytest.raises(ValueError, match=match):
        getattr(el, f"BatchEnsemble{name}")(*args, **options)


@pytest.mark.parametrize(
    "module, options, match",
    [
        (nn.Linear(2, 2), {}, "none"),
        (nn.Sequential(telltale(2), telltale(3)), {}, r"n=\[2, 3\]"),
        (telltale(2), {"train": "share"}, "'share'"),
        ([telltale(2)], {}, "a module, got list"),
        (el.BatchEnsemble(telltale(2)), {}, "without a whole BatchEnsemble in it, got one"),
        (nn.Sequential(telltale(2), el.to_stacked(nn.Linear(2, 2), n=2)), {}, "Stacked.* as '1'"),
    ],
)
def test_wrapper_errors(module, options, match):
    with pytest.raises(ValueError, match=match):
        el.BatchEnsemble(module, **options)


@pytest.mark.parametrize(
    "text, layer",
    [
        ("in_features=5, out_features=4, bias=True, n=3", lambda: linear_pair({}, 3)[0]),
        (
            "padding=(1, 1), groups=2, bias=False",
            lambda: conv_pair(2, {"padding": 1, "groups": 2, "bias": False}, 3)[0],
        ),
        ("n=3, train='repeat'", lambda: el.BatchEnsemble(telltale(3), train="repeat")),
    ],
)
def test_repr(text, layer):
    assert text in repr(layer())


def test_n_is_that_of_the_shapes():
    assert telltale(5).n == 5 and el.BatchEnsemble(telltale(5)).n == 5


def test_the_wrapper_checks_the_number_of_members():
    layer = el.BatchEnsembleLinear(3, 2, n=4)
    assert el.BatchEnsemble(layer, n=4).n == 4
    with pytest.raises(ValueError, match="n=3 members, got n=4"):
        el.BatchEnsemble(layer, n=3)


@pytest.mark.parametrize("init", ["random_sign", "normal", "ones"])
def test_further_pairs_start_without_effect_and_learn(init):
    layer, _ = linear_pair({}, n=2, rank=3, init=init)
    assert layer.rank == 3 and layer.r.shape == (2, 3, 5) and layer.s.shape == (2, 3, 4)
    assert "rank=3" in repr(layer) and "rank" not in repr(linear_pair({}, n=2)[0])
    assert (layer.s[:, 1:] == 0).all()
    one = el.BatchEnsembleLinear(5, 4, n=2, dtype=torch.float64)
    with torch.no_grad():
        one.weight.copy_(layer.weight)
        one.bias.copy_(layer.bias)
        one.r.copy_(layer.r[:, 0])
        one.s.copy_(layer.s[:, 0])
    x = torch.randn(8, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), one(x))
    layer(x).pow(2).sum().backward()
    first, second = layer.s.grad[:, 1], layer.s.grad[:, 2]
    assert first.any() and second.any() and not torch.equal(first, second)


def test_probability_and_deviation_of_the_start():
    for positive in (0.0, 0.2, 1.0):
        layer = el.BatchEnsembleLinear(300, 200, n=4, positive=positive)
        for fast in (layer.r, layer.s):
            assert set(fast.unique().tolist()) <= {-1, 1}
            assert (fast == 1).float().mean().item() == pytest.approx(positive, abs=0.06)
    layer = el.BatchEnsembleLinear(300, 200, n=4, init="normal", std=0.1)
    assert layer.r.std().item() == pytest.approx(0.1, rel=0.1)
    assert layer.s.mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"positive": 1.5}, "positive=1.5"),
        ({"std": -1.0}, "std=-1.0"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 1.5}, "rank=1.5"),
    ],
)
def test_wrong_starts(options, match):
    for make in (
        lambda: el.BatchEnsembleLinear(2, 2, n=2, **options),
        lambda: el.BatchEnsembleConv1d(2, 2, 1, n=2, **options),
        lambda: el.to_batch_ensemble(nn.Linear(2, 2), n=2, **options),
    ):
        with pytest.raises(ValueError, match=match):
            make()
