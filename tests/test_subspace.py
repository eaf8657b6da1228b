import copy
import io
import math
import pickle

import pytest
import torch
from plain import assert_at, explicit, flat, leaf, scatter_
from torch import nn

import ensemblayers as el

close = torch.testing.assert_close
CONV = {
    1: (nn.Conv1d, el.SubspaceConv1d),
    2: (nn.Conv2d, el.SubspaceConv2d),
    3: (nn.Conv3d, el.SubspaceConv3d),
}
CONV_OPTIONS = [
    {},
    {"bias": False},
    {"stride": 2},
    {"padding": 2},
    {"padding": "same"},
    {"padding": "valid"},
    {"padding": "same", "dilation": 2, "groups": 2},
    {"dilation": 2},
    {"groups": 4, "bias": False, "stride": 3},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "replicate", "stride": 2},
    {"padding": 1, "padding_mode": "circular", "groups": 2},
    {"padding": "same", "padding_mode": "circular", "dilation": 2},
    {"padding": "same", "padding_mode": "reflect", "bias": False},
]


def simplex(*size):
    *batch, n = size
    return el.sample_simplex(n, *batch, dtype=torch.float64)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (3, 7), (17, 31), (129, 2)])
def test_linear_equals_the_plain_layer_at_the_point(inner, outer, bias, each):
    layer = el.SubspaceLinear(inner, outer, bias, n=3, sigma=1.0, dtype=torch.float64)
    plain = nn.Linear(inner, outer, bias).double()
    assert_at(layer, plain, simplex(4, 3) if each else simplex(3), rand(4, inner))
    assert_at(layer, plain, simplex(4, 3) if each else simplex(3), rand(4, 2, 5, inner))


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("options", CONV_OPTIONS, ids=str)
def test_conv_equals_the_plain_layer_at_the_point(space, options, each):
    plain_class, subspace_class = CONV[space]
    plain = plain_class(4, 8, 3, **options).double()
    layer = subspace_class(4, 8, 3, **options, n=3, sigma=1.0, dtype=torch.float64)
    assert_at(layer, plain, simplex(2, 3) if each else simplex(3), rand(2, 4, *(6, 5, 7)[:space]))


@pytest.mark.parametrize("space", [1, 2, 3])
def test_conv_takes_options_per_dimension_and_by_position(space):
    plain_class, subspace_class = CONV[space]
    args = ((3, 2, 1)[:space], (2, 1, 2)[:space], (1, 0, 2)[:space], (1, 2, 1)[:space], 2, False)
    plain = plain_class(2, 4, *args).double()
    layer = subspace_class(2, 4, *args, n=2, sigma=1.0, dtype=torch.float64)
    assert_at(layer, plain, simplex(2), rand(2, 2, *(6, 5, 7)[:space]))
    assert_at(layer, plain, simplex(2), rand(2, *(6, 5, 7)[:space]))


def test_conv_keeps_the_channels_last_format():
    layer = el.SubspaceConv2d(8, 16, 3, n=3, dtype=torch.float64)
    plain = nn.Conv2d(8, 16, 3).double()
    x = rand(2, 8, 6, 6).to(memory_format=torch.channels_last)
    assert_at(layer, plain, simplex(3), x)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("to", [{}, {"dtype": torch.float32}])
def test_a_model_converts_to_the_channels_last_format(to):
    plain = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Unflatten(1, (1, 2)), nn.Conv2d(1, 3, 1)).double()
    model = el.to_subspace(plain, n=3)
    x = rand(2, 2, 4).to(**to)
    before = copy.deepcopy(model).to(**to).eval()(x)
    model = model.eval().to(memory_format=torch.channels_last, **to)
    close(model(x), before)
    assert model[2].weight.shape == (3, 3, 1, 1, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: el.SubspaceLinear(64, 10, n=3),
        lambda: el.SubspaceConv2d(4, 10, 3, n=3),
        lambda: el.Subspace(nn.Embedding(7, 10), n=3),
    ],
)
def test_a_moved_module_keeps_its_parameter_objects_and_values(make):
    layer = make()
    before = {k: (p, p.detach().clone()) for k, p in layer.named_parameters()}
    layer.to(torch.float64).share_memory()
    for name, p in layer.named_parameters():
        assert p is before[name][0] and p.is_shared()
        close(p.detach(), before[name][1].double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_in_half_precision_do_not_round_alpha(dtype):
    layer = el.SubspaceLinear(1, 5000, bias=False, n=7, sigma=1.0).to(dtype)
    alpha = el.sample_simplex(7)
    with el.at(layer, alpha):
        y = layer(torch.ones(1, 1, dtype=dtype))
    exact = (alpha.double() @ layer.weight.double().flatten(1)).detach()
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + 2e-6
    assert y.dtype == dtype
    assert ((y[0].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("each", [False, True])
def test_half_precision_layers_return_their_dtype(dtype, each):
    alpha = el.sample_simplex(3, 4) if each else el.sample_simplex(3)
    for layer, x in [
        (el.SubspaceLinear(4, 2, n=3, dtype=dtype), torch.ones(4, 4, dtype=dtype)),
        (el.SubspaceConv1d(4, 2, 3, n=3, dtype=dtype), torch.ones(4, 4, 5, dtype=dtype)),
        (el.Subspace(nn.LayerNorm(4, dtype=dtype), n=3), torch.ones(4, 4, dtype=dtype)),
    ]:
        with el.at(layer, alpha):
            y = layer(x)
        y.sum().backward()
        assert y.dtype == dtype
        assert all(p.grad.dtype == dtype for p in layer.parameters())


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: el.SubspaceLinear(600, 1000, n=3), lambda: nn.Linear(600, 1000)),
        (lambda: el.SubspaceConv2d(64, 512, 5, n=3), lambda: nn.Conv2d(64, 512, 5)),
        (
            lambda: el.SubspaceConv1d(64, 512, 9, groups=2, n=3),
            lambda: nn.Conv1d(64, 512, 9, groups=2),
        ),
    ],
)
def test_vertices_start_as_a_plain_layer_times_noise_of_mean_1_and_std_sigma(make, plain):
    layer, plain = make(), plain().weight.detach()
    weight = layer.weight.detach()
    assert weight[0].std().item() == pytest.approx(plain.std().item(), rel=1e-2)
    assert weight[0].abs().max() <= plain.abs().max() * 1.001
    assert layer.bias[0].std().item() == pytest.approx(plain.std().item(), rel=0.1)
    for w in weight[1:]:
        assert w.std().item() == pytest.approx(plain.std().item() * math.sqrt(1.01), rel=1e-2)
    noise = weight[1:] / weight[0] - 1
    for e in noise:
        assert abs(e.mean().item()) < 1e-3
        assert e.std().item() == pytest.approx(0.1, rel=1e-2)
    assert abs((noise[0] * noise[1]).mean().item()) < 1e-4
    bias_noise = layer.bias.detach()[1] / layer.bias.detach()[0] - 1
    assert bias_noise.std().item() == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_sigma_is_relative_to_the_first_vertex(sigma):
    norm = el.Subspace(nn.LayerNorm(20_000), n=2, sigma=sigma)
    weight = norm.state_dict()["weight"]
    assert weight[0].eq(1).all()
    assert weight[1].std().item() == pytest.approx(sigma, rel=2e-2)
    assert norm.state_dict()["bias"].eq(0).all()


@pytest.mark.parametrize("sigma", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        lambda s: el.SubspaceLinear(2, 2, n=2, sigma=s),
        lambda s: el.SubspaceConv1d(2, 2, 1, n=2, sigma=s),
        lambda s: el.Subspace(nn.LayerNorm(2), n=2, sigma=s),
        lambda s: el.to_subspace(nn.Linear(2, 2), n=2, sigma=s),
    ],
)
def test_an_impossible_sigma_is_named(make, sigma):
    with pytest.raises(ValueError, match=f"sigma={sigma!r}"):
        make(sigma)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"groups": 3}, "groups"), ({"padding_mode": "mirror"}, "mirror")],
)
def test_conv_refuses_what_the_plain_layer_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        el.SubspaceConv2d(4, 8, 3, n=2, **options)


def test_n_is_keyword_only():
    with pytest.raises(TypeError):
        el.SubspaceLinear(2, 2, True, 3)
    with pytest.raises(TypeError):
        el.SubspaceLinear(2, 2)


def test_layers_on_meta_are_initialised_later():
    with torch.device("meta"):
        model = nn.Sequential(el.SubspaceLinear(40, 50, n=2), el.Subspace(nn.LayerNorm(50), n=2))
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    weight = model[0].weight.detach()
    assert weight[0].abs().max() <= 1 / math.sqrt(40)
    assert (weight[1] / weight[0]).std().item() == pytest.approx(0.1, rel=0.2)
    assert model[1].state_dict()["weight"][0].eq(1).all()
    assert model(torch.zeros(3, 40)).shape == (3, 50)


def test_layers_show_their_options_and_n():
    text = repr(el.SubspaceConv2d(4, 8, 3, padding="same", groups=2, bias=False, n=5))
    for part in ("4, 8", "padding='same'", "groups=2", "bias=False", "n=5"):
        assert part in text
    assert "n=5" in repr(el.Subspace(nn.LayerNorm(2), n=5))


# Subspace: modules of any other class

NORMS = {
    "batch_norm1d": (lambda: nn.BatchNorm1d(4), (5, 4, 6)),
    "batch_norm1d_flat": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(4), (5, 4, 3, 2)),
    "batch_norm3d": (lambda: nn.BatchNorm3d(4, track_running_stats=False), (5, 4, 3, 2, 2)),
    "batch_norm_cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (5, 4, 3, 2)),
    "instance_norm": (lambda: nn.InstanceNorm2d(4, affine=True), (5, 4, 3, 2)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (5, 4, 3)),
    "group_norm_flat": (lambda: nn.GroupNorm(2, 4), (5, 4)),
    "layer_norm": (lambda: nn.LayerNorm(4), (5, 3, 4)),
    "layer_norm_2d": (lambda: nn.LayerNorm((3, 4)), (5, 3, 4)),
    "layer_norm_no_bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "rms_norm": (lambda: nn.RMSNorm(4), (5, 2, 3, 4)),
}
OTHERS = {
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=2), torch.tensor([[0, 2], [6, 0]])),
    "embedding_bag": (lambda: nn.EmbeddingBag(7, 3, mode="sum"), torch.tensor([[0, 2], [6, 0]])),
    "bilinear": (lambda: Twice(nn.Bilinear(3, 3, 2)), (4, 3)),
    "prelu": (lambda: nn.PReLU(4), (3, 4, 2)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2), (2, 2, 3, 3)),
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True), (5, 2, 3)),
    "lstm_projected": (lambda: nn.LSTM(3, 4, proj_size=2, bias=False), (5, 2, 3)),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), (2, 5, 3)),
    "rnn": (lambda: nn.RNN(3, 4), (5, 2, 3)),
    "gru_cell": (lambda: nn.GRUCell(3, 4), (2, 3)),
    "attributes": (lambda: Attributes(), (2, 3)),
}


class Twice(nn.Module):
    """A module of two inputs as one of one input."""

    def __new__(cls, module):
        forward = type(module).forward
        body = {"forward": lambda self, x: forward(self, x, x)}
        module.__class__ = type("Twice", (type(module),), body)
        return module


class Attributes(nn.Module):
    """Names that a wrapper could take for its own."""

    def __init__(self):
        super().__init__()
        self.n, self.point, self.sigma, self.alpha = 4, 2.0, "s", [1]
        self.kind = self.module = self.sparse = True
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return x * self.scale * self.point + self.n + len(self.sigma)


def tensor(x):
    return x if isinstance(x, torch.Tensor) else rand(*x)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", [*NORMS, *OTHERS])
def test_any_module_equals_the_plain_one_at_the_point(name, mode):
    make, x = (NORMS | OTHERS)[name]
    plain = scatter_(make().double()).train(mode)
    module = scatter_(el.Subspace(plain, n=3))
    assert isinstance(module, type(plain)) and module.training == mode
    for _ in range(2):
        assert_at(module, plain, simplex(3), tensor(x))


@pytest.mark.parametrize("name", [*NORMS, *OTHERS])
def test_any_module_draws_a_point_in_each_training_pass(name):
    make, x = (NORMS | OTHERS)[name]
    plain = scatter_(make().double())
    module = scatter_(el.Subspace(plain, n=3))
    x = tensor(x)
    stacked = dict(module.named_parameters())
    points = []
    for _ in range(2):
        y = flat(module(x))
        points.append(module.subspace_point.alpha)
        close(y, flat(explicit(plain, stacked, points[-1], x)))
    assert not points[0].equal(points[1])


@pytest.mark.parametrize("name", NORMS)
def test_norms_take_a_point_per_example(name):
    make, shape = NORMS[name]
    plain = scatter_(make().double()).eval()
    if name == "batch_norm3d":
        plain.track_running_stats, plain.running_mean = True, torch.zeros(4).double()
        plain.running_var = torch.ones(4).double()
    module = scatter_(el.Subspace(plain, n=3))
    assert_at(module, plain, simplex(5, 3), rand(*shape))


class Relu(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.PReLU(), torch.ones(2, 3)),
        (nn.Embedding(3, 3), torch.tensor([0, 1])),
        (nn.GRU(3, 3), torch.ones(2, 1, 3)),
        (Relu(4), torch.ones(2, 4, 4, 4)),
        (ChannelsFirst(4), torch.ones(2, 4, 4, 4)),
    ],
)
def test_a_point_per_example_elsewhere_is_an_error_that_names_the_class(module, x):
    module = el.Subspace(module, n=3)
    with (
        el.at(module, el.sample_simplex(3, 2)),
        pytest.raises(
            ValueError, match=rf"\[2, 3\].*not for {type(module).subspace_kind.__name__}"
        ),
    ):
        module(x)


def test_a_point_per_example_needs_as_many_points_as_examples():
    norm = el.Subspace(nn.LayerNorm(4), n=3)
    with (
        el.at(norm, el.sample_simplex(3, 2)),
        pytest.raises(ValueError, match=r"5 examples of x \[5, 4\], got alpha \[2, 3\]"),
    ):
        norm(torch.ones(5, 4))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.index = nn.Parameter(torch.arange(3), requires_grad=False)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LazyLinear(3), "LazyLinear .*lazy; run it once"),
        (nn.Embedding(3, 2, sparse=True), "Embedding .*sparse=False"),
        (nn.ReLU(), "ReLU .*no parameters of its own"),
        (nn.BatchNorm1d(3, affine=False), "BatchNorm1d .*no parameters of its own"),
        (Whole(), "Whole .*torch.int64"),
        (el.SubspaceLinear(2, 2, n=3), "SubspaceLinear .*already"),
        (el.Subspace(nn.LayerNorm(2), n=3), "SubspaceLayerNorm .*already"),
    ],
)
def test_modules_that_can_not_be_stacked_are_refused(module, message):
    with pytest.raises(ValueError, match=message):
        el.Subspace(module, n=3)


def test_a_subspace_leaves_its_source_alone():
    source = nn.BatchNorm1d(3)
    before = copy.deepcopy(source.state_dict())
    module = el.Subspace(source, n=2)
    module(torch.randn(5, 3)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    close(source.state_dict(), before, rtol=0, atol=0)
    assert source.weight.grad is None and type(source) is nn.BatchNorm1d


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_of_the_module_see_the_point_of_the_same_pass():
    plain = nn.utils.weight_norm(nn.Linear(3, 2)).double()
    module = scatter_(el.Subspace(plain, n=3))
    x = rand(4, 3)
    for _ in range(3):
        y = module(x)
        alpha = module.subspace_point.alpha
        close(y, explicit(plain, dict(module.named_parameters()), alpha, x))


def test_a_recurrent_layer_takes_new_parameters():
    plain = nn.LSTM(3, 4).double()
    module = el.Subspace(plain, n=2)
    module(rand(5, 2, 3))
    module.weight_ih_l0 = nn.Parameter(rand(2, 16, 3))
    assert_at(module, plain, simplex(2), rand(5, 2, 3))


def test_a_recurrent_layer_takes_packed_sequences():
    plain = nn.LSTM(3, 4, batch_first=True).double()
    module = el.Subspace(plain, n=3, sigma=1.0)
    packed = nn.utils.rnn.pack_padded_sequence(rand(2, 5, 3), [5, 3], batch_first=True)
    alpha = simplex(3)
    with el.at(module, alpha):
        output, state = module(packed)
    output_, state_ = explicit(plain, dict(module.named_parameters()), alpha, packed)
    close(output.data, output_.data)
    close(state, state_)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(5, 40), lambda: nn.Linear(5, 80)])
def test_reset_parameters_starts_all_vertices_anew(make):
    plain = make()
    module = scatter_(el.Subspace(plain, n=3, sigma=0.01), std=9.0)
    module.reset_parameters()
    for name, p in module.named_parameters():
        bound = getattr(plain, name).abs().max() * 1.2
        assert p.abs().max() < bound
        close(p[1:], p[:1].expand_as(p[1:]), rtol=0.06, atol=0)
        assert not p[1].equal(p[0])


# training

LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), lambda: el.SubspaceLinear(3, 2, n=3), (4, 3)),
    "conv": (lambda: nn.Conv1d(3, 2, 2), lambda: el.SubspaceConv1d(3, 2, 2, n=3), (4, 3, 5)),
    "norm": (lambda: nn.LayerNorm(3), lambda: el.Subspace(nn.LayerNorm(3), n=3), (4, 3)),
    "gru": (lambda: nn.GRU(3, 2), lambda: el.Subspace(nn.GRU(3, 2), n=3), (4, 1, 3)),
}
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", LAYERS)
def test_training_moves_every_vertex_as_explicit_vertices_move(kind, optimizer):
    make, make_subspace, shape = LAYERS[kind]
    plain, layer = make().double(), scatter_(make_subspace().double())
    stacked = {k: leaf(p) for k, p in layer.named_parameters()}
    opt, opt_ = optimizer(layer.parameters()), optimizer(stacked.values())
    for _ in range(3):
        x = rand(*shape)
        opt.zero_grad(), opt_.zero_grad()
        flat(layer(x)).pow(2).sum().backward()
        alpha = layer.subspace_point.alpha
        flat(explicit(plain, stacked, alpha, x)).pow(2).sum().backward()
        for p in layer.parameters():
            assert p.grad.flatten(1).any(1).all()
        opt.step(), opt_.step()
    close(dict(layer.named_parameters()), stacked)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_have_derivatives_of_second_order(kind):
    _, make, shape = LAYERS[kind]
    layer = scatter_(make().double())
    names = [k for k, _ in layer.named_parameters()]
    values = [leaf(p) for p in layer.parameters()]
    x = rand(2, *shape[1:]).requires_grad_()

    def f(x, alpha, *values):
        with el.at(layer, alpha):
            params = dict(zip(names, values, strict=True))
            return flat(torch.func.functional_call(layer, params, (x,))).pow(2).sum()

    inputs = (x, simplex(3).requires_grad_(), *values)
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs, gen_non_contig_grad_outputs=True)


# copies and checkpoints


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_save(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_averaging(module):
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)
    return averaged.module


COPIES = [copy.deepcopy, through_pickle, through_save, through_averaging]


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("kind", LAYERS)
def test_copies_after_a_backward_pass_are_equal_and_independent(kind, duplicate):
    _, make, shape = LAYERS[kind]
    layer = make().double()
    flat(layer(rand(*shape))).sum().backward()
    el.set_point(layer, leaf(simplex(3)) * 1)
    copied = duplicate(layer)
    x = rand(*shape)
    close(flat(copied(x)), flat(layer(x)), rtol=0, atol=0)
    assert type(copied) is type(layer) and repr(copied) == repr(layer)
    el.set_point(layer)
    flat(layer(x)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    flat(copied(x)).sum().backward()
    for p, q in zip(copied.parameters(), layer.parameters(), strict=True):
        assert not p.equal(q)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_plain_state_dict_becomes_the_first_vertex(kind):
    make, make_subspace, shape = LAYERS[kind]
    plain, layer = make(), make_subspace()
    state = plain.state_dict()
    layer.load_state_dict(state, strict=True)
    x = torch.randn(*shape)
    with el.at(layer, vertex=0):
        close(flat(layer(x)), flat(plain(x)), rtol=0, atol=0)
    for p in layer.parameters():
        close(p[1:], p[:1].expand_as(p[1:]), rtol=0.6, atol=0)
        assert p[0].eq(0).all() or not p[1].equal(p[0])
    close(state, plain.state_dict(), rtol=0, atol=0)


def test_a_state_dict_of_another_number_of_vertices_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        el.SubspaceLinear(2, 2, n=3).load_state_dict(el.SubspaceLinear(2, 2, n=4).state_dict())


# All weights mixed at once


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
