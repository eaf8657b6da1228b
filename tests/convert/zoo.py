"""Networks of all kinds of modules that :func:`ensemblayers.to_subspace` converts."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from plain import scatter_
from torch import nn
from torch.nn.utils import parametrizations, prune

import ensemblayers as el

close = torch.testing.assert_close


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i):
        return self.head(self.body(self.embed(i)).relu())


class Reads(nn.Module):
    """Reads a child's weight without calling the child."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)

    def forward(self, i):
        return F.linear(self.embed(i), self.embed.weight)


class ReadsItsChild(nn.Module):
    """A module that reads a child's parameters past the child's forward."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.linear(x, self.proj.weight, self.proj.bias)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.again = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.list = [self.first]

    def forward(self, x):
        return self.list[0](self.norm(self.again(self.first(x)).tanh()))


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(3, 3), nn.ModuleList([nn.LayerNorm(3)])])
        self.dict = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Sequential(nn.Linear(3, 3))})
        self.scales = nn.ParameterList([torch.rand(3), torch.rand(3)])
        self.shifts = nn.ParameterDict({"x": torch.rand(3)})

    def forward(self, x):
        x = self.list[1][0](self.list[0](x)) * self.scales[0] + self.shifts["x"]
        for scale in self.scales:
            x = x * scale
        return self.dict["b"](self.dict["a"](x).relu())


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.sigma, self.alpha = 4, "sigma", [1.0]
        self.point = nn.Linear(3, 3)
        self.owner = self.shared = self.drawn = 1
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.point(x) * self.weight + self.n + len(self.sigma)


class Scaled(nn.Sequential):
    def __init__(self, *modules):
        super().__init__(*modules)
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return super().forward(x) * self.scale


class MyLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).sin()


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x):
        keys = x[..., : self.attention.kdim]
        return self.attention(x, keys, keys)[0]


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def pruned(module):
    prune.l1_unstructured(module, "weight", 0.5)
    return module


def monkeypatched():
    layer = nn.Linear(3, 3)
    layer.forward = halved.__get__(layer)
    return nn.Sequential(layer)


def halved(self, x):
    return F.linear(x, self.weight, self.bias) / 2


def encoder(**options):
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


ids = torch.tensor([[0, 2, 1], [6, 0, 3]])
ZOO = {
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "conv_net": (conv_net, (2, 3, 6, 6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, True)), (2, 3, 6)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4)), (2, 2, 3, 3, 3)),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), (2, 3)),
    "tied": (Tied, ids),
    "reads": (Reads, ids),
    "shared": (Shared, (4, 3)),
    "containers": (Containers, (4, 3)),
    "named": (Named, (4, 3)),
    "scaled_sequential": (lambda: Scaled(nn.Linear(3, 4), nn.Linear(4, 3)), (4, 3)),
    "subclass": (lambda: nn.Sequential(MyLinear(3, 3), nn.Linear(3, 2)), (4, 3)),
    "attention": (Attention, (2, 5, 4)),
    "attention_kdim": (lambda: Attention(kdim=3, vdim=3, add_bias_kv=True), (2, 5, 4)),
    "lstm": (lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), (2, 5, 3)),
    "gru": (lambda: nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4)), (2, 5, 3)),
    "encoder": (encoder, (2, 5, 4)),
    "encoder_norm_first": (lambda: encoder(norm_first=True, activation="gelu"), (2, 5, 4)),
    "old_weight_norm": (lambda: nn.Sequential(old_weight_norm(nn.Conv1d(3, 2, 2))), (2, 3, 4)),
    "old_weight_norm_root": (lambda: old_weight_norm(nn.Linear(3, 2)), (2, 3)),
    "pruned": (lambda: nn.Sequential(pruned(nn.Linear(3, 2))), (2, 3)),
    "instance_forward": (monkeypatched, (2, 3)),
    "weight_norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
        (2, 3),
    ),
    "spectral_norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(2, 3, 2))),
        (2, 2, 3, 3),
    ),
    "orthogonal": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3))), (2, 3)),
}
PARAMETRIZED = ("weight_norm", "spectral_norm", "orthogonal")
# torch pickles no parametrized modules, and Python no methods that were bound by hand.
NOT_PICKLED = (*PARAMETRIZED, "instance_forward")
zoo = pytest.mark.parametrize("name", ZOO)
modes = pytest.mark.parametrize("mode", [True, False])


def make(name, mode=True):
    """A network whose parameters are no special values, in double precision, with an input."""
    build, x = ZOO[name]
    model = build().double()
    if name not in PARAMETRIZED:
        scatter_(model)
    x = x if isinstance(x, torch.Tensor) else torch.randn(*x, dtype=torch.float64)
    return model.train(mode), x


def classes(model):
    return {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}


def exact(a, b):
    close(a, b, rtol=0, atol=0)


def subspaces(model):
    return [m for m in model.modules() if hasattr(m, "subspace_point")]


def collapsed_at(model, alpha):
    with el.at(model, alpha):
        return el.collapse(model)
