"""The linear layer and the convolutions: the plain layer at the point."""

import copy
import math

import pytest
import torch
from plain import assert_at
from points import rand, simplex
from torch import nn

import ensemblayers as el

close = torch.testing.assert_close
CONV = {
    1: (nn.Conv1d, el.SubspaceConv1d),
    2: (nn.Conv2d, el.SubspaceConv2d),
    3: (nn.Conv3d, el.SubspaceConv3d),
}
CONV_OPTIONS = [
    {},
    {"bias": False},
    {"stride": 2},
    {"padding": 2},
    {"padding": "same"},
    {"padding": "valid"},
    {"padding": "same", "dilation": 2, "groups": 2},
    {"dilation": 2},
    {"groups": 4, "bias": False, "stride": 3},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "replicate", "stride": 2},
    {"padding": 1, "padding_mode": "circular", "groups": 2},
    {"padding": "same", "padding_mode": "circular", "dilation": 2},
    {"padding": "same", "padding_mode": "reflect", "bias": False},
]


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (3, 7), (17, 31), (129, 2)])
def test_linear_equals_the_plain_layer_at_the_point(inner, outer, bias, each):
    layer = el.SubspaceLinear(inner, outer, bias, n=3, sigma=1.0, dtype=torch.float64)
    plain = nn.Linear(inner, outer, bias).double()
    assert_at(layer, plain, simplex(4, 3) if each else simplex(3), rand(4, inner))
    assert_at(layer, plain, simplex(4, 3) if each else simplex(3), rand(4, 2, 5, inner))


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("options", CONV_OPTIONS, ids=str)
def test_conv_equals_the_plain_layer_at_the_point(space, options, each):
    plain_class, subspace_class = CONV[space]
    plain = plain_class(4, 8, 3, **options).double()
    layer = subspace_class(4, 8, 3, **options, n=3, sigma=1.0, dtype=torch.float64)
    assert_at(layer, plain, simplex(2, 3) if each else simplex(3), rand(2, 4, *(6, 5, 7)[:space]))


@pytest.mark.parametrize("space", [1, 2, 3])
def test_conv_takes_options_per_dimension_and_by_position(space):
    plain_class, subspace_class = CONV[space]
    args = ((3, 2, 1)[:space], (2, 1, 2)[:space], (1, 0, 2)[:space], (1, 2, 1)[:space], 2, False)
    plain = plain_class(2, 4, *args).double()
    layer = subspace_class(2, 4, *args, n=2, sigma=1.0, dtype=torch.float64)
    assert_at(layer, plain, simplex(2), rand(2, 2, *(6, 5, 7)[:space]))
    assert_at(layer, plain, simplex(2), rand(2, *(6, 5, 7)[:space]))


def test_conv_keeps_the_channels_last_format():
    layer = el.SubspaceConv2d(8, 16, 3, n=3, dtype=torch.float64)
    plain = nn.Conv2d(8, 16, 3).double()
    x = rand(2, 8, 6, 6).to(memory_format=torch.channels_last)
    assert_at(layer, plain, simplex(3), x)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("to", [{}, {"dtype": torch.float32}])
def test_a_model_converts_to_the_channels_last_format(to):
    plain = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Unflatten(1, (1, 2)), nn.Conv2d(1, 3, 1)).double()
    model = el.to_subspace(plain, n=3)
    x = rand(2, 2, 4).to(**to)
    before = copy.deepcopy(model).to(**to).eval()(x)
    model = model.eval().to(memory_format=torch.channels_last, **to)
    close(model(x), before)
    assert model[2].weight.shape == (3, 3, 1, 1, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: el.SubspaceLinear(64, 10, n=3),
        lambda: el.SubspaceConv2d(4, 10, 3, n=3),
        lambda: el.Subspace(nn.Embedding(7, 10), n=3),
    ],
)
def test_a_moved_module_keeps_its_parameter_objects_and_values(make):
    layer = make()
    before = {k: (p, p.detach().clone()) for k, p in layer.named_parameters()}
    layer.to(torch.float64).share_memory()
    for name, p in layer.named_parameters():
        assert p is before[name][0] and p.is_shared()
        close(p.detach(), before[name][1].double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_in_half_precision_do_not_round_alpha(dtype):
    layer = el.SubspaceLinear(1, 5000, bias=False, n=7, sigma=1.0).to(dtype)
    alpha = el.sample_simplex(7)
    with el.at(layer, alpha):
        y = layer(torch.ones(1, 1, dtype=dtype))
    exact = (alpha.double() @ layer.weight.double().flatten(1)).detach()
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + 2e-6
    assert y.dtype == dtype
    assert ((y[0].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("each", [False, True])
def test_half_precision_layers_return_their_dtype(dtype, each):
    alpha = el.sample_simplex(3, 4) if each else el.sample_simplex(3)
    for layer, x in [
        (el.SubspaceLinear(4, 2, n=3, dtype=dtype), torch.ones(4, 4, dtype=dtype)),
        (el.SubspaceConv1d(4, 2, 3, n=3, dtype=dtype), torch.ones(4, 4, 5, dtype=dtype)),
        (el.Subspace(nn.LayerNorm(4, dtype=dtype), n=3), torch.ones(4, 4, dtype=dtype)),
    ]:
        with el.at(layer, alpha):
            y = layer(x)
        y.sum().backward()
        assert y.dtype == dtype
        assert all(p.grad.dtype == dtype for p in layer.parameters())


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: el.SubspaceLinear(600, 1000, n=3), lambda: nn.Linear(600, 1000)),
        (lambda: el.SubspaceConv2d(64, 512, 5, n=3), lambda: nn.Conv2d(64, 512, 5)),
        (
            lambda: el.SubspaceConv1d(64, 512, 9, groups=2, n=3),
            lambda: nn.Conv1d(64, 512, 9, groups=2),
        ),
    ],
)
def test_vertices_start_as_a_plain_layer_times_noise_of_mean_1_and_std_sigma(make, plain):
    layer, plain = make(), plain().weight.detach()
    weight = layer.weight.detach()
    assert weight[0].std().item() == pytest.approx(plain.std().item(), rel=1e-2)
    assert weight[0].abs().max() <= plain.abs().max() * 1.001
    assert layer.bias[0].std().item() == pytest.approx(plain.std().item(), rel=0.1)
    for w in weight[1:]:
        assert w.std().item() == pytest.approx(plain.std().item() * math.sqrt(1.01), rel=1e-2)
    noise = weight[1:] / weight[0] - 1
    for e in noise:
        assert abs(e.mean().item()) < 1e-3
        assert e.std().item() == pytest.approx(0.1, rel=1e-2)
    assert abs((noise[0] * noise[1]).mean().item()) < 1e-4
    bias_noise = layer.bias.detach()[1] / layer.bias.detach()[0] - 1
    assert bias_noise.std().item() == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_sigma_is_relative_to_the_first_vertex(sigma):
    norm = el.Subspace(nn.LayerNorm(20_000), n=2, sigma=sigma)
    weight = norm.state_dict()["weight"]
    assert weight[0].eq(1).all()
    assert weight[1].std().item() == pytest.approx(sigma, rel=2e-2)
    assert norm.state_dict()["bias"].eq(0).all()


@pytest.mark.parametrize("sigma", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        lambda s: el.SubspaceLinear(2, 2, n=2, sigma=s),
        lambda s: el.SubspaceConv1d(2, 2, 1, n=2, sigma=s),
        lambda s: el.Subspace(nn.LayerNorm(2), n=2, sigma=s),
        lambda s: el.to_subspace(nn.Linear(2, 2), n=2, sigma=s),
    ],
)
def test_an_impossible_sigma_is_named(make, sigma):
    with pytest.raises(ValueError, match=f"sigma={sigma!r}"):
        make(sigma)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"groups": 3}, "groups"), ({"padding_mode": "mirror"}, "mirror")],
)
def test_conv_refuses_what_the_plain_layer_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        el.SubspaceConv2d(4, 8, 3, n=2, **options)


def test_n_is_keyword_only():
    with pytest.raises(TypeError):
        el.SubspaceLinear(2, 2, True, 3)
    with pytest.raises(TypeError):
        el.SubspaceLinear(2, 2)


def test_layers_on_meta_are_initialised_later():
    with torch.device("meta"):
        model = nn.Sequential(el.SubspaceLinear(40, 50, n=2), el.Subspace(nn.LayerNorm(50), n=2))
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    weight = model[0].weight.detach()
    assert weight[0].abs().max() <= 1 / math.sqrt(40)
    assert (weight[1] / weight[0]).std().item() == pytest.approx(0.1, rel=0.2)
    assert model[1].state_dict()["weight"][0].eq(1).all()
    assert model(torch.zeros(3, 40)).shape == (3, 50)


def test_layers_show_their_options_and_n():
    text = repr(el.SubspaceConv2d(4, 8, 3, padding="same", groups=2, bias=False, n=5))
    for part in ("4, 8", "padding='same'", "groups=2", "bias=False", "n=5"):
        assert part in text
    assert "n=5" in repr(el.Subspace(nn.LayerNorm(2), n=5))
