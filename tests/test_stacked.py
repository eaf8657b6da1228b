import copy
import io
import pickle
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ensemblayers as el

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:strategy='vmap' runs as a loop"),
]
STRATEGIES = ["auto", "loop", "vmap"]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def dense():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def conv():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3)
    ).double()


def images(*batch):
    return torch.randn(*batch, 3, 5, 5, dtype=torch.float64)


def vectors(*batch):
    return torch.randn(*batch, 4, dtype=torch.float64)


def batchnorm(**options):
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, **options), nn.ReLU(), nn.Linear(6, 3)
    ).double()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.cell(x[:, None].expand(-1, 3, -1))[0][:, -1])


class Branch(nn.Module):
    """The branch depends on the member's own weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if self.layer.bias.sum() > 0 else y - 1


class PlainTensor(nn.Module):
    """A tensor that is neither a parameter nor a buffer, another one in each member."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = torch.randn(3, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x) * self.scale


class InPlace(nn.Module):
    """A plain tensor that is equal in all members and updated in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.total = torch.zeros(1, dtype=torch.float64)

    def forward(self, x):
        y = self.layer(x)
        self.total.add_(y.detach().mean())
        return y * self.total


class AssignedBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        y = self.layer(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Counter(nn.Module):
    """Python state that changes in the forward pass: a number, a list, a dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.steps, self.seen, self.table = 0, [], {}

    def forward(self, x):
        self.steps += 1
        self.seen.append(self.steps)
        self.table["last"] = self.steps
        return self.layer(x) * (self.steps + len(self.seen) + self.table["last"])


class Hidden(nn.Module):
    """A hidden state that appears in the first forward pass, and in some members only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.state = None

    def forward(self, x):
        y = self.layer(x)
        if self.state is not None:
            y = y + self.state
        if self.layer.bias[0] > 0:
            self.state = y.detach().mean(0)
        return y


class LateBuffer(nn.Module):
    """A buffer that the first forward pass makes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("start", None)

    def forward(self, x):
        y = self.layer(x)
        if self.start is None:
            self.start = y.detach().mean(0)
        return y - self.start


def parametrized():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()).double()


def scalars(p, eps, slope):
    net = nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6, eps=eps), nn.LeakyReLU(slope), nn.Dropout(p)
    )
    return net.double()


# Each entry: the members, and a batch for each call.
NETS = {
    "dense": (lambda i: dense(), vectors),
    "conv": (lambda i: conv(), images),
    "batchnorm": (lambda i: batchnorm(), vectors),
    "momentum None": (lambda i: batchnorm(momentum=None), vectors),
    "no statistics": (lambda i: batchnorm(track_running_stats=False), vectors),
    "LSTM": (lambda i: Recurrent().double(), vectors),
    "branch": (lambda i: Branch().double(), vectors),
    "plain tensor": (lambda i: PlainTensor().double(), vectors),
    "tensor in place": (lambda i: InPlace().double(), vectors),
    "assigned buffer": (lambda i: AssignedBuffer().double(), vectors),
    "counter": (lambda i: Counter().double(), vectors),
    "hidden": (lambda i: Hidden().double(), vectors),
    "late buffer": (lambda i: LateBuffer().double(), vectors),
    "parametrized": (lambda i: parametrized(), vectors),
    "scalars": (lambda i: scalars(float(i == 1), (1e-5, 0.1, 3)[i], i / 10), vectors),
    "momenta": (lambda i: batchnorm(momentum=(0.1, 0.5, None)[i]), vectors),
}


def make(name, n=3):
    return [NETS[name][0](i) for i in range(n)]


def assert_members(ensemble, nets):
    """Parameters and buffers, momentum and counts included, are those of the networks."""
    state = ensemble.state_dict()
    for i, net in enumerate(nets):
        own = {k: v for k, v in net.state_dict().items() if k != "start"}
        assert list(state) == list(own)
        for name, value in own.items():
            torch.testing.assert_close(state[name][i], value)


@each_strategy
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ],
    ids=["SGD", "AdamW"],
)
def test_training_is_that_of_separate_networks(name, strategy, shared, optimizer):
    nets, batch = make(name), NETS[name][1]
    ensemble = el.StackedEnsemble(nets, strategy=strategy)
    assert all(p.is_leaf for p in ensemble.parameters())
    x = batch(5)
    # First in evaluation, where vmap can do more.
    torch.testing.assert_close(
        ensemble.eval()(x, shared=True), torch.stack([net.eval()(x) for net in nets])
    )
    for net in (ensemble, *nets):
        net.train()
    ours, theirs = optimizer(ensemble.parameters()), [optimizer(net.parameters()) for net in nets]
    for _ in range(3):
        x = batch(5) if shared else batch(3, 5)
        outputs = ensemble(x, shared=shared)
        expected = [net(x if shared else x[i]) for i, net in enumerate(nets)]
        torch.testing.assert_close(outputs, torch.stack(expected))
        for opt in (ours, *theirs):
            opt.zero_grad()
        (outputs**2).mean((1, 2)).sum().backward()
        for y in expected:
            (y**2).mean().backward()
        grads = [[p.grad for p in net.parameters()] for net in nets]
        for p, own in zip(ensemble.parameters(), zip(*grads, strict=True), strict=True):
            torch.testing.assert_close(p.grad, torch.stack(own))
        for opt in (ours, *theirs):
            opt.step()
    assert_members(ensemble, nets)
    # Attributes like the hidden state count as a member's own, too.
    alone = [ensemble.member(i).eval() for i in range(3)]
    for own, net in zip(alone, nets, strict=True):
        x = batch(4)
        torch.testing.assert_close(own(x), net.eval()(x))


def nested():
    inner = nn.Sequential(nn.Linear(6, 5, bias=False), nn.GELU(), nn.Identity())
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), inner, nn.Linear(5, 3)).double()


def flattened():
    return nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(75, 6), nn.Linear(6, 3)).double()


# What runs as batched products: the members, the shape of an example.
BATCHED = {
    "linear": (lambda: nn.Linear(4, 3).double(), (4,)),
    "dense": (dense, (4,)),
    "nested": (nested, (4,)),
    "rows": (nested, (2, 3, 4)),
    "flattened": (flattened, (3, 5, 5)),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("batch", [5, 1, 0])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_layers(name, batch, shared, monkeypatch):
    make, shape = BATCHED[name]
    nets = [make() for _ in range(3)]
    ensemble = el.StackedEnsemble(nets)
    monkeypatch.setattr(el.StackedEnsemble, "_loop", None)
    lead = (batch,) if shared else (3, batch)
    x = torch.randn(*lead, *shape, dtype=torch.float64).requires_grad_()
    y = ensemble(x, shared=shared)
    z = torch.stack([net(x if shared else x[i]) for i, net in enumerate(nets)])
    torch.testing.assert_close(y, z)
    # A gradient of other strides than the output's.
    g = torch.randn_like(z.transpose(0, -1)).transpose(0, -1)
    got = torch.autograd.grad(y, [x, *ensemble.parameters()], g, retain_graph=True)
    own = [p for net in nets for p in net.parameters()]
    dx, *wanted = torch.autograd.grad(z, [x, *own], g)
    count = len(got) - 1
    torch.testing.assert_close(got[0], dx)
    for k, d in enumerate(got[1:]):
        torch.testing.assert_close(d, torch.stack(wanted[k::count]))
    for total in (y.sum(), y[1:, ::2].pow(2).sum()):
        total.backward(retain_graph=True)


def test_batched_dropout_is_each_members_own():
    nets = [nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4, bias=False)) for _ in range(3)]
    for net in nets:
        nn.init.eye_(net[1].weight)
    a, b, c = el.StackedEnsemble(nets)(torch.ones(99, 4))
    assert not torch.equal(a, b) and not torch.equal(b, c)
    for own in (a, b, c):
        assert set(own.unique().tolist()) == {0, 2} and 120 < own.count_nonzero() < 280


class Loud(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 100


class Penultimate(nn.Sequential):
    def forward(self, x):
        return self[0](x)


def doubled(net):
    net[0].forward = lambda x: 2 * nn.functional.linear(x, net[0].weight, net[0].bias)
    return net


def hooked(net):
    net[1].register_forward_hook(lambda m, args, y: y + 1)
    return net


UNBATCHED = {
    "subclass": lambda: nn.Sequential(Loud(4, 3), nn.ReLU()),
    "sequential": lambda: Penultimate(nn.Linear(4, 3), nn.ReLU()),
    "own forward": lambda: doubled(nn.Sequential(nn.Linear(4, 3), nn.ReLU())),
    "hook": lambda: hooked(nn.Sequential(nn.Linear(4, 3), nn.ReLU())),
    "in place": lambda: nn.Sequential(nn.LeakyReLU(0.5, inplace=True), nn.Linear(4, 3)),
    "softmax": lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(0)),
    "softmax of one": lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)),
    "norm": lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)),
    "part of a flattening": lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))),
}


@pytest.mark.parametrize("name", UNBATCHED)
def test_other_layers_are_not_batched(name):
    nets = [UNBATCHED[name]() for _ in range(3)]
    x = torch.randn(5, 4)
    y = el.StackedEnsemble(nets)(x.clone())
    shared = x.clone()  # What a member does to it in place, the next one sees.
    torch.testing.assert_close(y, torch.stack([net(shared) for net in nets]))


def test_a_hook_on_all_modules_runs():
    calls = []
    ensemble = el.StackedEnsemble(make("dense"))
    with nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(type(m))):
        ensemble(vectors(2))
    assert calls.count(nn.Linear) == 6


@each_strategy
def test_transforms_and_forward_mode(strategy):
    nets = make("dense")
    ensemble = el.StackedEnsemble(nets, strategy=strategy)
    x, t = vectors(5), vectors(5)
    params = {k: p.detach() for k, p in ensemble.named_parameters()}

    def loss(params):
        return torch.func.functional_call(ensemble, params, (x,)).pow(2).sum()

    grads = torch.func.grad(loss)(params)
    (ensemble(x) ** 2).sum().backward()
    torch.testing.assert_close(grads, {k: p.grad for k, p in ensemble.named_parameters()})
    expected = torch.stack([torch.func.jvp(net, (x,), (t,))[1] for net in nets])
    torch.testing.assert_close(torch.func.jvp(ensemble, (x,), (t,))[1], expected)
    with torch.autograd.forward_ad.dual_level():
        y = ensemble(torch.autograd.forward_ad.make_dual(x, t))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, expected)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_fake_tensors_and_counters_see_the_operations(strategy):
    ensemble = el.StackedEnsemble([nn.Linear(512, 300) for _ in range(3)], strategy=strategy)
    x = torch.randn(7, 512)
    with FlopCounterMode(display=False) as counter:
        ensemble(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * 7 * 512 * 300
    with FakeTensorMode():
        ensemble = el.StackedEnsemble([nn.Linear(512, 300) for _ in range(3)], strategy=strategy)
        y = ensemble(torch.empty(7, 512))
        y.sum().backward()
    assert y.shape == (3, 7, 300) and ensemble.module.weight.grad.shape == (3, 300, 512)


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


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, value=x)[0]


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


@each_strategy
def test_vmap_is_what_runs(strategy, monkeypatch):
    """The tests of strategies compare two ways indeed."""
    calls = []
    ensemble = el.StackedEnsemble(make("conv"), strategy=strategy)
    original = el.StackedEnsemble._loop
    monkeypatch.setattr(
        el.StackedEnsemble, "_loop", lambda *args: calls.append(1) or original(*args)
    )
    ensemble(images(4))
    assert len(calls) == (strategy != "vmap")


@pytest.mark.parametrize(
    "name, reason",
    [
        ("LSTM", "LSTM, a recurrent layer"),
        ("branch", "data-dependent control flow"),
        ("plain tensor", "attributes that differ"),
        ("assigned buffer", "buffer was assigned"),
        ("counter", "attribute was assigned"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_vmap_that_is_a_loop_says_why_once(name, reason):
    ensemble, x = el.StackedEnsemble(make(name), strategy="vmap"), vectors(4)
    with pytest.warns(UserWarning, match=f"(?s)strategy='vmap' runs as a loop.*{reason}") as seen:
        ensemble(x)
    assert len(seen) == 1 and seen[0].filename == __file__
    ensemble(x)
    for strategy in ("auto", "loop"):
        el.StackedEnsemble(make(name), strategy=strategy)(x)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_dropout_differs_per_member(strategy):
    nets = [nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)) for _ in range(3)]
    for net in nets:
        nn.init.zeros_(net[0].weight)
        nn.init.ones_(net[0].bias)
    ensemble = el.StackedEnsemble(nets, strategy=strategy)
    a, b, c = ensemble(torch.zeros(200, 1)).squeeze(-1)
    assert ensemble._use_vmap() == (strategy == "vmap")
    assert not torch.equal(a, b) and not torch.equal(b, c)
    for own in (a, b, c):
        assert set(own.tolist()) == {0, 2} and 60 < own.count_nonzero() < 140
    assert torch.equal(ensemble.eval()(torch.zeros(5, 1)), torch.ones(3, 5, 1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@each_strategy
def test_tied_weights(strategy):
    nets = [Tied().double() for _ in range(2)]
    ensemble = el.StackedEnsemble(nets, strategy=strategy)
    assert ensemble.module.head.weight is ensemble.module.embed.weight
    assert len(list(ensemble.parameters())) == 2
    x = torch.tensor([0, 3, 3])
    ensemble(x).pow(2).sum().backward()
    for net in nets:
        net(x).pow(2).sum().backward()
    torch.testing.assert_close(
        ensemble.module.embed.weight.grad, torch.stack([net.embed.weight.grad for net in nets])
    )
    own = ensemble.member(1)
    assert own.head.weight is own.embed.weight


def untied():
    net = Tied()
    net.head = nn.Linear(4, 5)
    return net


UNLIKE = {
    "at least one model": list,
    "list of models, got one Sequential": dense,
    "got str at 1": lambda: [dense(), "model"],
    "class.*1.*Tanh.*ReLU": lambda: [
        dense(),
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double(),
    ],
    r"shape.*weight.*\(4, 4\).*\(4, 3\)|shape.*in 1": lambda: [
        nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
        nn.Sequential(nn.ReLU(), nn.Linear(3, 4)),
    ],
    "shape.*bias.*None": lambda: [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)],
    "training mode.*True.*False": lambda: [dense(), dense().eval()],
    "requires_grad.*True.*False": lambda: [
        dense(),
        nn.Sequential(*dense()[:2], dense()[2].requires_grad_(False)),
    ],
    "dtype.*float64.*float32": lambda: [dense(), dense().float()],
    "device.*cpu.*meta": lambda: [dense(), dense().to("meta")],
    "ties|head.weight": lambda: [Tied(), untied()],
    "lazy weight in model 0": lambda: [nn.LazyLinear(2)],
    "lazy running_mean in model 0": lambda: [nn.LazyBatchNorm1d(affine=False)],
    "got one int": lambda: 3,
    "got type at 0": lambda: [nn.Linear],
}


@pytest.mark.parametrize("match", UNLIKE)
def test_models_unlike(match):
    with pytest.raises(ValueError, match=match):
        el.StackedEnsemble(UNLIKE[match]())


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: el.StackedEnsemble([dense()], strategy="map"), "'map'"),
        (lambda: el.to_stacked(dense(), n=0), "n=0"),
        (
            lambda: el.StackedEnsemble(make("dense"))(vectors(4, 2), shared=False),
            r"n=3.*\[4, 2, 4\]",
        ),
        (lambda: el.member(el.StackedEnsemble(make("dense")), 3), "got 3"),
        (lambda: el.member(el.StackedEnsemble(make("dense")), 1.0), r"0\.\.2, got 1\.0"),
        (lambda: el.member(el.StackedEnsemble(make("dense")), "1"), r"0\.\.2, got '1'"),
        (lambda: el.StackedEnsemble(make("dense"))(torch.tensor(1.0)), r"\[n, B, ...\], got.*\[\]"),
        (
            lambda: el.StackedEnsemble([dense().to("meta")] * 2)(vectors(2)),
            "on cpu, got them on meta.*to_empty",
        ),
        (lambda: el.to_stacked(Tensor3(), n=2, reset=True), "Tensor3"),
        (lambda: el.StackedEnsemble([Opaque(), Opaque()])(vectors(2)), "Normal"),
        (lambda: el.StackedEnsemble([Floats(), Floats()])(vectors(2)), "float values that differ"),
    ],
)
def test_errors(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@each_strategy
def test_a_call_without_arguments(strategy):
    with pytest.raises(TypeError, match=r"\[n, B, ...\], missing a required argument: 'input'"):
        el.StackedEnsemble(make("dense"), strategy=strategy)()


class Tensor3(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.zeros(3))


class Opaque(nn.Module):
    def forward(self, x):
        return torch.distributions.Normal(x, 1.0)


class Floats(Branch):
    def forward(self, x):
        return x, self.layer.weight.sum().item()


@each_strategy
def test_wrong_input_shows_the_models_error(strategy):
    ensemble = el.StackedEnsemble(make("dense"), strategy=strategy)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ensemble(torch.zeros(2, 5, dtype=torch.float64))
    assert ensemble._use_vmap() == (strategy == "vmap")  # One mistake doesn't slow it down.
    assert ensemble(vectors(2)).shape == (3, 2, 3)


WEIGHTS = {
    "linear": (lambda: nn.Linear(256, 256), ["weight"], 256),
    "conv": (lambda: nn.Conv2d(32, 128, 3), ["weight"], 288),
    "nested": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(256, 512)), ["1.weight"], 256),
    "LSTM": (lambda: nn.LSTM(128, 128), ["weight_ih_l0", "weight_hh_l0"], 128),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("meta", [True, False])
def test_reset(name, meta):
    kind, weights, fan_in = WEIGHTS[name]
    with torch.device("meta" if meta else "cpu"):
        ensemble = el.StackedEnsemble([kind() for _ in range(4)])
    if meta:
        ensemble = ensemble.to_empty(device="cpu")
    with torch.no_grad():
        for p in ensemble.parameters():
            p.fill_(7)
    ensemble.reset_parameters()
    for weight in weights:
        stacked = ensemble.state_dict()[weight]
        for i in range(4):
            assert stacked[i].std().item() == pytest.approx((3 * fan_in) ** -0.5, rel=0.01)
            assert stacked[i].abs().max() <= fan_in**-0.5
        assert not torch.equal(stacked[0], stacked[1])


def test_reset_norms_and_some_members():
    ensemble = el.StackedEnsemble(make("batchnorm"))
    ensemble(vectors(8))
    before = copy.deepcopy(ensemble.state_dict())
    ensemble.reset_parameters([1])
    now = ensemble.state_dict()
    assert all(
        torch.equal(v[0], before[k][0]) and torch.equal(v[2], before[k][2]) for k, v in now.items()
    )
    assert now["1.num_batches_tracked"].tolist() == [1, 0, 1]
    assert (now["1.running_mean"][1] == 0).all() and (now["1.weight"] == 1).all()
    assert not torch.equal(now["0.weight"][1], before["0.weight"][1])


def test_reset_of_attention_is_that_of_its_construction():
    ensemble = el.to_stacked(nn.MultiheadAttention(8, 2), n=2)
    with torch.no_grad():
        for p in ensemble.parameters():
            p.fill_(7)
    ensemble.reset_parameters()
    assert (ensemble.module.out_proj.bias == 0).all()
    assert ensemble.module.in_proj_weight.std() < 1


def test_to_stacked():
    source = batchnorm()
    before = copy.deepcopy(source.state_dict())
    same, fresh = el.to_stacked(source, n=3), el.to_stacked(source, n=3, reset=True)
    assert_members(same, [source] * 3)
    weight = fresh.state_dict()["0.weight"]
    assert torch.equal(weight[0], source[0].weight)
    assert not torch.equal(weight[1], weight[0]) and not torch.equal(weight[1], weight[2])
    same(vectors(6)).sum().backward()
    torch.testing.assert_close(source.state_dict(), before)


class Noisy(Branch):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("reentrant", [True, False])
@each_strategy
@pytest.mark.parametrize("kind", [dense, conv, Noisy, Recurrent])
def test_checkpointing(kind, strategy, reentrant):
    nets = [kind().double() for _ in range(3)]
    x = (images if kind is conv else vectors)(5)

    def gradients(run):
        torch.manual_seed(0)
        ensemble, own = el.StackedEnsemble(nets, strategy=strategy), x.clone().requires_grad_()
        for _ in range(2):
            (run(ensemble, own) ** 2).sum().backward()
        return [own.grad, *(p.grad for p in ensemble.parameters())]

    plain = gradients(lambda f, x: f(x))
    again = gradients(lambda f, x: checkpoint(f, x, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, again))


@each_strategy
def test_frozen_parameters(strategy):
    nets = make("dense")
    for net in nets:
        net[0].requires_grad_(False)
    ensemble = el.StackedEnsemble(nets, strategy=strategy)
    assert [p.requires_grad for p in ensemble.parameters()] == [False, False, True, True]
    before = ensemble.module[0].weight.clone()
    ensemble(vectors(5)).sum().backward()
    torch.optim.SGD(ensemble.parameters(), lr=1.0).step()
    assert ensemble.module[0].weight.grad is None
    assert torch.equal(ensemble.module[0].weight, before)
    assert not ensemble.member(0)[0].weight.requires_grad


def test_state_dict_and_plain_state_dict():
    nets, source = make("batchnorm"), batchnorm()
    ensemble = el.StackedEnsemble(nets)
    assert_members(ensemble, nets)
    source(vectors(9))
    state = source.state_dict()
    for assign in (False, True):
        ensemble = el.StackedEnsemble(nets)
        ensemble.load_state_dict(state, strict=True, assign=assign)
        assert_members(ensemble, [source] * 3)
        opt = torch.optim.SGD(ensemble.parameters(), lr=0.1)
        ensemble(vectors(3, 5), shared=False).pow(2).sum().backward()
        opt.step()
        assert not torch.equal(ensemble.module[0].weight[0], ensemble.module[0].weight[1])
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        el.StackedEnsemble(nets).load_state_dict(
            {k: v for k, v in state.items() if k != "0.weight"}
        )


def by_state_dict(ensemble):
    file = io.BytesIO()
    torch.save(ensemble.state_dict(), file)
    other = el.StackedEnsemble([ensemble.member(0) for _ in range(ensemble.n)])
    other.reset_parameters()
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())), strict=True)
    return other


def by_save(ensemble):
    file = io.BytesIO()
    torch.save(ensemble, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


ROUND_TRIPS = {
    "state_dict": by_state_dict,
    "torch.save": by_save,
    "deepcopy": copy.deepcopy,
    "pickle": lambda ensemble: pickle.loads(pickle.dumps(ensemble)),
    "AveragedModel": lambda ensemble: AveragedModel(ensemble).module,
}


@pytest.mark.parametrize("name", ["batchnorm", "LSTM", "plain tensor", "counter", "hidden"])
@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_round_trips(name, trip):
    if trip == "state_dict" and name in ("plain tensor", "counter", "hidden"):
        return  # Their state is no part of a state_dict.
    ensemble = el.StackedEnsemble(make(name))
    ensemble(vectors(5)).sum().backward()
    other = ROUND_TRIPS[trip](ensemble.eval()).eval()
    x = vectors(5)
    torch.testing.assert_close(other(x), ensemble(x))
    assert not {id(p) for p in other.parameters()} & {id(p) for p in ensemble.parameters()}
    torch.optim.SGD(other.parameters(), lr=1.0).zero_grad()
    other.train()(x).sum().backward()
    assert all(p.grad is not None for p in other.parameters())


def test_members_are_neither_changed_nor_kept():
    nets = make("batchnorm")
    before = [copy.deepcopy(net.state_dict()) for net in nets]
    ensemble = el.StackedEnsemble(nets)
    x = vectors(6)
    ensemble(x).sum().backward()
    torch.optim.SGD(ensemble.parameters(), lr=1.0).step()
    for net, old in zip(nets, before, strict=True):
        torch.testing.assert_close(net.state_dict(), old)
        assert all(p.grad is None for p in net.parameters())
    assert len(list(ensemble.parameters())) == len(list(nets[0].parameters()))
    own = ensemble.member(0)
    y = ensemble.eval()(x)
    with torch.no_grad():
        for p in own.parameters():
            p.zero_()
    torch.testing.assert_close(ensemble(x), y)
    assert type(own) is nn.Sequential and own.training


@pytest.mark.parametrize("name", ["batchnorm", "momenta", "scalars", "LSTM"])
def test_modes_and_dtype_propagate(name):
    ensemble = el.StackedEnsemble(make(name)).eval()
    assert not any(m.training for m in ensemble.modules())
    x = vectors(5)
    assert torch.equal(ensemble(x), ensemble(x))
    ensemble.train().float()
    assert all(m.training for m in ensemble.modules())
    assert ensemble(x.float()).dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in ensemble.member(0).parameters())
    assert all(p.is_meta for p in ensemble.to("meta").parameters())


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, *, add, flag):
        y = self.layer(x["rows"]) + add
        return {"y": y, "pair": (y.mean(), [y * 2]), "none": None, "flag": flag}


@each_strategy
def test_nested_arguments_and_outputs(strategy):
    nets = [Many().double() for _ in range(3)]
    ensemble, x, add = el.StackedEnsemble(nets, strategy=strategy), vectors(5), torch.ones(5, 3)
    out = ensemble({"rows": x}, add=add, flag="on")
    expected = [net({"rows": x}, add=add, flag="on") for net in nets]
    torch.testing.assert_close(out["y"], torch.stack([e["y"] for e in expected]))
    torch.testing.assert_close(out["pair"][0], torch.stack([e["pair"][0] for e in expected]))
    torch.testing.assert_close(out["pair"][1][0], 2 * out["y"])
    assert out["none"] is None and out["flag"] == "on"
    own = ensemble({"rows": vectors(3, 5)}, add=torch.ones(3, 5, 3), flag="on", shared=False)
    assert own["y"].shape == (3, 5, 3)


@each_strategy
def test_no_parameters(strategy):
    x = vectors(2)
    y = el.StackedEnsemble([nn.ReLU(), nn.ReLU()], strategy=strategy)(x)
    assert torch.equal(y, torch.stack([x.relu()] * 2))


class Coin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        self.flips = (*getattr(self, "flips", ()), random.random())
        return self.layer(x) + torch.randn(3)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_noise_differs_per_member(strategy):
    ensemble = el.to_stacked(Coin(), n=3)
    ensemble.strategy = strategy
    a, b, c = ensemble(torch.zeros(2, 4))
    assert not torch.equal(a, b) and not torch.equal(b, c)
    assert len({ensemble.member(i).flips for i in range(3)}) == 3


def test_hooks_run_once_a_member():
    calls = []
    source = dense()
    source[0].register_forward_hook(lambda *args: calls.append(1))
    el.to_stacked(source, n=3)(vectors(2))
    assert len(calls) == 3


def test_func_and_double_backward():
    nets = make("dense")
    ensemble = el.StackedEnsemble(nets)
    x = vectors(3).requires_grad_()
    (g,) = torch.autograd.grad(ensemble(x).sin().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(sum(net(x).sin().sum() for net in nets), x, create_graph=True)
    torch.testing.assert_close(
        torch.autograd.grad(g.pow(2).sum(), x), torch.autograd.grad(h.pow(2).sum(), x)
    )


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_compile(strategy):
    ensemble = el.StackedEnsemble(make("dense"), strategy=strategy)
    compiled, x = torch.compile(ensemble, backend="aot_eager"), vectors(5)
    torch.testing.assert_close(compiled(x), ensemble(x))


def test_repr():
    assert "n=3, strategy='auto'" in repr(el.StackedEnsemble(make("dense")))


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.PReLU())
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_a_module_under_two_names_is_one(strategy):
    models = [Twice().double() for _ in range(2)]
    ensemble = el.StackedEnsemble(models, strategy=strategy)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (ensemble, *models)]
    for _ in range(3):
        x = torch.randn(5, 3).double()
        outputs = [m(x) for m in models]
        torch.testing.assert_close(ensemble(x), torch.stack(outputs))
        sum(o.square().sum() for o in [*outputs, ensemble(x)]).backward()
        for m in models:
            m(x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p in ensemble.module.named_parameters():
        assert isinstance(p, nn.Parameter)
        torch.testing.assert_close(p, torch.stack([m.get_parameter(name) for m in models]))
    for name, b in ensemble.module.named_buffers():
        torch.testing.assert_close(b, torch.stack([m.get_buffer(name) for m in models]))


def test_memory_formats_are_those_of_each_members():
    models = [nn.Conv2d(3, 4, 3) for _ in range(2)]
    ensemble = el.StackedEnsemble(models).to(memory_format=torch.channels_last)
    assert ensemble.module.weight[1].is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(ensemble(x), torch.stack([m(x) for m in models]))


@pytest.mark.parametrize("name, batch", [("conv", images), ("dense", vectors)])
@each_strategy
@pytest.mark.filterwarnings("error")
def test_shared_or_not(name, batch, strategy):
    nets = [net.eval() for net in make(name)]
    ensemble = el.StackedEnsemble(nets, strategy=strategy)
    shared, ambiguous, own = batch(4), batch(3), batch(3, 4)
    for x, options in (
        (shared, {}),
        (shared, {"shared": True}),
        (ambiguous, {}),
        (ambiguous, {"shared": True}),
        (batch(1), {}),
    ):
        torch.testing.assert_close(ensemble(x, **options), torch.stack([net(x) for net in nets]))
    expected = torch.stack([net(x) for net, x in zip(nets, own, strict=True)])
    torch.testing.assert_close(ensemble(own, shared=False), expected)
    if name == "conv":
        torch.testing.assert_close(ensemble(own), expected)
    else:
        with pytest.raises(UserWarning, match=r"\[3, 4, 4\].*n=3.*shared=True or shared=False"):
            ensemble(own)


def test_ambiguous_batch_of_one_a_member():
    """Rows of [n, features] are a shared batch; shared=False makes them one row a member."""
    nets = make("dense")
    ensemble, x = el.StackedEnsemble(nets), vectors(3)
    torch.testing.assert_close(ensemble(x)[1], nets[1](x))
    torch.testing.assert_close(ensemble(x, shared=False)[1], nets[1](x[1]))


def test_construction_runs_no_hook_and_draws_nothing():
    net, calls = nn.Sequential(Noisy(), nn.Sequential(Counter())), []
    for m in net.modules():
        m.register_forward_hook(lambda *args: calls.append(args))
        m.register_forward_pre_hook(lambda *args: calls.append(args))
    before, state = torch.get_rng_state(), copy.deepcopy(net.state_dict())
    ensemble = el.StackedEnsemble([net])
    assert not calls and torch.equal(torch.get_rng_state(), before)
    assert net[1][0].steps == ensemble.module[1][0].steps == 0
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("wrap", [el.to_stacked, el.to_batch_ensemble])
def test_versions_in_a_state_dict_reach_the_modules(wrap):
    ensemble = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), n=2)
    seen = []
    norm = ensemble.module[1]
    norm.register_load_state_dict_pre_hook(lambda m, sd, prefix, meta, *rest: seen.append(meta))
    ensemble.load_state_dict(ensemble.state_dict())
    assert seen == [{"version": 2}]
    with pytest.raises(RuntimeError, match=r'"0\.weight"'):
        ensemble.load_state_dict({})


WRAPPED = {
    "sequential": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    "linear": lambda: nn.Linear(4, 3),
}


@pytest.mark.parametrize("wrap", [el.to_stacked, el.to_batch_ensemble])
@pytest.mark.parametrize("kind", WRAPPED)
def test_functional_call_takes_names_and_refuses_keys(wrap, kind):
    one, other = (wrap(WRAPPED[kind](), n=2).eval() for _ in range(2))
    x, state = torch.randn(6, 4), other.state_dict()
    tensors = dict(other.named_parameters()) | dict(other.named_buffers())
    assert torch.equal(torch.func.functional_call(one, tensors, x), other(x))
    assert not torch.equal(one(x), other(x))
    with pytest.raises(AttributeError) as error:
        torch.func.functional_call(one, state, x)
    cause = error.value.__cause__ or error.value
    first = next(iter(state)).partition(".")[0]
    assert f"expected module.{first}, got {first}" in str(cause)
    assert "dict(model.named_parameters()) | dict(model.named_buffers())" in str(cause)
    # torch.distributed.checkpoint pairs names with keys, which in the module are the same.
    assert list(get_model_state_dict(one.module)) == list(state)
    set_model_state_dict(one.module, get_model_state_dict(other.module))
    assert torch.equal(one(x), other(x))
    assert not hasattr(one, "nothing") and not hasattr(one, first)


class Clamped(nn.Module):
    """Gives its weight's ``data`` another tensor at each call."""

    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x):
        self.layer.weight.data = self.layer.weight.data.clamp(-0.01, 0.01)
        return self.layer(x)


@each_strategy
@pytest.mark.parametrize("size", [4, 512])  # The larger one's gradients go to memory that is kept.
def test_data_that_a_member_assigns_is_its_parameters(size, strategy):
    models = [Clamped(size) for _ in range(3)]
    ensemble = el.StackedEnsemble(models, strategy=strategy)
    x = torch.randn(2, size)
    for _ in range(2):
        with torch.no_grad():
            ensemble.module.layer.weight += 0.1
            for model in models:
                model.layer.weight += 0.1
        outputs = ensemble(x)
        torch.testing.assert_close(outputs, torch.stack([model(x) for model in models]))
        weights = torch.stack([model.layer.weight for model in models])
        torch.testing.assert_close(ensemble.module.layer.weight, weights)
    grads = torch.autograd.grad(outputs.square().sum(), ensemble.module.layer.weight)[0]
    for model, got in zip(models, grads, strict=True):
        want = torch.autograd.grad(model(x).square().sum(), model.layer.weight)[0]
        torch.testing.assert_close(got, want)


@each_strategy
@pytest.mark.parametrize("rows", [50, 5000])
def test_sparse_gradients_are_the_members(rows, strategy):
    models = [nn.Sequential(nn.Embedding(rows, 64, sparse=True)) for _ in range(3)]
    ensemble = el.StackedEnsemble(models, strategy=strategy)
    x = torch.randint(rows, (6,))
    ensemble(x)[[0, 2]].square().sum().backward()  # None for member 1.
    got = ensemble.module[0].weight.grad
    assert got.layout == torch.sparse_coo
    for i, model in enumerate(models):
        weight = model[0].weight
        want = torch.autograd.grad(model(x).square().sum(), weight)[0].to_dense()
        torch.testing.assert_close(got.to_dense()[i], want if i != 1 else torch.zeros_like(want))


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_threads_may_call_one_ensemble(strategy):
    models = [conv() for _ in range(3)]
    ensemble = copy.deepcopy(el.StackedEnsemble(models, strategy=strategy).eval())
    inputs = [images(2) for _ in range(40)]
    with torch.no_grad():
        wanted = [torch.stack([model.eval()(x) for model in models]) for x in inputs]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(4) as pool:
                outputs = list(pool.map(torch.no_grad()(ensemble), inputs))
        finally:
            sys.setswitchinterval(interval)
    torch.testing.assert_close(outputs, wanted)
    assert all(p.shape[0] == 3 for p in ensemble.parameters())
