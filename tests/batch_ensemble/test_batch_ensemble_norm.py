import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import ensemblayers as el

SPACE = {1: (), 2: (4, 3), 3: (2, 3, 2)}
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.5, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
]


def pair(k, options):
    """A norm of three members, and the three plain norms, all of other parameters."""
    layer = getattr(el, f"BatchEnsembleNorm{k}d")(4, n=3, dtype=torch.float64, **options)
    plain = [getattr(nn, f"BatchNorm{k}d")(4, dtype=torch.float64, **options) for _ in range(3)]
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(1, 0.5)
    for i, own in enumerate(plain):
        own.load_state_dict({k: v[i] if v.dim() else v for k, v in layer.state_dict().items()})
    return layer, plain


def batch(k, rows=15):
    return torch.randn(rows, 4, *SPACE[k], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_it_is_one_norm_a_member(k, options):
    layer, plain = pair(k, options)
    for mode in (True, True, False, True):
        x = batch(k)
        y = layer.train(mode)(x)
        z = torch.cat([own.train(mode)(r) for own, r in zip(plain, x.chunk(3), strict=True)])
        torch.testing.assert_close(y, z)
        g = torch.randn_like(z)
        params = [p for own in plain for p in own.parameters()]
        got = torch.autograd.grad(y, [x, *layer.parameters()], g)
        dx, *want = torch.autograd.grad(z, [x, *params], g)
        torch.testing.assert_close(got[0], dx)
        for j, d in enumerate(got[1:]):
            torch.testing.assert_close(d, torch.stack(want[j :: len(got) - 1]))
    state = layer.state_dict()
    for i, own in enumerate(plain):
        assert list(own.state_dict()) == list(state)
        for name, value in own.state_dict().items():
            torch.testing.assert_close(state[name][i] if value.dim() else state[name], value)


def test_sequences_of_vectors():
    layer, plain = pair(1, {})
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    z = torch.cat([own(r) for own, r in zip(plain, x.chunk(3), strict=True)])
    torch.testing.assert_close(layer(x), z)


def test_errors_and_repr():
    layer = el.BatchEnsembleNorm1d(4, n=3)
    assert repr(layer) == f"BatchEnsembleNorm1d({nn.BatchNorm1d(4).extra_repr()}, n=3)"
    with pytest.raises(ValueError, match="n=3 members, got 7 rows"):
        layer(torch.zeros(7, 4))
    with pytest.raises(ValueError, match="2D or 3D"):
        layer(torch.zeros(6, 4, 5, 5))
    with pytest.raises(ValueError, match="n=0"):
        el.BatchEnsembleNorm1d(4, n=0)
    net = nn.Sequential(el.BatchEnsembleLinear(4, 4, n=3), layer)
    with pytest.raises(ValueError, match="member-major"):
        el.BatchEnsemble(net, train="random")(torch.zeros(6, 4))


def scattered(model):
    """Members' norms of other parameters and statistics."""
    for m in model.modules():
        if isinstance(m, (el.BatchEnsembleNorm1d, el.BatchEnsembleNorm2d, el.BatchEnsembleNorm3d)):
            with torch.no_grad():
                for t in (m.running_mean, m.running_var, *m.parameters()):
                    t.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_rows_by_index_in_evaluation(k, options):
    norm, _ = pair(k, options)
    kind = el.BatchEnsembleLinear if k == 1 else getattr(el, f"BatchEnsembleConv{k}d")
    layer = kind(4, 4, **({} if k == 1 else {"kernel_size": 1}), n=3, dtype=torch.float64)
    model = el.BatchEnsemble(nn.Sequential(layer, norm)).eval()
    x, members = batch(k, 7), torch.tensor([2, 0, 0, 1, 2, 2, 0])
    if not norm.track_running_stats:
        with pytest.raises(ValueError, match="running statistics in evaluation"):
            model(x, members=members)
        return
    scattered(model)

    def by_row(x):
        alone = [el.member(model, i) for i in range(3)]
        return torch.cat([alone[i](row[None]) for i, row in zip(members.tolist(), x, strict=True)])

    z = by_row(x)
    y = model(x, members=members)
    torch.testing.assert_close(y, z)
    g, wanted = torch.randn_like(z), [x, *norm.parameters()]
    every = model(x)[members, torch.arange(7)]
    torch.testing.assert_close(
        torch.autograd.grad(y, wanted, g), torch.autograd.grad(every, wanted, g)
    )
    torch.testing.assert_close(model(x[:0], members=members[:0]), y[:0])
    torch._dynamo.reset()  # The limit of compiled versions is that of all models together.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, members=members), y)
    # In training there is no batch of a member's; the statistics stay.
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="member-major"):
        model.train()(x, members=members)
    torch.testing.assert_close(model.state_dict(), before)
    model.eval().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, z = model(x.float(), members=members), by_row(x.float())
    assert y.dtype == z.dtype
    torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)


def test_networks_with_rows_by_index():
    model = scattered(el.to_batch_ensemble(network(), n=3, norms="member", init="normal"))
    x = torch.randn(5, 3, 5, 5, dtype=torch.float64)
    members = torch.tensor([1, 2, 2, 0, 1])
    y = model.eval()(x)[members, torch.arange(5)]
    torch.testing.assert_close(model(x, members=members), y)
    # Norms in evaluation in a network in training.
    for m in model.train().modules():
        if isinstance(m, (el.BatchEnsembleNorm1d, el.BatchEnsembleNorm2d)):
            m.eval()
    torch.testing.assert_close(model(x, members=members), y)


class OwnNorm(nn.BatchNorm1d):
    pass


def patched_norm():
    norm = nn.BatchNorm1d(4)
    norm.forward = lambda x: x
    return norm


STAY_SHARED = {
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "OwnNorm": lambda: OwnNorm(4),
    "LazyBatchNorm1d": lambda: nn.LazyBatchNorm1d(track_running_stats=False),
    "BatchNorm1d": patched_norm,
    "ParametrizedBatchNorm1d": lambda: nn.utils.parametrizations.weight_norm(
        nn.BatchNorm1d(4), dim=None
    ),
}


@pytest.mark.parametrize("name", STAY_SHARED)
def test_norms_that_stay_shared_are_named(name):
    source = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    source.add_module("odd", STAY_SHARED[name]())
    with pytest.warns(UserWarning, match=rf"as they are: odd \({name}\)$"):
        model = el.to_batch_ensemble(source, n=2, norms="member")
    assert type(model.module[1]) is el.BatchEnsembleNorm1d
    assert type(model.module.odd) is type(source.odd)
    with warnings.catch_warnings(action="error"):
        el.to_batch_ensemble(source, n=2)
        el.to_batch_ensemble(source, n=2, norms="member", where=lambda m, name: name != "odd")


@pytest.mark.parametrize("norms", ["shared", "member"])
def test_lazy_statistics_can_not_be_copied(norms):
    source = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d())
    with (
        pytest.warns(UserWarning, match="LazyBatchNorm1d") if norms == "member" else nullcontext(),
        pytest.raises(ValueError, match=r"lazy 1\.running_mean.*once"),
    ):
        el.to_batch_ensemble(source, n=2, norms=norms)
    source(torch.zeros(2, 4))
    assert type(el.to_batch_ensemble(source, n=2, norms=norms).module[1]).__name__ == (
        "BatchEnsembleNorm1d" if norms == "member" else "BatchNorm1d"
    )


def test_a_plain_state_dict_is_every_members():
    layer, plain = pair(2, {})
    plain[1](batch(2))
    layer.load_state_dict(plain[1].state_dict(), strict=True)
    for name, value in layer.state_dict().items():
        own = plain[1].state_dict()[name]
        torch.testing.assert_close(value, own.expand_as(value))
    other = el.BatchEnsembleNorm2d(4, n=3, dtype=torch.float64)
    other.load_state_dict(layer.state_dict(), strict=True)
    x = batch(2)
    torch.testing.assert_close(other.eval()(x), layer.eval()(x))


def network():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)
    )
    net = nn.Sequential(*net, nn.BatchNorm1d(5, affine=False), nn.LayerNorm(5)).double()
    for _ in range(3):
        net(torch.randn(8, 3, 5, 5, dtype=torch.float64))
    return net


def test_conversion():
    source = network()
    before = copy.deepcopy(source.state_dict())
    model = el.to_batch_ensemble(source, n=3, init="ones", norms="member")
    assert type(model.module[1]) is el.BatchEnsembleNorm2d
    assert type(model.module[5]) is el.BatchEnsembleNorm1d
    assert model.module[1].weight.shape == (3, 4)
    assert model.module[1].num_batches_tracked == 3
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(model.eval()(x), source.eval()(x).expand(3, -1, -1))
    # Trained on, the members' statistics part, and each member is a plain network.
    opt = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(12, 3, 5, 5, dtype=torch.float64)).pow(2).sum().backward()
        opt.step()
    mean = model.module[1].running_mean
    assert not torch.allclose(mean[0], mean[1])
    outputs = model.eval()(x)
    for i in range(3):
        alone = el.member(model, i)
        assert type(alone[1]) is nn.BatchNorm2d and type(alone[5]) is nn.BatchNorm1d
        assert vars(alone[1]).keys() == vars(source[1]).keys()
        assert all(p.requires_grad for p in alone[1].parameters())
        torch.testing.assert_close(alone(x), outputs[i])
    # A plain state_dict goes in, the ensemble's own comes back, the source stays.
    again = el.to_batch_ensemble(network(), n=3, init="ones", norms="member").eval()
    again.load_state_dict(before, strict=True)
    torch.testing.assert_close(again(x), source(x).expand(3, -1, -1))
    again.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(again(x), outputs)
    torch.testing.assert_close(source.state_dict(), before)


def test_conversion_leaves_out():
    model = el.to_batch_ensemble(
        network(), n=3, norms="member", where=lambda m, name: name not in ("1", "4")
    )
    assert type(model.module[1]) is nn.BatchNorm2d and type(model.module[4]) is nn.Linear
    assert type(model.module[5]) is el.BatchEnsembleNorm1d
    shared = el.to_batch_ensemble(network(), n=3).module
    assert type(shared[1]) is nn.BatchNorm2d and type(shared[5]) is nn.BatchNorm1d
    for options, match in (({"norms": "own"}, "'own'"), ({"train": "random"}, "random")):
        with pytest.raises(ValueError, match=match):
            el.to_batch_ensemble(network(), n=3, **{"norms": "member", **options})


def test_recalibration_is_that_of_each_member():
    model = el.to_batch_ensemble(network(), n=3, init="normal", norms="member").eval()
    data = [torch.randn(6, 3, 5, 5, dtype=torch.float64) for _ in range(3)]
    alone = [el.member(model, i) for i in range(3)]
    el.recalibrate(model, data)
    for i, own in enumerate(alone):
        el.recalibrate(own, data)
        torch.testing.assert_close(model.module[1].running_var[i], own[1].running_var)
    x = data[0]
    torch.testing.assert_close(model(x), torch.stack([own(x) for own in alone]))


def test_parameters_have_no_decay():
    model = el.to_batch_ensemble(network(), n=3, norms="member")
    decay, _ = el.param_groups(model, 0.1)
    assert [p.dim() for p in decay["params"]] == [4, 2]
    assert not {id(p) for p in model.module[1].parameters()} & {id(p) for p in decay["params"]}
