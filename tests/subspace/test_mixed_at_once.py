"""``share_point(model, at_once=True)``: all weights mixed in one call."""

import copy

import pytest
import torch
from torch import nn

import ensemblayers as el

close = torch.testing.assert_close


def conv_net():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.GroupNorm(2, 4)),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return el.to_subspace(net, n=3, sigma=0.5).double()


@pytest.fixture
def pair(monkeypatch):
    """A model that mixes its weights at once, its twin that does not, and the calls' sizes."""
    model = conv_net()
    twin = copy.deepcopy(model)
    calls = []
    mix_all = el.simplex.mix_all

    def counted(stacks, alpha):
        calls.append(len(stacks))
        return mix_all(stacks, alpha)

    monkeypatch.setattr(el.simplex, "mix_all", counted)
    el.share_point(model, at_once=True)
    return model, twin, calls


def same(model, twin, f):
    """Output and gradients of f at the same random point."""
    results = []
    for m in (model, twin):
        torch.manual_seed(1)
        y = f(m)
        results.append((y, torch.autograd.grad(y.pow(2).sum(), list(m.parameters()))))
    torch.testing.assert_close(*results)


def test_weights_mixed_at_once_give_the_same_in_one_call(pair):
    model, twin, calls = pair
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    same(model, twin, lambda m: m(x))
    assert calls == [7]  # Two convolutions, two norms; the linear layer mixes for itself.
    same(model, twin, lambda m: m.eval()(x))
    alpha = torch.tensor([0.2, 0.5, 0.3]).double().requires_grad_()
    for m in (model, twin):
        with el.at(m, alpha):
            m.learned = torch.autograd.grad(m.train()(x).sum(), alpha)
    torch.testing.assert_close(model.learned, twin.learned)
    each = el.sample_simplex(3, 4, dtype=torch.float64)
    for m in (model, twin):
        el.set_point(m, each)
    same(model, twin, lambda m: m(x))
    assert len(calls) == 3  # Not for a point per example.


def sgd(model):
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        sgd,
        lambda m: m.eval(),
        lambda m: el.set_point(m, vertex=1),
        lambda m: [p.data.mul_(2) for p in m.parameters()],
        lambda m: m.requires_grad_(False),
    ],
    ids=["step", "eval", "vertex", "data", "frozen"],
)
def test_weights_mixed_at_once_are_those_of_one_pass(pair, change):
    """A part that runs alone after the model mixes for itself, as it does in the twin."""
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    outputs = []
    for m in pair[:2]:
        torch.manual_seed(1)
        m(x).sum().backward()
        change(m)
        outputs.append(m[:2](x))
        assert outputs[-1].requires_grad == m[0].weight.requires_grad
        if outputs[-1].requires_grad:
            outputs[-1].sum().backward()
    close(*outputs)
    assert not pair[0][0].point.mixes


def test_weights_mixed_at_once_are_dropped_when_the_pass_fails(pair):
    model, _, _ = pair
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 3, 9, 9, dtype=torch.float64))
    assert not model[0].point.mixes


@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_mixed_at_once_under_checkpointing(pair, reentrant):
    """Right, or an error of torch's: a part that is computed again mixes for itself."""
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True)

    class Checkpointed(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            for block in self.net:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

    gradients = []
    for k, m in enumerate(pair[:2]):
        wrapped = Checkpointed(m)
        el.share_point(wrapped, at_once=k == 0)
        torch.manual_seed(1)
        y = wrapped(x)
        if not reentrant and k == 0:
            with pytest.raises(torch.utils.checkpoint.CheckpointError):
                y.sum().backward()
            return
        y.sum().backward()
        gradients.append([p.grad for p in m.parameters()])
    close(*gradients)


def test_weights_mixed_at_once_are_of_the_very_parameter():
    model = el.to_subspace(nn.Sequential(nn.Conv1d(1, 1, 1, bias=False)), n=2).eval()
    el.share_point(model, at_once=True)
    x = torch.ones(1, 1, 1)
    for _ in range(20):  # A new tensor may get the id of the last one.
        torch.func.functional_call(model, {"0.weight": torch.ones(2, 1, 1, 1)}, (x,))
        fives = {"weight": torch.full((2, 1, 1, 1), 5.0)}
        assert torch.func.functional_call(model[0], fives, (x,)).item() == 5


@pytest.mark.parametrize("training", [False, True])
def test_weights_mixed_at_once_compile(pair, training):
    torch._dynamo.reset()
    model, twin, _ = pair
    compiled = torch.compile(model.train(training), fullgraph=True, backend="aot_eager")
    twin.train(training)
    for alpha in el.sample_simplex(3, 3, dtype=torch.float64):
        x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
        for m in (model, twin):
            el.set_point(m, alpha)
        y, z = compiled(x), twin(x)
        close(y, z)
        ours, theirs = (
            torch.autograd.grad(out.sum(), list(m.parameters()))
            for out, m in ((y, model), (z, twin))
        )
        close(ours, theirs)
    assert not model[0].point.mixes
