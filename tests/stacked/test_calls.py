"""What a stacked ensemble takes and gives: shared or separate batches, nests, errors."""

import pytest
import torch
from nets import QUIET, each_strategy, images, make, vectors
from torch import nn

import ensemblayers as el

pytestmark = QUIET


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


@each_strategy
def test_a_call_without_arguments(strategy):
    with pytest.raises(TypeError, match=r"\[n, B, ...\], missing a required argument: 'input'"):
        el.StackedEnsemble(make("dense"), strategy=strategy)()


@each_strategy
def test_wrong_input_shows_the_models_error(strategy):
    ensemble = el.StackedEnsemble(make("dense"), strategy=strategy)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ensemble(torch.zeros(2, 5, dtype=torch.float64))
    assert ensemble._use_vmap() == (strategy == "vmap")  # One mistake doesn't slow it down.
    assert ensemble(vectors(2)).shape == (3, 2, 3)


def test_memory_formats_are_those_of_each_members():
    models = [nn.Conv2d(3, 4, 3) for _ in range(2)]
    ensemble = el.StackedEnsemble(models).to(memory_format=torch.channels_last)
    assert ensemble.module.weight[1].is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(ensemble(x), torch.stack([m(x) for m in models]))
