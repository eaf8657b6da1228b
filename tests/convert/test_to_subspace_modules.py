"""Which modules are converted, and what of them is kept: ties, hooks, modes, statistics."""

import pytest
import torch
from plain import assert_at, explicit, scatter_
from points import simplex
from torch import nn
from torch.nn.utils import parametrizations
from zoo import (
    ReadsItsChild,
    Shared,
    Tied,
    classes,
    close,
    collapsed_at,
    conv_net,
    encoder,
    exact,
    make,
    subspaces,
)

import ensemblayers as el


def test_tied_parameters_stay_tied():
    model = el.to_subspace(Tied(), n=3)
    assert model.head.weight is model.embed._parameters["weight"]
    assert len(list(model.parameters())) == 3
    plain = el.collapse(model)
    assert plain.head.weight is plain.embed.weight


def test_shared_modules_stay_shared():
    model = el.to_subspace(Shared(), n=3)
    assert model.first is model.again is model.list[0]
    plain = el.member(model, 1)
    assert plain.first is plain.again is plain.list[0]


@pytest.mark.parametrize("left_out", ["embed", "head"])
def test_a_tie_across_the_filter_is_an_error_that_names_it(left_out):
    with pytest.raises(ValueError, match=rf"{left_out}\.weight is tied"):
        el.to_subspace(Tied(), n=3, where=lambda m, name: name != left_out)


# where=


def test_where_leaves_modules_plain():
    source = conv_net().double().eval()
    seen = {}
    model = el.to_subspace(
        source, n=3, where=lambda m, name: seen.update({name: m}) or not isinstance(m, nn.Conv2d)
    )
    assert {k: type(m) for k, m in seen.items()} == {
        k: type(m) for k, m in source.named_modules() if m._parameters.get("weight") is not None
    }
    assert type(model[0]) is nn.Conv2d and type(model[6]) is el.SubspaceLinear
    assert model[0].weight is not source[0].weight
    exact(model[0].weight, source[0].weight)
    x = torch.randn(2, 3, 6, 6).double()
    with el.at(model, vertex=0):
        exact(model(x), source(x))
    assert classes(el.collapse(model)) == classes(source)


def test_the_rest_can_be_converted_later():
    source = encoder().double().eval()
    x = torch.randn(2, 5, 4).double()
    norms = el.to_subspace(source, n=3, where=lambda m, _: isinstance(m, nn.LayerNorm))
    model = el.to_subspace(norms, n=3)
    assert len({id(m.subspace_point) for m in subspaces(model)}) == 1
    with el.at(model, vertex=0):
        exact(model(x), source(x))
    model.train()(x)
    plain = el.member(model, 0)
    assert classes(plain) == classes(source)
    for layer, layer_ in zip(plain.layers, source.layers, strict=True):
        assert layer.activation_relu_or_gelu == layer_.activation_relu_or_gelu


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: el.to_subspace(nn.ReLU(), n=3), "got ReLU"),
        (lambda: el.to_subspace(conv_net(), n=3, where=lambda m, n: False), "got Sequential"),
        (
            lambda: el.to_subspace(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), n=3),
            "1: its parameters are lazy",
        ),
        (
            lambda: el.to_subspace(nn.ModuleDict({"e": nn.Embedding(3, 2, sparse=True)}), n=3),
            "e: sparse gradients",
        ),
        (lambda: el.to_subspace(nn.LazyLinear(2), n=3), "the model: its parameters are lazy"),
        (lambda: el.to_subspace(torch.jit.trace(nn.Linear(2, 2), torch.ones(2)), n=3), "scripted"),
        (lambda: el.collapse(nn.Linear(2, 2)), "got Linear"),
        (lambda: el.member(nn.Linear(2, 2), 0), "got Linear"),
        (lambda: el.member(el.SubspaceLinear(2, 2, n=3), 3), r"0\.\.2, got 3"),
        (lambda: el.member(el.SubspaceLinear(2, 2, n=3), -4), r"0\.\.2, got -4"),
        (
            lambda: collapsed_at(el.SubspaceLinear(2, 2, n=3), el.sample_simplex(3, 4)),
            r"got alpha \[4, 3\]",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_errors_name_the_offending_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# modes, hooks, flags


def test_the_collapsed_network_is_at_the_midpoint_in_training_too():
    model = el.to_subspace(nn.Linear(3, 2), n=3, sigma=1.0)
    model(torch.ones(3))
    plain = el.collapse(model)
    assert plain.training
    close(plain.weight, model.weight.mean(0))


def test_hooks_stay_in_place_and_see_the_converted_module():
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    calls = []
    for kind in ("forward_pre", "forward", "full_backward"):
        register = getattr(source[0], f"register_{kind}_hook")
        register(lambda m, *_: calls.append(type(m)))
    model = el.to_subspace(source, n=3)
    model(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert calls == [el.SubspaceLinear] * 3
    calls.clear()
    el.collapse(model)(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert calls == [nn.Linear] * 3


def test_requires_grad_mode_dtype_and_buffers_carry_over():
    source = conv_net().to(torch.bfloat16)
    source[0].weight.requires_grad_(False)
    source[1].eval()
    source[1].running_mean.add_(1)
    model = el.to_subspace(source, n=3)
    for plain in (model, el.collapse(model)):
        for (k, p), q in zip(plain.named_parameters(), source.parameters(), strict=True):
            assert p.requires_grad == q.requires_grad == (k != "0.weight")
            assert p.dtype == torch.bfloat16
        assert [m.training for m in plain.modules()] == [m.training for m in source.modules()]
        exact(plain[1].running_mean, source[1].running_mean)
        assert plain[1].running_mean is not source[1].running_mean


def test_frozen_batch_norm_uses_the_networks_draw_and_its_own_statistics():
    source = scatter_(conv_net().double())
    model = el.to_subspace(source, n=3, sigma=0.5)
    model[1].eval(), source[1].eval()
    x = torch.randn(4, 3, 6, 6).double()
    mean = model[1].running_mean.clone()
    y = model(x)
    alpha = model[0].point.alpha
    close(y, explicit(source, dict(model.named_parameters()), alpha, x))
    assert not alpha.equal(torch.full((3,), 1 / 3).double())
    exact(model[1].running_mean, mean)


def test_batch_norm_statistics_belong_to_all_vertices():
    model = el.to_subspace(conv_net(), n=3)
    assert model[1].running_mean.shape == (4,)
    model(torch.randn(4, 3, 6, 6))
    assert model[1].num_batches_tracked == 1


def test_a_point_per_example_equals_the_loop_over_the_examples():
    source = scatter_(conv_net().double()).eval()
    model = el.to_subspace(source, n=3, sigma=0.5)
    assert_at(model, source, simplex(5, 3), torch.randn(5, 3, 6, 6).double())


@pytest.mark.parametrize("name", ["containers", "attention", "lstm", "encoder", "tied", "named"])
def test_a_point_per_example_where_it_can_not_be_is_an_error(name):
    source, x = make(name, mode=False)
    model = el.to_subspace(source, n=3)
    with (
        el.at(model, simplex(len(x), 3)),
        pytest.raises(ValueError, match=r"a point per example \(alpha \[\d, 3\]\) is for"),
    ):
        model(x)


def test_a_parametrization_is_applied_at_the_point():
    linear = nn.Linear(5, 5, dtype=torch.float64)
    model = el.to_subspace(nn.Sequential(parametrizations.orthogonal(linear)), n=3)
    weight = model[0].weight
    close(weight @ weight.T, torch.eye(5).double())


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_the_transformers_fast_path_is_at_the_point_too(norm_first, masked):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=norm_first)
    source = scatter_(nn.TransformerEncoder(layer, 2).double()).eval()
    model = el.to_subspace(source, n=3, sigma=0.5)
    x = torch.randn(2, 5, 4).double()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    for alpha in (simplex(3), torch.tensor([1.0, 0.0, 0.0]).double()):
        with torch.no_grad(), el.at(model, alpha):
            y = model(x, src_key_padding_mask=mask)
            z = el.collapse(model)(x, src_key_padding_mask=mask)
            plain = explicit(source, dict(model.named_parameters()), alpha, x, None, mask)
        assert not y.isnan().any()
        close(y, plain)
        close(z, plain)
    assert el.collapse(model).layers[0].activation_relu_or_gelu == 1


def test_a_converted_model_inside_another_draws_for_itself():
    inner = el.to_subspace(nn.Linear(3, 3), n=3)
    other = el.to_subspace(nn.Linear(3, 3), n=2)
    outer = nn.Sequential(inner, other)
    outer(torch.ones(3))
    assert inner.point.alpha.shape == (3,) and other.point.alpha.shape == (2,)
    first = inner.point.alpha
    outer(torch.ones(3))
    assert not inner.point.alpha.equal(first)


def test_functional_call_takes_stacked_parameters():
    model = el.to_subspace(scatter_(conv_net().double()), n=3).eval()
    other = {k: torch.randn_like(p) for k, p in model.named_parameters()}
    x = torch.randn(2, 3, 6, 6).double()
    y = torch.func.functional_call(model, other, (x,))
    model.load_state_dict(other, strict=False)
    exact(y, model(x))


def test_children_that_are_read_and_not_called_are_at_the_point():
    model = el.to_subspace(nn.Sequential(ReadsItsChild()), n=2, opaque=(ReadsItsChild,)).eval()
    x = torch.randn(5, 4)
    for i in range(2):
        with el.at(model, vertex=i):
            torch.testing.assert_close(model(x), el.member(model, i)(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer",
    [el.SubspaceLinear(4, 3, bias=False, n=2), el.SubspaceConv2d(4, 3, 1, bias=False, n=2)],
    ids=["linear", "conv"],
)
def test_a_layer_without_bias_collapses_to_a_whole_plain_layer(layer):
    plain = el.collapse(layer)
    assert dict(plain._parameters).keys() == {"weight", "bias"} and plain.bias is None
    assert isinstance(el.to_subspace(plain, n=2), type(layer))


def test_frozen_layers_are_the_same_at_all_vertices():
    source = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    source[0].requires_grad_(False)
    model = el.to_subspace(source, n=3, sigma=0.5)
    for state in (None, source.state_dict()):
        if state:
            model.load_state_dict(state)
        assert all(torch.equal(v, source[0].weight) for v in model[0].weight)
        assert not torch.equal(model[1].weight[1], source[1].weight)


@pytest.mark.parametrize("model", [nn.ReLU(), el.to_subspace(nn.Linear(2, 2), n=2)])
def test_nothing_to_convert_is_an_error(model):
    with pytest.raises(ValueError, match="to convert"):
        el.to_subspace(model, n=3)


def test_layers_of_several_n_have_no_members():
    model = nn.Sequential(el.SubspaceLinear(2, 2, n=2), el.SubspaceLinear(2, 2, n=3))
    for call in (lambda: el.members(model, torch.zeros(1, 2)), lambda: el.member(model, 0)):
        with pytest.raises(ValueError, match=r"n=\[2, 3\]"):
            call()
