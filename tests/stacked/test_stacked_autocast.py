"""A stacked ensemble under autocast."""

import pytest
import torch
from nets import QUIET, SelfAttention
from torch import nn

import ensemblayers as el

pytestmark = QUIET


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_autocast_is_the_members(dtype, strategy):
    nets = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(3)]
    ensemble = el.StackedEnsemble(nets, strategy=strategy)
    x = torch.randn(5, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        if dtype == torch.float64:
            for model in (*nets, ensemble):
                with pytest.raises(RuntimeError):
                    model(x)
            return
        y, z = ensemble(x), torch.stack([net(x) for net in nets])
    assert y.dtype == z.dtype == torch.bfloat16
    torch.testing.assert_close(y, z)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ensemble.parameters())


class ByKeyword(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, weight=self.weight, bias=self.bias)


def grouped_conv(name, k):
    return lambda bias: getattr(nn, f"{name}{k}d")(4, 4, 2, groups=2, bias=bias), (5, 4, *(3,) * k)


class Losses(nn.Linear):
    """What autocast has in float32 off the layers of torch.nn."""

    def forward(self, x):
        return nn.functional.cross_entropy(super().forward(x), torch.zeros(len(x)).long())


class Written(nn.Linear):
    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Scaled(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return nn.functional.scaled_dot_product_attention(y, y, x)


def after(first, *layers):
    """Layers behind one whose output is of autocast's dtype."""
    make = {"linear": lambda: nn.Linear(4, 4), "conv": lambda: nn.Conv2d(4, 4, 2)}[first]
    shape = (5, 4) if first == "linear" else (5, 4, 3, 3)
    return lambda bias: nn.Sequential(make(), *(layer() for layer in layers)), shape


AUTOCAST = {
    "linear": (lambda bias: nn.Linear(4, 3, bias=bias), (5, 4)),
    "linear by keyword": (lambda bias: ByKeyword(4, 3, bias=bias), (5, 2, 4)),
    "attention": (lambda bias: SelfAttention(4, 2, bias=bias, batch_first=True), (5, 3, 4)),
    "scaled attention": (lambda bias: Scaled(4, 4, bias=bias), (5, 2, 3, 4)),
    "encoder": (
        lambda bias: nn.TransformerEncoderLayer(4, 2, 8, 0.0, bias=bias, batch_first=True),
        (5, 3, 4),
    ),
    "layer norm": (lambda bias: nn.LayerNorm(4), (5, 4)),
    "batch norm": (lambda bias: nn.BatchNorm1d(4), (5, 4)),
    "linear, layer norm": after("linear", lambda: nn.LayerNorm(4)),
    "linear, layer norm, linear": after("linear", lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 4)),
    "linear, RMS norm": after("linear", lambda: nn.RMSNorm(4)),
    "linear, batch norm": after("linear", lambda: nn.BatchNorm1d(4)),
    "conv, batch norm": after("conv", lambda: nn.BatchNorm2d(4), nn.ReLU),
    "conv, group norm": after("conv", lambda: nn.GroupNorm(2, 4)),
    "conv, instance norm": after("conv", lambda: nn.InstanceNorm2d(4, affine=True)),
    "conv, pools": after("conv", lambda: nn.MaxPool2d(2, 1), lambda: nn.AdaptiveAvgPool2d(1)),
    "softmax": after("linear", lambda: nn.Softmax(-1)),
    "log-softmax": after("linear", lambda: nn.LogSoftmax(-1)),
    "GELU": after("linear", nn.GELU),
    "Softplus": after("linear", nn.Softplus),
    "PReLU": after("linear", nn.PReLU),
    "embedding": (lambda bias: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3, bias)), None),
    **{
        f"{name}{k}d": grouped_conv(name, k)
        for k in (1, 2, 3)
        for name in ("Conv", "ConvTranspose")
    },
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", AUTOCAST)
def test_autocast_in_vmap_is_the_layers(layer, dtype, bias):
    make, shape = AUTOCAST[layer]
    nets = [make(bias) for _ in range(2)]
    x = torch.randint(9, (5,)) if shape is None else torch.randn(shape, dtype=dtype)
    ensemble = el.StackedEnsemble(nets, strategy="vmap")
    with torch.autocast("cpu", torch.bfloat16):
        y, z = ensemble(x, shared=True), torch.stack([net(x) for net in nets])
    assert not ensemble._why_loop and y.dtype == z.dtype
    # Mapped, the product is rounded before a bias is added.
    torch.testing.assert_close(y, z, rtol=2e-2, atol=4e-2)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ensemble.parameters())
    for name, b in ensemble.module.named_buffers():
        own = torch.stack([net.get_buffer(name) for net in nets])
        torch.testing.assert_close(b, own, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [Losses, Written])
def test_autocast_that_vmap_does_otherwise_is_a_loop(kind):
    nets, x = [kind(4, 4) for _ in range(2)], torch.randn(5, 4)
    ensemble = el.StackedEnsemble(nets, strategy="vmap")
    ensemble(x)
    assert not ensemble._why_loop
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="runs as a loop.*autocast gives.*where a member has"):
            y = ensemble(x)
        assert torch.equal(y, torch.stack([net(x) for net in nets]))
