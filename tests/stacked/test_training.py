"""Outputs, gradients and training steps of a stacked ensemble: those of separate networks."""

import random

import pytest
import torch
from nets import (
    NETS,
    QUIET,
    Noisy,
    Recurrent,
    SelfAttention,
    Tied,
    assert_members,
    conv,
    dense,
    each_strategy,
    images,
    make,
    vectors,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import ensemblayers as el

pytestmark = QUIET


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


ATTENTION = {
    "attention": lambda: SelfAttention(8, 2, batch_first=True),
    "layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ),
}


@pytest.mark.parametrize("kind", ATTENTION)
@each_strategy
def test_attention_has_gradients_in_evaluation(kind, strategy):
    models = [ATTENTION[kind]().double().eval() for _ in range(3)]
    ensemble = el.StackedEnsemble(models, strategy=strategy)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    fast = torch.backends.mha.get_fastpath_enabled()
    y, z = ensemble(x, shared=True), torch.stack([model(x) for model in models])
    assert ensemble._use_vmap() == (strategy == "vmap")
    assert torch.backends.mha.get_fastpath_enabled() == fast
    torch.testing.assert_close(y, z)
    y.pow(2).sum().backward()
    z.pow(2).sum().backward()
    for name, p in ensemble.module.named_parameters():
        own = torch.stack([model.get_parameter(name).grad for model in models])
        torch.testing.assert_close(p.grad, own)


@each_strategy
@pytest.mark.parametrize("rows", [11, 5000])
def test_embeddings_that_scale_their_weight(rows, strategy):
    models = [
        nn.Sequential(nn.Embedding(rows, 64, max_norm=1.0), nn.Linear(64, 2)) for _ in range(3)
    ]
    ensemble = el.StackedEnsemble(models, strategy=strategy)
    x = torch.randint(rows, (6,))
    y, z = ensemble(x), torch.stack([model(x) for model in models])
    torch.testing.assert_close(y, z)
    y.pow(2).sum().backward()
    z.pow(2).sum().backward()
    weight = ensemble.module[0].weight
    torch.testing.assert_close(weight, torch.stack([model[0].weight for model in models]))
    torch.testing.assert_close(weight.grad, torch.stack([m[0].weight.grad for m in models]))
