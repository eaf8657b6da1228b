import pytest
import torch
from torch import nn

import ensemblayers as el


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.group = nn.GroupNorm(2, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.LayerNorm([5, 4])
        self.act = nn.PReLU(4)
        self.tied = self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


WITH_DECAY = {
    "conv.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "tied.weight",
    "frozen.weight",
}
KINDS = {
    "plain": lambda net: net,
    "subspace": lambda net: el.to_subspace(net, n=3),
    "batch ensemble": lambda net: el.to_batch_ensemble(net, n=3),
    "stacked": lambda net: el.to_stacked(net, n=3),
    "stacked in a module": lambda net: nn.ModuleDict({"inner": el.to_stacked(net, n=3)}),
    "partial": lambda net: el.to_subspace(net, n=3, where=lambda m, name: "conv" in name),
}


@pytest.mark.filterwarnings("ignore:shared by all members")
@pytest.mark.parametrize("kind", KINDS)
def test_partition(kind):
    model = KINDS[kind](Net())
    decay, spared = el.param_groups(model, 0.1)
    assert decay["weight_decay"] == 0.1 and spared["weight_decay"] == 0
    shared_out = [id(p) for group in (decay, spared) for p in group["params"]]
    assert sorted(shared_out) == sorted(id(p) for p in model.parameters())
    names = {
        id(p): k.removeprefix("inner.").removeprefix("module.") for k, p in model.named_parameters()
    }
    assert {names[id(p)] for p in decay["params"]} == WITH_DECAY
    assert spared["params"]


@pytest.mark.parametrize(
    "layer",
    [
        lambda: el.BatchEnsembleLinear(4, 3, n=2),
        lambda: el.BatchEnsembleConv3d(4, 3, 1, n=2),
        lambda: el.BatchEnsembleConv1d(4, 3, 1, n=2, bias=False),
        lambda: el.to_batch_ensemble(nn.Linear(4, 3), n=2).module,
    ],
)
def test_fast_weights_have_no_decay(layer):
    layer = layer()
    decay, spared = el.param_groups(layer, 1e-4)
    assert [id(p) for p in decay["params"]] == [id(layer.weight)]
    assert {id(layer.r), id(layer.s)} <= {id(p) for p in spared["params"]}


def test_norm_tied_to_a_matrix_counts_once():
    model = nn.ModuleList([nn.LayerNorm((3, 3)), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    decay, spared = el.param_groups(model, 0.1)
    assert decay["params"] == [] and len(spared["params"]) == 3


@pytest.mark.parametrize("kind", ["subspace", "stacked"])
def test_step(kind):
    """Weight decay reaches one group only."""
    model = KINDS[kind](nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    opt = torch.optim.SGD(el.param_groups(model, 0.5), lr=1.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    for k, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[k] * (0.5 if k.endswith("0.weight") else 1))


def test_fast_weights_with_a_learning_rate_of_their_own():
    model = el.to_batch_ensemble(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), n=2)
    decay, spared, fast = el.param_groups(model, 0.1, lr=0.2, fast_lr_multiplier=5)
    layer, norm = model.module
    assert [id(p) for p in fast["params"]] == [id(layer.r), id(layer.s)]
    assert (decay["lr"], spared["lr"], fast["lr"]) == (0.2, 0.2, 1.0)
    assert fast["weight_decay"] == spared["weight_decay"] == 0
    assert [id(p) for p in decay["params"]] == [id(layer.weight)]
    assert {id(p) for p in spared["params"]} == {id(p) for p in (layer.bias, *norm.parameters())}
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    opt = torch.optim.SGD([decay, spared, fast], lr=99.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    for p, rate in ((layer.r, 1.0), (layer.bias, 0.2)):
        name = next(k for k, q in model.named_parameters() if q is p)
        torch.testing.assert_close(before[name] - p, torch.full_like(p, rate))


def test_a_learning_rate_without_a_multiplier():
    model = el.BatchEnsembleLinear(3, 4, n=2)
    groups = el.param_groups(model, 0.1, lr=0.2)
    assert [g["lr"] for g in groups] == [0.2, 0.2]
    assert all("lr" not in g for g in el.param_groups(model, 0.1))
    with pytest.raises(ValueError, match="lr with fast_lr_multiplier=2"):
        el.param_groups(model, 0.1, fast_lr_multiplier=2)
