"""``Subspace`` of modules of any class: norms, embeddings, recurrent layers, own ones."""

import copy

import pytest
import torch
from plain import assert_at, explicit, flat, scatter_
from points import rand, simplex
from torch import nn

import ensemblayers as el

close = torch.testing.assert_close

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
