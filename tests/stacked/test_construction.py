"""Making a stacked ensemble: of which networks, their copies, new starts, and errors."""

import copy

import pytest
import torch
from nets import (
    QUIET,
    Branch,
    Counter,
    Noisy,
    Tied,
    assert_members,
    batchnorm,
    dense,
    make,
    vectors,
)
from torch import nn

import ensemblayers as el

pytestmark = QUIET


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


def test_repr():
    assert "n=3, strategy='auto'" in repr(el.StackedEnsemble(make("dense")))
