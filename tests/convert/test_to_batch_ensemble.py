"""Conversion to BatchEnsemble: members, training, what is converted and what is not."""

import copy
import warnings

import pytest
import torch
from branched import OWN, Net, images, plain
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torchvision.models import resnet18
from zoo import ReadsItsChild

import ensemblayers as el

pytestmark = pytest.mark.filterwarnings("ignore:shared by all members", "ignore:.*nested tensor")


def explicit(state, i):
    """Member i's tensors under the plain network's names, from those of the ensemble."""
    own = {}
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        fast = layer + ".r" in state
        if kind in ("r", "s"):
            continue
        if fast and kind == "weight":
            r, s = state[layer + ".r"][i], state[layer + ".s"][i]
            groups = len(r) // value.shape[1]
            rows = [r.chunk(groups)[o * groups // len(s)] for o in range(len(s))]
            scale = torch.stack([a * b for a, b in zip(s, rows, strict=True)])
            value = value * scale.reshape(scale.shape + (1,) * (value.dim() - 2))
        elif fast:
            value = value[i]
        own[name] = value
    return own


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("init", ["random_sign", "normal"])
def test_members_are_plain_networks(norm, init):
    model = el.to_batch_ensemble(plain(norm=norm), n=3, init=init).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = images()
    outputs = model(x)
    for i in range(3):
        own = Net(norm=norm).double().eval()
        own.load_state_dict(explicit(model.state_dict(), i))
        torch.testing.assert_close(outputs[i], own(x))
        torch.testing.assert_close(el.members(model, x)[i], own(x))
        alone = el.member(model, i)
        assert [type(m) for m in alone.modules()] == [type(m) for m in own.modules()]
        assert list(alone.state_dict()) == list(own.state_dict())
        assert repr(alone) == repr(own)
        torch.testing.assert_close(alone(x), own(x))
    torch.testing.assert_close(el.member(model, -1)(x), outputs[2])


@pytest.mark.parametrize("train", ["split", "repeat"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
)
def test_training_is_that_of_plain_networks(train, optimizer):
    source = plain(norm=False)
    model = el.to_batch_ensemble(source, n=3, train=train)
    own = {k: p.detach().clone().requires_grad_() for k, p in model.state_dict().items()}
    ours, theirs = optimizer(model.parameters()), optimizer(own.values())
    for _ in range(3):
        x = images()
        shares = x.chunk(3) if train == "split" else [x] * 3
        outputs = [functional_call(source, explicit(own, i), x_) for i, x_ in enumerate(shares)]
        z = torch.cat(outputs) if train == "split" else torch.stack(outputs)
        y = model(x)
        torch.testing.assert_close(y, z)
        for opt, out in ((ours, y), (theirs, z)):
            opt.zero_grad()
            (out**2).mean().backward()
        for k, p in model.module.named_parameters():
            torch.testing.assert_close(p.grad, own[k].grad)
        ours.step()
        theirs.step()
    for k, p in model.module.named_parameters():
        torch.testing.assert_close(p, own[k])


def test_resnet_with_ones_is_the_source():
    source = resnet18(num_classes=5).double().eval()
    before = copy.deepcopy(source.state_dict())
    model = el.to_batch_ensemble(source, n=2, init="ones").eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = source(x)
        for y in model(x):
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(source.state_dict(), before)
    assert not {id(p) for p in source.parameters()} & {id(p) for p in model.parameters()}
    other = resnet18(num_classes=5).double().eval()
    assert model.load_state_dict(other.state_dict(), strict=True).missing_keys == []
    with torch.no_grad():
        for y in model(x):
            torch.testing.assert_close(y, other(x), rtol=1e-12, atol=1e-12)


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def pruned(layer):
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return layer


def patched(layer):
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias) * 2
    return layer


def old_weight_norm(layer):
    with warnings.catch_warnings(action="ignore"):
        return nn.utils.weight_norm(layer)


NOT_PLAIN = {
    "Subclass": lambda: Subclass(4, 4),
    "ParametrizedLinear": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "ParametrizedLinear ": lambda: parametrizations.spectral_norm(nn.Linear(4, 4, bias=False)),
    "Linear": lambda: old_weight_norm(nn.Linear(4, 4)),
    "Linear ": lambda: pruned(nn.Linear(4, 4)),
    "Linear  ": lambda: patched(nn.Linear(4, 4)),
    "Conv1d": lambda: old_weight_norm(nn.Conv1d(4, 4, 1)),
    "Bilinear": lambda: nn.Bilinear(4, 4, 4),
    "LSTMCell": lambda: nn.LSTMCell(4, 4),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 4, 1),
    "NonDynamicallyQuantizableLinear": lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(
        4, 4
    ),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_shared_and_named(name):
    source = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double()
    source.add_module("odd", NOT_PLAIN[name]().double())
    with pytest.warns(UserWarning, match=rf"odd \({name.strip()}\)$"):
        model = el.to_batch_ensemble(source, n=2, init="ones").eval()
    assert type(model.module.odd) is type(source.odd)
    assert not hasattr(model.module.odd, "r")
    if name.strip() in ("Subclass", "ParametrizedLinear", "Linear"):
        x, expected = torch.randn(3, 4).double(), source.eval()
        for y in model(x):
            torch.testing.assert_close(y, expected(x))


def test_lazy():
    source = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    with pytest.warns(UserWarning, match=r"1 \(LazyLinear\)"):
        model = el.to_batch_ensemble(source, n=2)
    assert model(torch.zeros(2, 4)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"0 \(LazyLinear\)"):
        el.to_batch_ensemble(nn.Sequential(nn.LazyLinear(3)), n=2)


def test_plain_layers_are_not_named():
    with warnings.catch_warnings(action="error"):
        el.to_batch_ensemble(plain(), n=2)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.LSTM(4, 4),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
    ],
)
def test_batch_in_dimension_1(layer):
    with pytest.raises(ValueError, match="batch_first=False in 1"):
        el.to_batch_ensemble(nn.Sequential(nn.Linear(4, 4), layer()), n=2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("stack", [False, True])
def test_transformer(grad, masked, stack):
    source = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    if stack:
        source = nn.TransformerEncoder(source, 2)
    model = el.to_batch_ensemble(source, n=3, init="normal").eval()
    x, keep = torch.randn(2, 5, 8, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool)
    keep[0, 3:] = not masked
    options = {"src_key_padding_mask": ~keep} if masked else {}
    with torch.set_grad_enabled(grad):
        outputs = model(x, **options)
    for i, y in enumerate(outputs):
        own = copy.deepcopy(source).eval()
        own.load_state_dict(explicit(model.state_dict(), i))
        torch.testing.assert_close(y[keep], own(x, **options)[keep])
        alone = el.member(model, i)
        with torch.no_grad():
            torch.testing.assert_close(alone(x, **options), own(x, **options))
        for m, m_ in zip(alone.modules(), own.modules(), strict=True):
            for fast in ("activation_relu_or_gelu", "use_nested_tensor"):
                assert getattr(m, fast, None) == getattr(m_, fast, None)
            assert vars(m).keys() == vars(m_).keys()
    assert not torch.allclose(outputs[0][keep], outputs[1][keep])


def test_where():
    model = el.to_batch_ensemble(plain(), n=2, where=lambda m, name: not name.startswith("heads"))
    names = {k for k, m in model.module.named_modules() if isinstance(m, OWN)}
    assert names == {"stem", "blocks.0", "twice"}
    assert type(model.module.heads["a"]) is nn.Linear


@pytest.mark.parametrize("layer", [nn.Linear(4, 2, bias=False), nn.Conv1d(4, 2, 3, padding=1)])
def test_root_and_back(layer):
    layer = layer.double()
    model = el.to_batch_ensemble(layer, n=2)
    alone = el.member(model, 0)
    assert type(alone) is type(layer) and vars(alone).keys() == vars(layer).keys()
    again = el.to_batch_ensemble(alone, n=3, init="ones").eval()
    x = torch.randn(3, 4, *(5,) * (layer.weight.dim() - 2), dtype=torch.float64)
    torch.testing.assert_close(again(x)[2], model.eval()(x)[0])


def test_frozen_hooks_mode_and_device_stay():
    source = plain().eval()
    source.twice.requires_grad_(False)
    calls = []
    source.twice.register_forward_hook(lambda *args: calls.append(1))
    model = el.to_batch_ensemble(source, n=2)
    assert not model.training and not any(m.training for m in model.modules())
    twice = model.module.twice
    assert not twice.weight.requires_grad and not twice.bias.requires_grad
    assert twice.r.requires_grad and twice.s.requires_grad
    assert all(p.requires_grad for p in model.module.stem.parameters())
    assert all(p.dtype == torch.float64 for p in model.parameters())
    model(images())
    assert len(calls) == 2
    assert not any(p.requires_grad for p in el.member(model, 0).twice.parameters())
    with torch.device("meta"):
        meta = Net()
    assert all(p.is_meta for p in el.to_batch_ensemble(meta, n=2).parameters())


def test_fast_weights_of_a_frozen_model_are_trained():
    source = plain().requires_grad_(False).eval()
    model = el.to_batch_ensemble(source, n=3, norms="member")
    trained = {k for k, p in model.module.named_parameters() if p.requires_grad}
    assert trained == {k for k in model.state_dict() if k.endswith((".r", ".s"))}
    before = copy.deepcopy(model.state_dict())
    (model(images()) ** 2).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for k, v in model.state_dict().items():
        assert torch.equal(v, before[k]) == (k not in trained)
    assert not any(p.requires_grad for p in el.member(model, 0).parameters())


def test_tied_weights_stay_tied():
    source = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
    source[1].weight = source[0].weight
    model = el.to_batch_ensemble(source, n=2)
    assert model.module[0].weight is model.module[1].weight
    x = torch.arange(4) % 5
    for i in range(2):
        own, layer = el.member(model, i), model.module[1]
        weight = layer.weight * layer.s[i][:, None] * layer.r[i]
        expected = nn.functional.linear(layer.weight[x], weight, layer.bias[i])
        torch.testing.assert_close(own(x), expected)
        torch.testing.assert_close(el.members(model, x)[i], expected)


def test_bias_tied_to_what_stays_plain():
    source = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    source[1].bias = source[0].bias
    with pytest.raises(ValueError, match=r"1\.bias is tied"):
        el.to_batch_ensemble(source, n=2)


def dense():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


WHOLE = {
    "StackedEnsemble": lambda: el.to_stacked(dense(), n=2),
    "BatchEnsemble": lambda: el.to_batch_ensemble(dense(), n=2),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_ensembles_are_not_converted_again(kind, inside):
    model = WHOLE[kind]()
    model = nn.Sequential(nn.Linear(4, 4).double(), model) if inside else model
    match = rf"without a whole {kind} in it, got one{' as .1.' if inside else '$'}"
    for n in (2, 3):
        with pytest.raises(ValueError, match=match):
            el.to_batch_ensemble(model, n=n)
    if kind == "StackedEnsemble":
        with pytest.raises(ValueError, match=match):
            el.to_subspace(model, n=2)


@pytest.mark.parametrize("norms", ["shared", "member"])
def test_a_subspace_of_batch_ensembles(norms):
    net = nn.Sequential(*dense(), nn.BatchNorm1d(2).double())
    model = el.to_subspace(el.to_batch_ensemble(net, n=2, norms=norms), n=3, sigma=0.3)
    x = torch.randn(6, 4, dtype=torch.float64)
    assert model(x).shape == (6, 2)
    for vertex in (0, 2, None):
        el.set_point(model.eval(), vertex=vertex)
        y = model(x)
        torch.testing.assert_close(el.collapse(model)(x), y)
        torch.testing.assert_close(el.members(model, x), y)
        for i in range(2):
            torch.testing.assert_close(el.member(model, i)(x), y[i])


def test_a_batch_ensemble_around_a_subspace():
    net = nn.Sequential(nn.Linear(4, 4).double(), el.to_subspace(dense(), n=3, sigma=0.3))
    model = el.to_batch_ensemble(net, n=2, init="normal")
    x = torch.randn(6, 4, dtype=torch.float64)
    assert model(x).shape == (6, 2)
    y = model.eval()(x)
    for i in range(2):
        torch.testing.assert_close(el.member(model, i)(x), y[i])


def test_the_rest_can_be_converted_later():
    first = el.to_batch_ensemble(dense(), n=2, where=lambda m, name: name == "0").module
    model = el.to_batch_ensemble(first, n=2, init="normal").eval()
    assert torch.equal(model.module[0].r, first[0].r)
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(el.member(model, 1)(x), model(x)[1])


NOT_MODULES = [None, [nn.Linear(2, 2)], nn.Linear, torch.zeros(2, 2), lambda x: x]


@pytest.mark.parametrize("what", NOT_MODULES, ids=lambda what: type(what).__name__)
@pytest.mark.parametrize(
    "call",
    [
        lambda m: el.to_batch_ensemble(m, n=2),
        lambda m: el.to_subspace(m, n=2),
        lambda m: el.to_stacked(m, n=2),
        lambda m: el.BatchEnsemble(m),
        lambda m: el.members(m, torch.zeros(2, 2)),
        lambda m: el.member(m, 0),
        lambda m: el.collapse(m),
        lambda m: el.set_point(m, vertex=0),
        lambda m: el.share_point(m),
        lambda m: el.param_groups(m, 0.1),
        lambda m: el.fold_norms(m),
        lambda m: el.recalibrate(m, []),
    ],
)
def test_what_is_no_module(call, what):
    with pytest.raises(ValueError, match=f"expected a module, got {type(what).__name__}"):
        call(what)


@pytest.mark.parametrize("call", [el.combine, el.uncertainty])
@pytest.mark.parametrize(
    "logits, match",
    [
        ([torch.zeros(3, 2)], "got list"),
        (None, "got NoneType"),
        (nn.Linear(2, 2), "got Linear"),
        (torch.zeros(2, 3, dtype=torch.int64), "tensor of torch.int64"),
        (torch.zeros(3), r"got \[3\]"),
    ],
)
def test_what_is_no_logits(call, logits, match):
    with pytest.raises(ValueError, match=rf"expected logits \[n, ..., classes\].*{match}"):
        call(logits)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: el.to_batch_ensemble(nn.ReLU(), n=2), "got none"),
        (lambda: el.to_batch_ensemble(nn.Linear(2, 2), n=0), "n=0"),
        (lambda: el.to_batch_ensemble(nn.Linear(2, 2), n=2, init="one"), "'one'"),
        (lambda: el.to_batch_ensemble(nn.Linear(2, 2), n=2, train="all"), "'all'"),
        (lambda: el.member(el.to_batch_ensemble(nn.Linear(2, 2), n=2), 2), r"0\.\.1, got 2"),
        (lambda: el.member(nn.Linear(2, 2), 0), r"an ensemble \(.*\), got Linear"),
        (
            lambda: el.member(nn.Sequential(el.to_batch_ensemble(nn.Linear(2, 2), n=2)), 0),
            "Sequential that holds a BatchEnsemble as '0'",
        ),
    ],
)
def test_errors(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_children_that_are_read_and_not_called_stay_shared():
    source = nn.Sequential(ReadsItsChild(), nn.Linear(3, 2))
    with pytest.warns(UserWarning, match="0.proj"):
        model = el.to_batch_ensemble(source, n=2, init="ones", opaque=(ReadsItsChild,)).eval()
    x = torch.randn(5, 4)
    assert isinstance(model.module[0].proj, nn.Linear)
    torch.testing.assert_close(model(x), source(x).expand(2, -1, -1))
