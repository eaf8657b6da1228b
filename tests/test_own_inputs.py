"""Members that change their input in place don't change that of the others."""

import pytest
import torch
from torch import nn

import ensemblayers as el


class Centred(nn.Module):
    """Takes its input's mean off it, in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x.sub_(x.mean() + 1))


class Sometimes(Centred):
    writes = False

    def forward(self, x):
        return super().forward(x) if Sometimes.writes else self.layer(x)


MODELS = {
    "normalised": lambda: Centred().double(),
    "activated": lambda: nn.Sequential(nn.LeakyReLU(0.5, inplace=True), nn.Linear(4, 2)).double(),
}
ENSEMBLES = {
    "auto": lambda net: el.to_stacked(net, n=3, reset=True),
    "loop": lambda net: el.StackedEnsemble(reset(net), strategy="loop"),
    "vmap": lambda net: el.StackedEnsemble(reset(net), strategy="vmap"),
    "subspace": lambda net: el.to_subspace(net, n=3, sigma=0.5),
    "batch ensemble": lambda net: el.to_batch_ensemble(net, n=3, init="normal"),
}
each_model = pytest.mark.parametrize("name", MODELS)


def reset(net):
    stacked = el.to_stacked(net, n=3, reset=True)
    return [stacked.member(i) for i in range(3)]


def alone(model, x):
    return torch.stack([el.member(model, i)(x.clone()) for i in range(3)])


@each_model
@pytest.mark.parametrize("kind", ENSEMBLES)
@pytest.mark.parametrize("inference", [False, True])
def test_every_member_sees_the_input(name, kind, inference):
    model = ENSEMBLES[kind](MODELS[name]()).eval()
    with torch.inference_mode(inference):
        for _ in range(3):
            x = torch.randn(5, 4, dtype=torch.float64)
            torch.testing.assert_close(el.members(model, x.clone()), alone(model, x))


@each_model
@pytest.mark.parametrize("kind", ["auto", "loop", "vmap"])
def test_in_training_with_gradients_and_batches_of_their_own(name, kind):
    model = ENSEMBLES[kind](MODELS[name]())
    for x in torch.randn(2, 5, 4, dtype=torch.float64):
        leaf, other = (x.clone().requires_grad_() for _ in range(2))
        y, z = model(leaf * 1, shared=True), alone(model, other)
        torch.testing.assert_close(y, z)
        got = torch.autograd.grad(y.pow(2).sum(), leaf)
        torch.testing.assert_close(got, torch.autograd.grad(z.pow(2).sum(), other))
    own = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = [el.member(model, i)(own[i].clone()) for i in range(3)]
    torch.testing.assert_close(model(own.clone(), shared=False), torch.stack(expected))


@pytest.mark.parametrize("kind", ["auto", "vmap"])
def test_compiled(kind):
    model, x = ENSEMBLES[kind](MODELS["normalised"]()), torch.randn(5, 4, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x.clone(), shared=True), alone(model, x))


def test_a_later_write_is_an_error(monkeypatch):
    model = el.to_stacked(Sometimes(), n=3)
    model(torch.randn(5, 4), shared=True)
    monkeypatch.setattr(Sometimes, "writes", True)
    with pytest.raises(RuntimeError, match="changed its input in place"):
        model(torch.randn(5, 4), shared=True)


def test_members_that_write_nothing_get_the_input_itself():
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append(x.data_ptr())
            return super().forward(x)

    model, x = el.to_stacked(Seen(4, 2), n=3), torch.randn(5, 4)
    for _ in range(2):
        model(x)
    assert seen[0] != x.data_ptr() and seen[1:] == [x.data_ptr()] * 5
