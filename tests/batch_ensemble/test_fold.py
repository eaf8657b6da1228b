import copy

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import ensemblayers as el


def trained(net, shape, **options):
    model = el.to_batch_ensemble(net.double(), n=3, init="normal", **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    for _ in range(2):
        model(torch.randn(12, *shape, dtype=torch.float64))
    return model.eval(), torch.randn(4, *shape, dtype=torch.float64)


class Branches(nn.Module):
    """Norms that follow a layer, and norms that can't be folded into one."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.both, self.of_both = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.twice, self.of_twice = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.bare = nn.BatchNorm2d(4, affine=False)
        self.last = nn.Conv2d(4, 5, 1)
        self.batch = nn.BatchNorm2d(5, track_running_stats=False)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        y = self.both(x)
        x = self.of_both(y) + y
        x = self.of_twice(self.twice(self.of_twice(self.twice(x))))
        return self.batch(self.last(self.bare(x)))


def linear():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))


@pytest.mark.parametrize("norms", ["shared", "member"])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    "build, shape, left",
    [
        (lambda: resnet18(num_classes=3), (3, 32, 32), set()),
        (linear, (3,), set()),
        (Branches, (3, 5, 5), {"of_both", "of_twice", "bare", "batch"}),
    ],
    ids=["resnet18", "linear", "branches"],
)
def test_the_folded_model_is_the_same(build, shape, left, rank, norms):
    model, x = trained(build(), shape, rank=rank, norms=norms)
    before = copy.deepcopy(model.state_dict())
    folded = el.fold_norms(model)
    torch.testing.assert_close(folded(x), model(x))
    norm = nn.modules.batchnorm._BatchNorm
    assert {name for name, m in folded.module.named_modules() if isinstance(m, norm)} == left
    torch.testing.assert_close(model.state_dict(), before)
    members = torch.tensor([2, 0, 1, 1])
    if norms == "shared" and build is not Branches:
        torch.testing.assert_close(folded(x, members=members), model(x, members=members))
    alone = el.member(folded, 1)
    if build is not Branches:
        torch.testing.assert_close(alone(x), el.member(model, 1)(x))


def test_a_single_member_of_ones_own_layers():
    net = nn.Sequential(el.BatchEnsembleLinear(3, 4, n=2, bias=False), nn.BatchNorm1d(4))
    net(torch.randn(8, 3))
    folded = el.fold_norms(net.eval())
    x = torch.randn(6, 3)
    torch.testing.assert_close(folded(x), net(x))
    assert isinstance(folded[1], nn.Identity) and folded[0].bias.shape == (2, 4)


def test_training_is_refused():
    model, _ = trained(linear(), (3,))
    with pytest.raises(ValueError, match="evaluation"):
        el.fold_norms(model.train())


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = el.BatchEnsembleLinear(4, 3, n=2)

    def forward(self, x):
        return self.layer(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    "model, match",
    [
        (nn.Linear(4, 3), "BatchEnsemble layers of one n, got none"),
        (el.to_stacked(nn.Linear(4, 3), n=2), "BatchEnsemble layers of one n, got none"),
        (el.BatchEnsemble(Undecided()), "torch.fx can trace, got Undecided: .*control flow"),
    ],
)
def test_models_that_cannot_be_folded_are_refused(model, match):
    with pytest.raises(ValueError, match=match):
        el.fold_norms(model.eval())


def test_a_norm_over_another_dimension_than_the_layers_is_refused():
    """BatchNorm1d takes the channels of [rows, C, L] from C, a linear layer puts its own in L."""
    model = el.to_batch_ensemble(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), n=2).eval()
    folded = el.fold_norms(model)
    x = torch.randn(3, 6)
    torch.testing.assert_close(el.fold_norms(folded)(x), model(x))
    with pytest.raises(ValueError, match=r"\[rows, channels\] alone, got \[6, 5, 5\]"):
        folded(torch.randn(3, 5, 6))


@pytest.mark.parametrize("which", [0, 1])
def test_a_layer_or_norm_with_hooks_stays(which):
    net = el.to_batch_ensemble(nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)), n=2).eval()
    net.module[which].register_forward_hook(lambda module, args, out: 2 * out)
    x = torch.randn(2, 3, 5)
    folded = el.fold_norms(net)
    assert isinstance(folded.module[1], nn.BatchNorm1d)
    torch.testing.assert_close(folded(x), net(x))


class Optional(nn.Module):
    """The norm follows the layer only where an optional argument is given, or only where not."""

    def __init__(self, given):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.given = given

    def forward(self, x, cond=None):
        y = self.layer(x)
        if (cond is not None) != self.given:
            y = y.relu()
        return self.norm(y)


class Flag(nn.Module):
    """torch.fx can't trace a branch on a flag that it does not know."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x, features=False):
        y = self.norm(self.layer(x))
        return y if features else y.relu()


@pytest.mark.parametrize("build", [lambda: Optional(True), lambda: Optional(False), Flag])
def test_optional_arguments(build):
    model, x = trained(build(), (3, 5, 5))
    folded = el.fold_norms(model)
    for options in ({}, {"features": True} if build is Flag else {"cond": 1}):
        torch.testing.assert_close(folded(x, **options), model(x, **options))
    assert isinstance(folded.module.norm, nn.Identity) == (build is Flag)


@pytest.mark.parametrize(
    "norm, shape", [(nn.BatchNorm1d(5), (5, 3)), (nn.BatchNorm2d(5), (5, 2, 3))]
)
def test_a_norm_of_other_channels_than_the_layers_outputs_stays(norm, shape):
    model, x = trained(nn.Sequential(nn.Linear(3, 4), norm), shape)
    folded = el.fold_norms(model)
    assert type(folded.module[1]) is type(model.module[1])
    torch.testing.assert_close(folded(x), model(x))
