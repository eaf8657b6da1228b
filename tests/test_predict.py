import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import ensemblayers as el

RULES = ["average", "hard", "majority", "logits"]


def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def vectors(*rows):
    return 2 * torch.randn(*rows, 4, dtype=torch.float64) + 1


def scattered(model):
    """The same ensemble with members that have nothing in common."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return model


KINDS = {
    "subspace": lambda: scattered(el.to_subspace(plain(), n=3)),
    "batch ensemble": lambda: scattered(el.to_batch_ensemble(plain(), n=3)),
    "repeat": lambda: scattered(el.to_batch_ensemble(plain(), n=3, train="repeat")),
    "loop": lambda: el.StackedEnsemble([plain() for _ in range(3)], strategy="loop"),
    "vmap": lambda: el.StackedEnsemble([plain() for _ in range(3)], strategy="vmap"),
    "skeletons": lambda: el.StackedEnsemble(
        [nn.Sequential(*plain(), nn.LeakyReLU(i / 10)) for i in range(3)]
    ),
}


# members


@pytest.mark.parametrize("kind", KINDS)
def test_members(kind):
    model = KINDS[kind]()
    model(vectors(9))
    x = vectors(5)
    outputs = el.members(model.eval(), x)
    assert outputs.shape == (3, 5, 3) and not torch.allclose(outputs[0], outputs[1])
    for i in range(3):
        alone = el.member(model, i)
        assert {type(m).__module__.partition(".")[0] for m in alone.modules()} == {"torch"}
        torch.testing.assert_close(outputs[i], alone(x))


@pytest.mark.parametrize("rows", [3, 1, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_members_share_any_batch(kind, rows):
    model = KINDS[kind]().eval()
    assert el.members(model, vectors(rows)).shape == (3, rows, 3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("convert", [el.to_subspace, el.to_batch_ensemble, el.to_stacked])
def test_members_share_a_batch_of_n_sequences(convert):
    model, x = convert(nn.Linear(4, 2), n=3), torch.randn(3, 5, 4)
    expected = torch.stack([el.member(model, i)(x) for i in range(3)])
    torch.testing.assert_close(el.members(model, x), expected)


def test_members_of_a_plain_module():
    net, x = plain().eval(), vectors(5)
    torch.testing.assert_close(el.members(net, x), net(x)[None])


@pytest.mark.parametrize("layer", [el.BatchEnsembleLinear(4, 2, n=3), el.SubspaceLinear(4, 2, n=3)])
def test_members_of_a_layer(layer):
    x = torch.randn(5, 4)
    expected = torch.stack([el.member(layer, i)(x) for i in range(3)])
    torch.testing.assert_close(el.members(layer, x), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_members_leave_mode_and_point(kind, training):
    model = KINDS[kind]().train(training)
    modes = [m.training for m in model.modules()]
    if kind == "subspace":
        el.set_point(model, [0.2, 0.3, 0.5])
    el.members(model, vectors(6))
    assert [m.training for m in model.modules()] == modes
    if kind == "subspace":
        alpha = model[0].point.alpha
        torch.testing.assert_close(alpha, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x, *, flag):
        y, weights = self.inner(x, x, x, need_weights=False)
        return {"y": self.head(y), "weights": weights, "flag": flag}


@pytest.mark.filterwarnings("ignore:shared by all members")
@pytest.mark.parametrize("convert", [el.to_subspace, el.to_batch_ensemble, el.to_stacked])
def test_members_of_a_model_with_nested_outputs(convert):
    model, x = convert(Attention(), n=3).eval(), torch.randn(5, 2, 4)
    out = el.members(model, x, flag=True)
    assert out["y"].shape == (3, 5, 2, 2) and out["weights"] is None and out["flag"] is True
    torch.testing.assert_close(out["y"][2], el.member(model, 2)(x, flag=True)["y"])


@pytest.mark.parametrize("kind", ["batch ensemble", "loop"])
def test_members_of_what_holds_an_ensemble(kind):
    with pytest.raises(ValueError, match=r"Sequential that holds a .*Ensemble as '1'"):
        el.members(nn.Sequential(nn.Flatten(), KINDS[kind]()), vectors(6))


# combine, uncertainty, ensemble_loss


def by_hand(logits, rule):
    """One row at a time."""
    n, rows, classes = logits.shape
    out = np.zeros((rows, classes))
    for b in range(rows):
        p = special.softmax(logits[:, b], -1)
        if rule == "average":
            out[b] = p.mean(0)
        elif rule == "logits":
            out[b] = special.softmax(logits[:, b].mean(0))
        elif rule == "hard":
            out[b] = p[p.max(-1).argmax()]
        else:
            out[b] = np.bincount(logits[:, b].argmax(-1), minlength=classes) / n
    return out


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [1, 10])
def test_combine(rule, scale):
    logits = scale * torch.randn(5, 200, 4, dtype=torch.float64)
    p = el.combine(logits, rule)
    torch.testing.assert_close(p, torch.tensor(by_hand(logits.numpy(), rule)), rtol=0, atol=1e-12)
    nested = el.combine(logits.unflatten(1, (10, 20)), rule)
    torch.testing.assert_close(nested.flatten(0, 1), p)
    torch.testing.assert_close(el.combine(logits[:, 0], rule), p[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_combine_extreme_logits(rule, dtype):
    logits = 1e4 * torch.randn(4, 50, 3).sign()
    logits[:, 10:, 1] = -torch.inf  # A masked class.
    logits = logits.to(dtype).requires_grad_(rule != "majority")
    p = el.combine(logits, rule)
    assert p.dtype == dtype and p.isfinite().all() and (p >= 0).all()
    eps = torch.finfo(dtype).eps
    assert ((p.double().sum(-1) - 1).abs() <= 2 * eps).all()
    assert (p[10:, 1] == 0).all()
    if logits.requires_grad:
        p[:, 0].sum().backward()
        assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "rows, votes, winner",
    [
        # Two votes each: the tie goes to the class of the higher mean probability.
        ([[0, 3, 0], [0, 3, 0], [0, 0, 9], [0, 0, 9]], [0, 0.5, 0.5], 2),
        ([[0, 9, 0], [0, 9, 0], [0, 0, 3], [0, 0, 3]], [0, 0.5, 0.5], 1),
        ([[5, 0, 0], [0, 4, 0], [0, 0, 6]], [1 / 3, 1 / 3, 1 / 3], 2),
        # The highest mean probability, but not of the most votes.
        ([[0.1, 0, 0]] * 2 + [[0, 0.2, 0]] * 2 + [[0, 0, 99]], [0.4, 0.4, 0.2], 1),
        ([[1, 0, 0], [1, 0, 0], [0, 0, 99]], [2 / 3, 0, 1 / 3], 0),
        ([[1, 0, 0], [1, 0, 0]], [1, 0, 0], 0),
    ],
)
def test_majority(rows, votes, winner, dtype):
    p = el.combine(torch.tensor(rows, dtype=dtype)[:, None], "majority")[0]
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(p, torch.tensor(votes, dtype=dtype), rtol=0, atol=tolerance)
    assert p.argmax() == winner and p.max() <= 1


@pytest.mark.parametrize(
    "logits, rule, match",
    [(torch.zeros(3, 2), "mean", "'mean'"), (torch.zeros(3), "average", r"\[3\]")],
)
def test_combine_errors(logits, rule, match):
    with pytest.raises(ValueError, match=match):
        el.combine(logits, rule)


@pytest.mark.parametrize(
    "p, total, expected",
    [
        ([[1 / 2, 1 / 2], [1 / 2, 1 / 2]], math.log(2), math.log(2)),  # All are unsure.
        ([[1, 0], [0, 1]], math.log(2), 0),  # Each is sure, all disagree.
        ([[1, 0], [1, 0]], 0, 0),
        ([[1, 0], [1 / 2, 1 / 2]], special.entr([0.75, 0.25]).sum(), math.log(2) / 2),
        ([[1, 0, 0], [0, 1, 0], [0, 0, 1]], math.log(3), 0),
    ],
)
def test_uncertainty(p, total, expected):
    logits = torch.tensor(p, dtype=torch.float64).log()[:, None].expand(-1, 4, -1)
    for shift in (0, 1e4):
        got = el.uncertainty(logits + shift)
        for value, known in zip(got, (total, expected, total - expected), strict=True):
            torch.testing.assert_close(value, torch.full((4,), known, dtype=torch.float64))


def test_information_is_never_negative():
    got = el.uncertainty(torch.randn(1, 5000, 3).expand(3, -1, -1))
    assert (got.total - got.expected).min() < 0 <= got.information.min()


@pytest.mark.parametrize("over, share", [("sum", 1), ("mean", 3)])
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_ensemble_loss(loss, over, share):
    """The sum is n separate steps, the mean n separate steps of an n-th of the learning rate."""
    nets = [plain() for _ in range(3)]
    ensemble, x, target = el.StackedEnsemble(nets), vectors(6), torch.arange(6) % 3
    total = el.ensemble_loss(loss, ensemble(x), target, over_members=over)
    total.backward()
    torch.optim.SGD(ensemble.parameters(), lr=0.3).step()
    losses = []
    for net in nets:
        own = loss(net(x), target)
        own.backward()
        torch.optim.SGD(net.parameters(), lr=0.3 / share).step()
        losses.append(own.item())
    assert total.item() == pytest.approx(sum(losses) / share)
    for i, net in enumerate(nets):
        torch.testing.assert_close(el.member(ensemble, i).state_dict(), net.state_dict())


def test_ensemble_loss_error():
    with pytest.raises(ValueError, match="'total'"):
        el.ensemble_loss(F.mse_loss, torch.zeros(2, 3), torch.zeros(3), over_members="total")


# recalibrate


def statistics(model):
    return {k: v.clone() for k, v in model.state_dict().items() if "running" in k or "num_b" in k}


def test_statistics_are_plain_means():
    norm, data = nn.BatchNorm1d(4).double(), [vectors(rows) for rows in (3, 8, 5)]
    el.recalibrate(norm.eval(), data)
    torch.testing.assert_close(norm.running_mean, torch.stack([x.mean(0) for x in data]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([x.var(0) for x in data]).mean(0))
    assert norm.num_batches_tracked == 3


class Twice(nn.Module):
    """A norm that sees two inputs in each pass."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.norm(x) + 3)


@pytest.mark.parametrize("convert", [lambda net: net, lambda net: el.to_stacked(net, n=2)])
def test_a_norm_that_is_called_twice(convert):
    model, data = convert(Twice().double()), [vectors(5) for _ in range(3)]
    if isinstance(model, el.StackedEnsemble):
        model.strategy = "vmap"
    el.recalibrate(model, data)
    means = [m for x in data for m in (x.mean(0), torch.full((4,), 3.0, dtype=torch.float64))]
    got = model.state_dict()["norm.running_mean"]
    torch.testing.assert_close(got, torch.stack(means).mean(0).expand_as(got))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i", [0, 2])
def test_member_recalibrated(kind, i):
    """The network at member i, recalibrated, is member i alone, recalibrated."""
    model, data, x = KINDS[kind](), [vectors(6) for _ in range(3)], vectors(5)
    alone = el.member(model, i)
    reference = copy.deepcopy(alone)
    for m in reference.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.reset_running_stats()
            m.momentum = None
    for own in data:
        reference.train()(own)
    el.recalibrate(alone, data)
    torch.testing.assert_close(alone.state_dict(), reference.state_dict())
    if kind == "subspace":
        with el.at(model, vertex=i):
            el.recalibrate(model, data)
            torch.testing.assert_close(model.eval()(x), reference.eval()(x))
    elif kind in ("batch ensemble", "repeat"):
        # The members share the statistics, which are those of all members' features.
        el.recalibrate(model, data)
        means = [torch.cat([el.member(model, j)[0](own) for j in range(3)]).mean(0) for own in data]
        torch.testing.assert_close(model.module[1].running_mean, torch.stack(means).mean(0))
    else:
        el.recalibrate(model, data)
        torch.testing.assert_close(model.eval()(x)[i], reference.eval()(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_recalibrate_leaves_no_trace(kind, training):
    model = KINDS[kind]()
    model(vectors(9))
    model.train(training)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    norms[0].momentum = 0.3
    norms[0].eval()
    modes = [m.training for m in model.modules()]
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with el.recalibrate(model, [vectors(6) for _ in range(3)]):
        now = statistics(model)
        assert all(not torch.equal(now[k], before[k]) for k in now)
        assert [m.training for m in model.modules()] == modes
        assert norms[0].momentum == 0.3
        torch.set_rng_state(rng)
    after = model.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before)
    if kind in ("loop", "vmap"):
        assert model.strategy == kind and model._use_vmap() == (kind == "vmap")


class Stop(Exception):
    pass


def failing():
    yield vectors(6)
    raise Stop


@pytest.mark.parametrize(
    "data, error", [([], ValueError), (iter(()), ValueError), (failing(), Stop)]
)
@pytest.mark.parametrize("kind", ["subspace", "vmap"])
def test_recalibrate_failure(kind, data, error):
    model = KINDS[kind]()
    model(vectors(9))
    before = statistics(model)
    with pytest.raises(error):
        el.recalibrate(model, failing() if error is Stop else data)
    assert all(torch.equal(v, before[k]) for k, v in statistics(model).items())
    assert all(m.training for m in model.modules())
    assert all(m.momentum == 0.1 for m in model.modules() if isinstance(m, nn.BatchNorm1d))
    assert getattr(model, "strategy", "vmap") == "vmap"


def loader(own, kind):
    data = TensorDataset(vectors(12), torch.zeros(12))
    if kind == "batch sampler":
        batches = BatchSampler(RandomSampler(data, generator=own), 4, False)
        return DataLoader(data, batch_sampler=batches)
    if kind == "sampler":
        return DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=own))
    return DataLoader(data, batch_size=4, shuffle=True, generator=own)


@pytest.mark.parametrize("kind", ["generator", "sampler", "batch sampler", "none"])
def test_generators_are_restored(kind):
    own = None if kind == "none" else torch.Generator().manual_seed(3)
    model = nn.Sequential(plain(), nn.Dropout(0.5))
    data = loader(own, kind)
    el.recalibrate(model, data)  # A sampler without a seed takes one at its first use.
    states = [torch.get_rng_state()] + ([own.get_state()] if own else [])
    el.recalibrate(model, data)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert own is None or torch.equal(own.get_state(), states[1])


def test_only_batchnorm_trains_meanwhile():
    seen = []
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)).double()
    model[0].register_forward_hook(lambda m, args, out: seen.append(torch.equal(out, args[0])))
    el.recalibrate(model, [vectors(5)])
    assert seen == [True] and model.training


def test_without_statistics_nothing_happens():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with el.recalibrate(model, failing()):
        pass


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_the_uncertainty_where_members_are_sure(masked):
    """A probability that underflows, or of a masked class, has no part in the entropy."""
    logits = torch.tensor([[[200.0, 0.0, 1.0]], [[300.0, 0.0, -1.0]]])
    if masked:
        logits[..., 1] = -torch.inf
    logits.requires_grad_()
    found = el.uncertainty(logits)
    for value in (found.total, found.expected, found.information):
        assert value.abs().max() < 1e-6
        (grad,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
        assert grad.abs().max() < 1e-6  # NaN is not.
