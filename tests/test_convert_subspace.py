import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from plain import assert_at, explicit, flat, leaf, scatter_
from torch import nn
from torch.nn.utils import parametrizations, prune
from torchvision.models import SwinTransformer, VisionTransformer, resnet18, vit_b_16
from torchvision.models.video import SwinTransformer3d

import ensemblayers as el

close = torch.testing.assert_close


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i):
        return self.head(self.body(self.embed(i)).relu())


class Reads(nn.Module):
    """Reads a child's weight without calling the child."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)

    def forward(self, i):
        return F.linear(self.embed(i), self.embed.weight)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.again = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.list = [self.first]

    def forward(self, x):
        return self.list[0](self.norm(self.again(self.first(x)).tanh()))


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(3, 3), nn.ModuleList([nn.LayerNorm(3)])])
        self.dict = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Sequential(nn.Linear(3, 3))})
        self.scales = nn.ParameterList([torch.rand(3), torch.rand(3)])
        self.shifts = nn.ParameterDict({"x": torch.rand(3)})

    def forward(self, x):
        x = self.list[1][0](self.list[0](x)) * self.scales[0] + self.shifts["x"]
        for scale in self.scales:
            x = x * scale
        return self.dict["b"](self.dict["a"](x).relu())


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.sigma, self.alpha = 4, "sigma", [1.0]
        self.point = nn.Linear(3, 3)
        self.owner = self.shared = self.drawn = 1
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.point(x) * self.weight + self.n + len(self.sigma)


class Scaled(nn.Sequential):
    def __init__(self, *modules):
        super().__init__(*modules)
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return super().forward(x) * self.scale


class MyLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).sin()


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x):
        keys = x[..., : self.attention.kdim]
        return self.attention(x, keys, keys)[0]


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def pruned(module):
    prune.l1_unstructured(module, "weight", 0.5)
    return module


def monkeypatched():
    layer = nn.Linear(3, 3)
    layer.forward = halved.__get__(layer)
    return nn.Sequential(layer)


def halved(self, x):
    return F.linear(x, self.weight, self.bias) / 2


def encoder(**options):
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


ids = torch.tensor([[0, 2, 1], [6, 0, 3]])
ZOO = {
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "conv_net": (conv_net, (2, 3, 6, 6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, True)), (2, 3, 6)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4)), (2, 2, 3, 3, 3)),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), (2, 3)),
    "tied": (Tied, ids),
    "reads": (Reads, ids),
    "shared": (Shared, (4, 3)),
    "containers": (Containers, (4, 3)),
    "named": (Named, (4, 3)),
    "scaled_sequential": (lambda: Scaled(nn.Linear(3, 4), nn.Linear(4, 3)), (4, 3)),
    "subclass": (lambda: nn.Sequential(MyLinear(3, 3), nn.Linear(3, 2)), (4, 3)),
    "attention": (Attention, (2, 5, 4)),
    "attention_kdim": (lambda: Attention(kdim=3, vdim=3, add_bias_kv=True), (2, 5, 4)),
    "lstm": (lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), (2, 5, 3)),
    "gru": (lambda: nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4)), (2, 5, 3)),
    "encoder": (encoder, (2, 5, 4)),
    "encoder_norm_first": (lambda: encoder(norm_first=True, activation="gelu"), (2, 5, 4)),
    "old_weight_norm": (lambda: nn.Sequential(old_weight_norm(nn.Conv1d(3, 2, 2))), (2, 3, 4)),
    "old_weight_norm_root": (lambda: old_weight_norm(nn.Linear(3, 2)), (2, 3)),
    "pruned": (lambda: nn.Sequential(pruned(nn.Linear(3, 2))), (2, 3)),
    "instance_forward": (monkeypatched, (2, 3)),
    "weight_norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
        (2, 3),
    ),
    "spectral_norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(2, 3, 2))),
        (2, 2, 3, 3),
    ),
    "orthogonal": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3))), (2, 3)),
}
PARAMETRIZED = ("weight_norm", "spectral_norm", "orthogonal")
# torch pickles no parametrized modules, and Python no methods that were bound by hand.
NOT_PICKLED = (*PARAMETRIZED, "instance_forward")
zoo = pytest.mark.parametrize("name", ZOO)
modes = pytest.mark.parametrize("mode", [True, False])


def make(name, mode=True):
    """A network whose parameters are no special values, in double precision, with an input."""
    build, x = ZOO[name]
    model = build().double()
    if name not in PARAMETRIZED:
        scatter_(model)
    x = x if isinstance(x, torch.Tensor) else torch.randn(*x, dtype=torch.float64)
    return model.train(mode), x


def simplex(*size):
    *batch, n = size
    return el.sample_simplex(n, *batch, dtype=torch.float64)


def classes(model):
    return {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}


def exact(a, b):
    close(a, b, rtol=0, atol=0)


@modes
@zoo
def test_the_first_vertex_is_the_source_exactly(name, mode):
    source, x = make(name, mode)
    model = el.to_subspace(source, n=3)
    with el.at(model, vertex=0):
        exact(flat(model(x)), flat(source(x)))
    exact(dict(model.named_buffers()), dict(source.named_buffers()))


@modes
@zoo
def test_anywhere_it_equals_the_plain_network_of_summed_weights(name, mode):
    source, x = make(name, mode)
    model = el.to_subspace(source, n=3, sigma=1.0)
    for alpha in (simplex(3), torch.full((3,), 1 / 3).double(), torch.tensor([-0.5, 1.2, 0.3])):
        assert_at(model, source, alpha.double(), x)


@zoo
def test_a_training_step_moves_every_vertex_as_explicit_vertices_move(name):
    source, x = make(name)
    if name == "spectral_norm":
        source[0].parametrizations.weight[0].eval()
    model = el.to_subspace(source, n=3, sigma=0.5)
    stacked = {k: leaf(p) for k, p in model.named_parameters()}
    for _ in range(2):
        buffers = copy.deepcopy(dict(model.named_buffers()))
        flat(model(x)).pow(2).sum().backward()
        (alpha,) = {m.subspace_point.alpha for m in subspaces(model)}
        flat(explicit(source, stacked, alpha, x, buffers=buffers)).pow(2).sum().backward()
        for k, p in model.named_parameters():
            used = stacked[k].grad.any()
            assert p.grad.flatten(1).any(1).all() == used
        for params in (model.parameters(), stacked.values()):
            opt = torch.optim.SGD(params, lr=0.01)
            opt.step(), opt.zero_grad()
    close(dict(model.named_parameters()), stacked)


def subspaces(model):
    return [m for m in model.modules() if hasattr(m, "subspace_point")]


@zoo
def test_members_and_the_collapsed_network_are_plain(name):
    source, x = make(name, mode=False)
    model = el.to_subspace(source, n=3, sigma=0.5)
    stacked = dict(model.named_parameters())
    alpha = simplex(3)
    for plain, weights in [
        (el.member(model, 0), [1, 0, 0]),
        (el.member(model, -1), [0, 0, 1]),
        (el.collapse(model), [1 / 3] * 3),
        (collapsed_at(model, alpha), alpha.tolist()),
    ]:
        assert classes(plain) == classes(source)
        assert plain.state_dict().keys() == source.state_dict().keys()
        for (k, m), m_ in zip(plain.named_modules(), source.modules(), strict=True):
            assert vars(m).keys() == vars(m_).keys(), k
            assert len(m._forward_pre_hooks) == len(m_._forward_pre_hooks)
        weights = torch.tensor(weights, dtype=torch.float64)
        close(flat(plain(x)), flat(explicit(source, stacked, weights, x)))
        source.load_state_dict(plain.state_dict(), strict=True)


def collapsed_at(model, alpha):
    with el.at(model, alpha):
        return el.collapse(model)


@zoo
def test_the_state_dict_of_a_member_is_a_slice(name):
    source, x = make(name, mode=False)
    model = el.to_subspace(source, n=3, sigma=0.5)
    parameters = {k for k, _ in model.named_parameters(remove_duplicate=False)}
    state = {k: v[1] if k in parameters else v for k, v in model.state_dict().items()}
    source.load_state_dict(state, strict=True)
    with el.at(model, vertex=1):
        close(flat(model(x)), flat(source(x)))


@zoo
def test_a_plain_state_dict_loads_as_the_first_vertex(name):
    source, x = make(name, mode=False)
    other, _ = make(name, mode=False)
    model = el.to_subspace(other, n=3)
    state = source.state_dict()
    before = {k: v.clone() for k, v in state.items()}
    assert not model.load_state_dict(state, strict=True).missing_keys
    with el.at(model, vertex=0):
        exact(flat(model(x)), flat(source(x)))
    exact(dict(state), before)


@zoo
def test_the_source_is_not_changed(name):
    source, x = make(name)
    state = copy.deepcopy(source.state_dict())
    before, hooks = classes(source), [len(m._forward_pre_hooks) for m in source.modules()]
    model = el.to_subspace(source, n=3)
    flat(model(x)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    el.collapse(model)
    exact(dict(source.state_dict()), dict(state))
    assert classes(source) == before
    assert [len(m._forward_pre_hooks) for m in source.modules()] == hooks
    assert all(p.grad is None for p in source.parameters())


@zoo
def test_collapsing_leaves_the_subspace_alone(name):
    source, x = make(name, mode=False)
    model = el.to_subspace(source, n=3, sigma=0.5)
    y, before = flat(model(x)), classes(model)
    plain = el.collapse(model)
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    assert classes(model) == before
    exact(flat(model(x)), y)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_state_dict(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    copied = scatter_(copy.deepcopy(model))
    copied.load_state_dict(torch.load(buffer), strict=True)
    return copied


def through_averaging(model):
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    return averaged.module


PICKLES = [through_pickle, through_save]
COPIES = [copy.deepcopy, through_state_dict, through_averaging]
# torch copies no outputs of a graph, which these leave as attributes.
GRAPHS = ("old_weight_norm", "old_weight_norm_root", "pruned")


@pytest.mark.parametrize(
    ("name", "duplicate"),
    [(name, f) for name in ZOO if name not in GRAPHS for f in COPIES]
    + [(name, f) for name in ZOO if name not in (*GRAPHS, *NOT_PICKLED) for f in PICKLES],
)
def test_copies_after_a_backward_pass_are_equal_and_independent(name, duplicate):
    source, x = make(name)
    model = el.to_subspace(source, n=3, sigma=0.5)
    flat(model(x)).sum().backward()
    model.eval()
    copied = duplicate(model)
    assert classes(copied) == classes(model)
    y = flat(model(x))
    exact(flat(copied(x)), y)
    alpha = subspaces(model)[0].subspace_point.alpha
    flat(copied.train()(x)).sum().backward()
    assert subspaces(model)[0].subspace_point.alpha.equal(alpha)
    assert len({id(m.subspace_point) for m in subspaces(copied)}) == 1
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    exact(flat(model(x)), y)


# ties and shared modules


def test_tied_parameters_stay_tied():
    model = el.to_subspace(Tied(), n=3)
    assert model.head.weight is model.embed._parameters["weight"]
    assert len(list(model.parameters())) == 3
    plain = el.collapse(model)
    assert plain.head.weight is plain.embed.weight


def test_shared_modules_stay_shared():
    model = el.to_subspace(Shared(), n=3)
    assert model.first is model.again is model.list[0]
    plain = el.member(model, 1)
    assert plain.first is plain.again is plain.list[0]


@pytest.mark.parametrize("left_out", ["embed", "head"])
def test_a_tie_across_the_filter_is_an_error_that_names_it(left_out):
    with pytest.raises(ValueError, match=rf"{left_out}\.weight is tied"):
        el.to_subspace(Tied(), n=3, where=lambda m, name: name != left_out)


# where=


def test_where_leaves_modules_plain():
    source = conv_net().double().eval()
    seen = {}
    model = el.to_subspace(
        source, n=3, where=lambda m, name: seen.update({name: m}) or not isinstance(m, nn.Conv2d)
    )
    assert {k: type(m) for k, m in seen.items()} == {
        k: type(m) for k, m in source.named_modules() if m._parameters.get("weight") is not None
    }
    assert type(model[0]) is nn.Conv2d and type(model[6]) is el.SubspaceLinear
    assert model[0].weight is not source[0].weight
    exact(model[0].weight, source[0].weight)
    x = torch.randn(2, 3, 6, 6).double()
    with el.at(model, vertex=0):
        exact(model(x), source(x))
    assert classes(el.collapse(model)) == classes(source)


def test_the_rest_can_be_converted_later():
    source = encoder().double().eval()
    x = torch.randn(2, 5, 4).double()
    norms = el.to_subspace(source, n=3, where=lambda m, _: isinstance(m, nn.LayerNorm))
    model = el.to_subspace(norms, n=3)
    assert len({id(m.subspace_point) for m in subspaces(model)}) == 1
    with el.at(model, vertex=0):
        exact(model(x), source(x))
    model.train()(x)
    plain = el.member(model, 0)
    assert classes(plain) == classes(source)
    for layer, layer_ in zip(plain.layers, source.layers, strict=True):
        assert layer.activation_relu_or_gelu == layer_.activation_relu_or_gelu


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: el.to_subspace(nn.ReLU(), n=3), "got ReLU"),
        (lambda: el.to_subspace(conv_net(), n=3, where=lambda m, n: False), "got Sequential"),
        (
            lambda: el.to_subspace(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), n=3),
            "1: its parameters are lazy",
        ),
        (
            lambda: el.to_subspace(nn.ModuleDict({"e": nn.Embedding(3, 2, sparse=True)}), n=3),
            "e: sparse gradients",
        ),
        (lambda: el.to_subspace(nn.LazyLinear(2), n=3), "the model: its parameters are lazy"),
        (lambda: el.to_subspace(torch.jit.trace(nn.Linear(2, 2), torch.ones(2)), n=3), "scripted"),
        (lambda: el.collapse(nn.Linear(2, 2)), "got Linear"),
        (lambda: el.member(nn.Linear(2, 2), 0), "got Linear"),
        (lambda: el.member(el.SubspaceLinear(2, 2, n=3), 3), r"0\.\.2, got 3"),
        (lambda: el.member(el.SubspaceLinear(2, 2, n=3), -4), r"0\.\.2, got -4"),
        (
            lambda: collapsed_at(el.SubspaceLinear(2, 2, n=3), el.sample_simplex(3, 4)),
            r"got alpha \[4, 3\]",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_errors_name_the_offending_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# modes, hooks, flags


def test_the_collapsed_network_is_at_the_midpoint_in_training_too():
    model = el.to_subspace(nn.Linear(3, 2), n=3, sigma=1.0)
    model(torch.ones(3))
    plain = el.collapse(model)
    assert plain.training
    close(plain.weight, model.weight.mean(0))


def test_hooks_stay_in_place_and_see_the_converted_module():
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    calls = []
    for kind in ("forward_pre", "forward", "full_backward"):
        register = getattr(source[0], f"register_{kind}_hook")
        register(lambda m, *_: calls.append(type(m)))
    model = el.to_subspace(source, n=3)
    model(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert calls == [el.SubspaceLinear] * 3
    calls.clear()
    el.collapse(model)(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert calls == [nn.Linear] * 3


def test_requires_grad_mode_dtype_and_buffers_carry_over():
    source = conv_net().to(torch.bfloat16)
    source[0].weight.requires_grad_(False)
    source[1].eval()
    source[1].running_mean.add_(1)
    model = el.to_subspace(source, n=3)
    for plain in (model, el.collapse(model)):
        for (k, p), q in zip(plain.named_parameters(), source.parameters(), strict=True):
            assert p.requires_grad == q.requires_grad == (k != "0.weight")
            assert p.dtype == torch.bfloat16
        assert [m.training for m in plain.modules()] == [m.training for m in source.modules()]
        exact(plain[1].running_mean, source[1].running_mean)
        assert plain[1].running_mean is not source[1].running_mean


def test_frozen_batch_norm_uses_the_networks_draw_and_its_own_statistics():
    source = scatter_(conv_net().double())
    model = el.to_subspace(source, n=3, sigma=0.5)
    model[1].eval(), source[1].eval()
    x = torch.randn(4, 3, 6, 6).double()
    mean = model[1].running_mean.clone()
    y = model(x)
    alpha = model[0].point.alpha
    close(y, explicit(source, dict(model.named_parameters()), alpha, x))
    assert not alpha.equal(torch.full((3,), 1 / 3).double())
    exact(model[1].running_mean, mean)


def test_batch_norm_statistics_belong_to_all_vertices():
    model = el.to_subspace(conv_net(), n=3)
    assert model[1].running_mean.shape == (4,)
    model(torch.randn(4, 3, 6, 6))
    assert model[1].num_batches_tracked == 1


def test_a_point_per_example_equals_the_loop_over_the_examples():
    source = scatter_(conv_net().double()).eval()
    model = el.to_subspace(source, n=3, sigma=0.5)
    assert_at(model, source, simplex(5, 3), torch.randn(5, 3, 6, 6).double())


@pytest.mark.parametrize("name", ["containers", "attention", "lstm", "encoder", "tied", "named"])
def test_a_point_per_example_where_it_can_not_be_is_an_error(name):
    source, x = make(name, mode=False)
    model = el.to_subspace(source, n=3)
    with (
        el.at(model, simplex(len(x), 3)),
        pytest.raises(ValueError, match=r"a point per example \(alpha \[\d, 3\]\) is for"),
    ):
        model(x)


def test_a_parametrization_is_applied_at_the_point():
    linear = nn.Linear(5, 5, dtype=torch.float64)
    model = el.to_subspace(nn.Sequential(parametrizations.orthogonal(linear)), n=3)
    weight = model[0].weight
    close(weight @ weight.T, torch.eye(5).double())


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_the_transformers_fast_path_is_at_the_point_too(norm_first, masked):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=norm_first)
    source = scatter_(nn.TransformerEncoder(layer, 2).double()).eval()
    model = el.to_subspace(source, n=3, sigma=0.5)
    x = torch.randn(2, 5, 4).double()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    for alpha in (simplex(3), torch.tensor([1.0, 0.0, 0.0]).double()):
        with torch.no_grad(), el.at(model, alpha):
            y = model(x, src_key_padding_mask=mask)
            z = el.collapse(model)(x, src_key_padding_mask=mask)
            plain = explicit(source, dict(model.named_parameters()), alpha, x, None, mask)
        assert not y.isnan().any()
        close(y, plain)
        close(z, plain)
    assert el.collapse(model).layers[0].activation_relu_or_gelu == 1


def test_a_converted_model_inside_another_draws_for_itself():
    inner = el.to_subspace(nn.Linear(3, 3), n=3)
    other = el.to_subspace(nn.Linear(3, 3), n=2)
    outer = nn.Sequential(inner, other)
    outer(torch.ones(3))
    assert inner.point.alpha.shape == (3,) and other.point.alpha.shape == (2,)
    first = inner.point.alpha
    outer(torch.ones(3))
    assert not inner.point.alpha.equal(first)


def test_functional_call_takes_stacked_parameters():
    model = el.to_subspace(scatter_(conv_net().double()), n=3).eval()
    other = {k: torch.randn_like(p) for k, p in model.named_parameters()}
    x = torch.randn(2, 3, 6, 6).double()
    y = torch.func.functional_call(model, other, (x,))
    model.load_state_dict(other, strict=False)
    exact(y, model(x))


# torchvision


def small_vit():
    return VisionTransformer(8, 4, 2, 2, 12, 24, num_classes=5)


def without_zeros(model):
    for p in model.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    return model


@pytest.mark.parametrize(
    ("build", "size"), [(resnet18, 32), (small_vit, 8)], ids=["resnet18", "vit"]
)
def test_torchvisions_models_equal_the_source_and_collapse_to_its_classes(build, size):
    source = without_zeros(build())
    model = el.to_subspace(source, n=3)
    x = torch.randn(2, 3, size, size)
    el.set_point(model, vertex=0)
    for mode in (True, False):
        source.train(mode), model.train(mode)
        exact(model(x), source(x))
    exact(dict(model.named_buffers()), dict(source.named_buffers()))
    el.set_point(model)
    plain = el.collapse(model)
    assert classes(plain) == classes(source)
    close(plain(x), model(x), rtol=1e-4, atol=1e-5)
    model.load_state_dict(source.state_dict(), strict=True)
    with torch.no_grad(), el.at(model, vertex=0):
        exact(model(x), source(x))


class ReadsItsChild(nn.Module):
    """A module that reads a child's parameters past the child's forward."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.linear(x, self.proj.weight, self.proj.bias)


def test_children_that_are_read_and_not_called_are_at_the_point():
    model = el.to_subspace(nn.Sequential(ReadsItsChild()), n=2, opaque=(ReadsItsChild,)).eval()
    x = torch.randn(5, 4)
    for i in range(2):
        with el.at(model, vertex=i):
            torch.testing.assert_close(model(x), el.member(model, i)(x), rtol=0, atol=0)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_windowed_transformer_equals_the_source(dims):
    options = {"depths": [1, 1], "num_heads": [2, 2], "num_classes": 5}
    if dims == 2:
        source = SwinTransformer([2, 2], 8, window_size=[4, 4], **options)
    else:
        source = SwinTransformer3d([2, 2, 2], 8, window_size=[2, 4, 4], **options)
    source = without_zeros(source).eval()
    model = el.to_subspace(source, n=2).eval()
    x = torch.randn(2, 3, *(16,) * dims)
    el.set_point(model, vertex=0)
    assert torch.equal(model(x), source(x))


@pytest.mark.parametrize(
    "layer",
    [el.SubspaceLinear(4, 3, bias=False, n=2), el.SubspaceConv2d(4, 3, 1, bias=False, n=2)],
    ids=["linear", "conv"],
)
def test_a_layer_without_bias_collapses_to_a_whole_plain_layer(layer):
    plain = el.collapse(layer)
    assert dict(plain._parameters).keys() == {"weight", "bias"} and plain.bias is None
    assert isinstance(el.to_subspace(plain, n=2), type(layer))


def test_a_large_vision_transformer_equals_the_source():
    source = without_zeros(vit_b_16(image_size=32)).eval()
    model = el.to_subspace(source, n=2)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad(), el.at(model, vertex=0):
        exact(model(x), source(x))
    assert classes(el.member(model, 0)) == classes(source)


@pytest.mark.parametrize("build", [resnet18, small_vit], ids=["resnet18", "vit"])
def test_every_vertex_of_torchvisions_models_gets_a_gradient(build):
    model = el.to_subspace(build(), n=3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(2, 3, *((32, 32) if build is resnet18 else (8, 8)))).sum().backward()
        for k, p in model.named_parameters():
            assert p.grad.flatten(1).any(1).all(), k


def test_frozen_layers_are_the_same_at_all_vertices():
    source = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    source[0].requires_grad_(False)
    model = el.to_subspace(source, n=3, sigma=0.5)
    for state in (None, source.state_dict()):
        if state:
            model.load_state_dict(state)
        assert all(torch.equal(v, source[0].weight) for v in model[0].weight)
        assert not torch.equal(model[1].weight[1], source[1].weight)


@pytest.mark.parametrize("model", [nn.ReLU(), el.to_subspace(nn.Linear(2, 2), n=2)])
def test_nothing_to_convert_is_an_error(model):
    with pytest.raises(ValueError, match="to convert"):
        el.to_subspace(model, n=3)


def test_layers_of_several_n_have_no_members():
    model = nn.Sequential(el.SubspaceLinear(2, 2, n=2), el.SubspaceLinear(2, 2, n=3))
    for call in (lambda: el.members(model, torch.zeros(1, 2)), lambda: el.member(model, 0)):
        with pytest.raises(ValueError, match=r"n=\[2, 3\]"):
            call()
