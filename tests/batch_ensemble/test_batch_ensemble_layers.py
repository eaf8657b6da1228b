"""Outputs, gradients and training steps: those of the explicit weights."""

import pytest
import torch
from distinct import of_rank
from fast_weights import CONVS, LINEARS, assert_explicit, conv_pair, explicit, leaves, linear_pair
from torch.func import functional_call

import ensemblayers as el


@pytest.mark.parametrize("shape", [(6, 5), (3, 2, 5), (6, 2, 3, 5), (0, 5)])
@pytest.mark.parametrize("options", LINEARS)
def test_linear(options, shape):
    layer, make = linear_pair(options, n=3, init="normal")
    assert_explicit(layer, make, torch.randn(shape, dtype=torch.float64))
    assert vars(el.member(layer, 0)).keys() == vars(make()).keys()


@pytest.mark.parametrize("options", CONVS, ids=str)
@pytest.mark.parametrize("space", [1, 2, 3])
def test_conv(space, options):
    layer, make = conv_pair(space, options, n=2, init="normal")
    assert_explicit(layer, make, torch.randn(4, 4, *(7, 6, 5)[:space], dtype=torch.float64))
    plain, alone = make(), el.member(layer, 1)
    assert type(alone) is type(plain) and vars(alone).keys() == vars(plain).keys()
    assert layer.weight.shape == plain.weight.shape
    assert layer.r.shape == (2, 4) and layer.s.shape == (2, plain.out_channels)


@pytest.mark.parametrize("space, name", [(2, "channels_last"), (3, "channels_last_3d")])
def test_conv_channels_last(space, name):
    form = getattr(torch, name)
    layer, make = conv_pair(space, {"padding": 1}, n=2, init="normal")
    layer = layer.to(memory_format=form)
    x = torch.randn(4, 4, *(5,) * space, dtype=torch.float64).to(memory_format=form)
    assert_explicit(layer, make, x)
    plain = make().to(memory_format=form)
    assert layer(x).stride() == plain(x).stride()


@pytest.mark.parametrize("rows", ["sum", "expand", "slice", "transpose"])
def test_gradients_of_any_stride(rows):
    layer, make = linear_pair({}, n=2, init="normal")
    own, x = leaves(layer), torch.randn(10, 6, dtype=torch.float64).T[:, :5].repeat(2, 1)[:6]
    loss = {
        "sum": lambda y: y.sum(),
        "expand": lambda y: (y[:1].expand(7, -1) ** 2).sum(),
        "slice": lambda y: (y[::2, 1:] ** 2).sum(),
        "transpose": lambda y: (torch.cat([y.T, y.T]) ** 3).sum(),
    }[rows]
    loss(layer(x)).backward()
    loss(explicit(make, own, x)).backward()
    for k, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, own[k].grad)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("pair", [lambda: linear_pair({}, 3), lambda: conv_pair(1, {}, 3)])
def test_steps(pair, optimizer):
    layer, make = pair()
    own = leaves(layer)
    ours, theirs = (
        optimizer(layer.parameters()),
        optimizer([own[k] for k in dict(layer.named_parameters())]),
    )
    shape = (6, 5) if isinstance(layer, el.BatchEnsembleLinear) else (6, 4, 5)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64)
        for opt, y in ((ours, layer(x)), (theirs, explicit(make, own, x))):
            opt.zero_grad()
            (y**2).mean().backward()
            opt.step()
    for k, p in layer.named_parameters():
        torch.testing.assert_close(p, own[k])


def test_gradcheck():
    layer, _ = linear_pair({}, n=2, init="normal")
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    names, params = zip(*layer.named_parameters(), strict=True)

    def call(x, *params):
        return functional_call(layer, dict(zip(names, params, strict=True)), x)

    assert torch.autograd.gradcheck(call, (x, *params))
    assert torch.autograd.gradgradcheck(call, (x, *params))


def explicit_pairs(make, own, x):
    """As ``explicit``, for several pairs: the sum over them, the bias once."""
    bias = own.pop("bias", None)
    ranks = zip(own["r"].unbind(1), own["s"].unbind(1), strict=True)
    y = 0
    for r, s in ranks:
        zero = {} if bias is None else {"bias": torch.zeros_like(bias)}
        y = y + explicit(make, {**own, "r": r, "s": s, **zero}, x)
    if bias is None:
        return y
    return y + bias.repeat_interleave(len(x) // len(bias), 0).view(
        len(x), -1, *(1,) * (y.dim() - 2)
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_several_pairs(kind, bias):
    if kind == "linear":
        layer, make = linear_pair({"bias": bias}, n=3, rank=2)
        x = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    else:
        layer, make = conv_pair(2, {"bias": bias, "groups": 2}, n=3, rank=3)
        x = torch.randn(6, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    of_rank(layer)
    names = [k for k, _ in layer.named_parameters()]
    own = leaves(layer)
    y, z = layer(x), explicit_pairs(make, dict(own), x)
    torch.testing.assert_close(y, z)
    g = torch.randn_like(z)
    torch.testing.assert_close(
        torch.autograd.grad(y, [x, *layer.parameters()], g),
        torch.autograd.grad(z, [x, *(own[k] for k in names)], g),
    )
    plain = make()
    for i, rows in enumerate(x.chunk(3)):
        member = el.member(layer, i)
        assert vars(member).keys() == vars(plain).keys()
        torch.testing.assert_close(member(rows), y.chunk(3)[i])
