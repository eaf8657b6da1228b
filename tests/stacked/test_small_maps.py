"""Convolutions of small maps: the gradients of a stacked weight, straight to their place."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from errors import rms_error
from torch import nn

import ensemblayers as el
from ensemblayers import _gradients, _small_maps
from ensemblayers.ops import native

N, BOUND = 3, 2e-6

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler")


@pytest.fixture
def given(monkeypatch):
    """The weights whose gradients were asked for a place."""
    weights, place_of = [], _small_maps.place_of

    def note(weight):
        weights.append(weight.shape)
        return place_of(weight)

    monkeypatch.setattr(_small_maps, "place_of", note)
    return weights


@pytest.fixture
def ensemble():
    return el.to_stacked(nn.Sequential(nn.Conv2d(128, 256, 3, padding=1), nn.Tanh()), n=N)


def assert_members(ensemble, x, derivatives=torch.autograd.grad):
    """Outputs and derivatives are those of each member alone, in double precision.

    x: ``[n, B, ...]``.
    """
    y = ensemble(x, shared=False)
    g = torch.randn_like(y)
    inputs = [x] if x.requires_grad else []
    found = derivatives(y, [*inputs, *ensemble.parameters()], g)
    for i in range(N):
        own, x_ = ensemble.member(i).double(), x[i].detach().double().requires_grad_()
        y_ = own(x_)
        assert rms_error(y[i], y_) < BOUND
        expected = derivatives(y_, [*([x_] if inputs else []), *own.parameters()], g[i].double())
        for d, e in zip(found, expected, strict=True):
            assert rms_error(d[i], e) < BOUND


CONVS = {
    "3x3": dict(kernel_size=3, padding=1),
    "3x3 with bias": dict(kernel_size=3, padding=1, bias=True),
    "stride": dict(kernel_size=3, padding=1, stride=2),
    "dilation": dict(kernel_size=3, padding=2, dilation=2),
    "all differ": dict(kernel_size=(3, 2), padding=(2, 1), stride=(2, 1), dilation=(1, 2)),
    "1x1": dict(kernel_size=1),
}


@pytest.mark.parametrize("of_x", [False, True], ids=["first", "inner"])
@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS)
def test_output_and_gradients(given, options, of_x):
    channels = 512 if options["kernel_size"] == 1 else 128
    net = nn.Conv2d(channels, 256, **{"bias": False, **options})
    ensemble = el.to_stacked(net, n=N)
    ensemble.reset_parameters()
    assert_members(ensemble, torch.randn(N, 4, channels, 3, 3, requires_grad=of_x))
    assert given == [net.weight.shape] * N


@pytest.mark.parametrize("batch,inner,outer", [(1, 101, 300), (29, 101, 301), (33, 96, 299)])
def test_any_numbers_of_channels_and_of_places(given, batch, inner, outer):
    ensemble = el.to_stacked(nn.Conv2d(inner, outer, 3, padding=1), n=N)
    assert_members(ensemble, torch.randn(N, batch, inner, 3, 3, requires_grad=True))
    assert len(given) == N


def test_strided_inputs_and_incoming_gradients(given, ensemble):
    x = torch.randn(N, 4, 128, 2, 2, requires_grad=True)
    flipped = el.StackedEnsemble([Flipped(ensemble.member(i)) for i in range(N)])
    assert_members(flipped, x)
    assert len(given) == N


@pytest.mark.parametrize("batch,rows", [(64, N), (65, 0), (0, 0)])
def test_with_more_places_than_outputs_it_is_torchs(given, batch, rows):
    net = nn.Conv2d(128, 256, 3, padding=1)
    x = torch.randn(batch, 128, 2, 2, requires_grad=True)
    ensemble = el.to_stacked(net, n=N)
    ensemble(x, shared=True).sum().backward()
    assert len(given) == rows and x.grad.shape == x.shape


class Flipped(nn.Module):
    """Passes views on, in memory of another order."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.mT).mT.contiguous().mT.sum(1)


class Scaled(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return 2 * super()._conv_forward(x, weight, bias)


def frozen():
    net = nn.Conv2d(128, 256, 3)
    net.weight.requires_grad_(False)
    return net


OTHERS = {
    "double": lambda: nn.Conv2d(128, 256, 3).double(),
    "bfloat16": lambda: nn.Conv2d(128, 256, 3).bfloat16(),
    "channels_last": lambda: nn.Conv2d(128, 256, 3).to(memory_format=torch.channels_last),
    "groups": lambda: nn.Conv2d(128, 512, 3, groups=2),
    "padding_mode": lambda: nn.Conv2d(128, 256, 3, padding=1, padding_mode="circular"),
    "padding by name": lambda: nn.Conv2d(128, 256, 3, padding="same"),
    "subclass": lambda: Scaled(128, 256, 3),
    "frozen": frozen,
    "small": lambda: nn.Conv2d(32, 64, 3),
}


@pytest.mark.parametrize("build", OTHERS.values(), ids=OTHERS)
def test_what_it_does_not_take(given, build):
    net = build()
    ensemble = el.to_stacked(net, n=N)
    x = torch.randn(2, net.in_channels, 3, 3, dtype=net.weight.dtype, requires_grad=True)
    bound = 2e-2 if x.dtype == torch.bfloat16 else BOUND
    y = ensemble(x, shared=True)
    y.sum().backward()
    for i in range(N):
        own, x_ = ensemble.member(i), x.detach().clone().requires_grad_()
        y_ = own(x_)
        y_.sum().backward()
        assert rms_error(y[i], y_) < bound
        for p, q in zip(ensemble.parameters(), own.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or rms_error(p.grad[i], q.grad) < bound
    assert not given


def test_without_a_compiler_it_is_torchs(given, ensemble, monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    assert_members(ensemble, torch.randn(N, 4, 128, 2, 2))
    assert not given


def test_autocast_and_an_example_alone_are_torchs(given):
    net = nn.Conv2d(128, 256, 3, padding=1)
    ensemble = el.to_stacked(net, n=N)
    with torch.autocast("cpu", torch.bfloat16):
        y = ensemble(torch.randn(2, 128, 2, 2), shared=True)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert_members(ensemble, torch.randn(N, 128, 2, 2))  # [C, H, W]
    with torch.no_grad():
        assert not ensemble(torch.randn(2, 128, 2, 2)).requires_grad
    assert not given


class Twice(nn.Module):
    def __init__(self, with_norm):
        super().__init__()
        self.with_norm = with_norm
        self.conv = nn.Conv2d(256, 256, 3, padding=1)

    def forward(self, x):
        y = self.conv(torch.tanh(self.conv(x)))
        return y + self.conv.weight.square().mean() if self.with_norm else y


@pytest.mark.parametrize("with_norm", [False, True])
def test_a_weight_used_several_times(given, with_norm):
    ensemble = el.to_stacked(Twice(with_norm), n=N)
    ensemble.reset_parameters()
    for _ in range(2):  # The second time with memory that is kept.
        assert_members(ensemble, torch.randn(N, 4, 256, 2, 2, requires_grad=True))
    assert len(given) == 2 * 2 * N


def second_derivatives(y, inputs, g):
    first = torch.autograd.grad(y, inputs, g, create_graph=True)
    return torch.autograd.grad(sum(d.square().sum() for d in first), inputs)


def test_second_derivatives(ensemble):
    x = torch.randn(N, 2, 128, 2, 2, requires_grad=True)
    assert_members(ensemble, x, second_derivatives)


def test_a_batch_of_gradients(given, ensemble):
    x = torch.randn(2, 128, 2, 2, requires_grad=True)
    inputs, y = [x, *ensemble.parameters()], ensemble(x, shared=True)
    many = torch.randn(2, *y.shape)
    batched = torch.autograd.grad(y, inputs, many, is_grads_batched=True, retain_graph=True)
    assert not given
    for k, g in enumerate(many):
        one = torch.autograd.grad(y, inputs, g, retain_graph=True)
        assert all(rms_error(b[k], d) < BOUND for b, d in zip(batched, one, strict=True))
    assert len(given) == 2 * N


def test_a_graph_that_is_gone_through_again(given, ensemble):
    """Of x alone at first, and by two threads at last: each gradient is its own pass's."""
    x = torch.randn(4, 128, 2, 2, requires_grad=True)
    weight, y = ensemble.module[0].weight, ensemble(x, shared=True)
    g = torch.randn_like(y)

    def gradient(scale):
        return torch.autograd.grad(y, weight, g * scale, retain_graph=True)[0]

    torch.autograd.grad(y, x, g, retain_graph=True)
    assert not given
    first = gradient(1.0)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(gradient, [2.0, 4.0] * 4))
    for k, d in enumerate(found):
        assert rms_error(d, (2.0, 4.0)[k % 2] * first) < BOUND
    assert rms_error(first, gradient(1.0)) < BOUND


def test_gradients_lie_in_memory_that_is_kept(given, ensemble):
    weight, places = ensemble.module[0].weight, set()
    for _ in range(3):
        ensemble.zero_grad()
        ensemble(torch.randn(4, 128, 2, 2)).sum().backward()
        places.add(weight.grad.data_ptr())
    assert places == {_gradients._kept[id(weight)][1].data_ptr()} and len(given) == 3 * N


def test_the_layers_are_left_as_they_were(ensemble):
    conv = ensemble.module[0]
    before = set(vars(conv))
    ensemble(torch.randn(4, 128, 2, 2))
    with pytest.raises(RuntimeError):
        ensemble(torch.randn(4, 100, 2, 2))
    assert set(vars(conv)) == before


CHANGES = {
    "dtype": lambda p: p.data.double(),
    "half": lambda p: p.data.half(),
    "strides": lambda p: p.data.transpose(-1, -2).contiguous().transpose(-1, -2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_with_other_data_before_the_backward_pass(ensemble, change):
    x = torch.randn(4, 128, 2, 2)
    weight = ensemble.module[0].weight
    loss = ensemble(x, shared=True).square().sum()
    (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
    expected = expected.clone()
    weight.data = change(weight)
    loss.backward()
    assert rms_error(weight.grad, expected) < (1e-3 if weight.dtype == torch.half else BOUND)


HOOKS = {
    "transposed": lambda g: g.transpose(2, 3),
    "a row for all": lambda g: g[:1].expand_as(g),
    "another row for all": lambda g: g[1:2].expand_as(g),
    "its own": lambda g: g,
    "scaled": lambda g: g.mul_(2),
}


class Hooked(nn.Module):
    def __init__(self, hook):
        super().__init__()
        self.conv, self.hook = nn.Conv2d(128, 256, 3, padding=1), hook

    def forward(self, x):
        self.conv.weight.register_hook(self.hook)
        return self.conv(x)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_on_a_members_weight(given, hook):
    ensemble = el.to_stacked(Hooked(hook), n=N)
    assert_members(ensemble, torch.randn(N, 4, 128, 2, 2))
    assert len(given) == N


def test_a_gradient_in_a_hook_of_the_same_graphs_backward_pass(ensemble):
    y = ensemble(torch.randn(4, 128, 2, 2), shared=True)
    weight, inner = ensemble.module[0].weight, []
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, weight, g, retain_graph=True)
    y = y.clone()
    rows = [node for node, _ in y.grad_fn.next_functions[0][0].next_functions]
    expected = expected.clone()

    def hook(grads, _):
        if not inner:
            inner.append(None)
            inner[0] = torch.autograd.grad(y, weight, 3 * g, retain_graph=True)[0]

    rows[0].register_hook(hook)  # After the other members' gradients.
    (outer,) = torch.autograd.grad(y, weight, g, retain_graph=True)
    assert rms_error(outer, expected) < BOUND and rms_error(inner[0], 3 * expected) < BOUND


@pytest.mark.parametrize("option", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [1, (1,)])
def test_options_that_are_assigned(option, value):
    ensemble = el.to_stacked(nn.Conv2d(128, 256, 3, padding=1), n=N)
    setattr(ensemble.module, option, value)
    assert_members(ensemble, torch.randn(N, 4, 128, 3, 3))


class OwnWeight(nn.Module):
    """Has its convolution's weight under another name, as code does that computes weights."""

    def __init__(self, remove):
        super().__init__()
        self.conv = nn.Conv2d(128, 256, 3, padding=1)
        self.kernel, self.remove = nn.Parameter(self.conv.weight.detach()), remove
        self.conv.weight = None
        if remove:
            del self.conv.weight

    def forward(self, x):
        if self.remove:
            self.conv.weight = 2 * self.kernel
            y = self.conv(x)
            del self.conv.weight
            return y
        return self.conv._conv_forward(x, 2 * self.kernel, self.conv.bias)


@pytest.mark.parametrize("remove", [False, True])
def test_convolutions_without_a_weight(remove):
    assert_members(el.to_stacked(OwnWeight(remove), n=N), torch.randn(N, 4, 128, 2, 2))


def test_other_code_for_all_convolutions_holds(given, monkeypatch, ensemble):
    plain = nn.Conv2d._conv_forward
    x = torch.randn(4, 128, 2, 2)
    expected = ensemble.module[1](2 * torch.atanh(ensemble(x, shared=True)))
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda *args: 2 * plain(*args))
    given.clear()
    y = ensemble(x, shared=True)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    y.sum().backward()
    assert not given


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(128, 256, 3, padding=1)

    def forward(self, x):
        conv = self.conv
        return conv._conv_forward(input=x, weight=conv.weight, bias=conv.bias)


def test_arguments_by_keyword(given):
    assert_members(el.to_stacked(ByKeyword(), n=N), torch.randn(N, 4, 128, 2, 2))
    assert len(given) == N


def test_a_backward_pass_with_tangents(given, ensemble):
    y, forward_ad = ensemble(torch.randn(4, 128, 2, 2), shared=True), torch.autograd.forward_ad
    g, t = torch.randn(2, *y.shape)
    weight = ensemble.module[0].weight
    (expected,) = torch.autograd.grad(y, weight, t, retain_graph=True)
    given.clear()
    with forward_ad.dual_level():
        (d,) = torch.autograd.grad(y, weight, forward_ad.make_dual(g, t))
        assert rms_error(forward_ad.unpack_dual(d).tangent, expected) < BOUND
    assert not given
