"""What runs as batched products, and what must not."""

import pytest
import torch
from nets import QUIET, dense, make, vectors
from torch import nn
from torch.nn.utils import parametrizations

import ensemblayers as el

pytestmark = QUIET


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


def test_a_weight_that_is_no_parameter():
    nets = [nn.Linear(4, 3) for _ in range(3)]
    ensemble, x = el.StackedEnsemble(nets), torch.randn(5, 4)
    weight = 2 * ensemble.module.weight
    del ensemble.module.weight
    ensemble.module.weight = weight
    torch.testing.assert_close(
        ensemble(x), torch.stack([nn.functional.linear(x, 2 * n.weight, n.bias) for n in nets])
    )


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
    torch.testing.assert_close(y, torch.stack([net(x.clone()) for net in nets]))


def test_a_hook_on_all_modules_runs():
    calls = []
    ensemble = el.StackedEnsemble(make("dense"))
    with nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(type(m))):
        ensemble(vectors(2))
    assert calls.count(nn.Linear) == 6
