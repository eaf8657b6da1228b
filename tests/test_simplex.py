import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import ensemblayers as el


@pytest.mark.parametrize("n", [1, 2, 3, 7, 33])
def test_draws_are_non_negative_and_sum_to_one(n):
    draws = el.sample_simplex(n, 5, 4, dtype=torch.float64)
    assert draws.shape == (5, 4, n)
    assert (draws >= 0).all()
    torch.testing.assert_close(draws.sum(-1), torch.ones(5, 4, dtype=torch.float64))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_draws_are_uniform_on_the_simplex(n):
    draws = el.sample_simplex(n, 50_000, dtype=torch.float64).numpy()
    np.testing.assert_allclose(draws.mean(0), 1 / n, atol=5e-3)
    uniform = (np.eye(n) * n - 1) / (n**2 * (n + 1))
    np.testing.assert_allclose(np.cov(draws.T), uniform, atol=2e-3)
    for marginal in draws.T:
        assert stats.kstest(marginal, stats.beta(1, n - 1).cdf).pvalue > 1e-3


@pytest.mark.parametrize("n", [2, 3])
def test_a_networks_draws_in_training_are_uniform(n):
    layer = el.SubspaceLinear(1, 1, n=n)
    x = torch.zeros(1, 1)
    draws = []
    for _ in range(2000):
        layer(x)
        draws.append(layer.point.alpha)
    marginals = torch.stack(draws).double().numpy().T
    for marginal in marginals:
        assert stats.kstest(marginal, stats.beta(1, n - 1).cdf).pvalue > 1e-3


def test_the_generator_decides_the_draw():
    def draw(seed):
        return el.sample_simplex(4, 3, generator=torch.Generator().manual_seed(seed))

    assert draw(1).equal(draw(1))
    assert not draw(1).equal(draw(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_draws_of_one_vertex_are_exactly_one(dtype):
    assert el.sample_simplex(1, 10_000, dtype=dtype).equal(torch.ones(10_000, 1, dtype=dtype))


@pytest.mark.parametrize("n", [1, 4])
def test_draws_of_exactly_zero_are_no_division_by_zero(n, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_())
    torch.testing.assert_close(el.sample_simplex(n), torch.full((n,), 1 / n))


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None, "3"])
@pytest.mark.parametrize(
    "make",
    [
        el.sample_simplex,
        el.Point,
        lambda n: el.SubspaceLinear(2, 2, n=n),
        lambda n: el.Subspace(nn.LayerNorm(2), n=n),
        lambda n: el.to_subspace(nn.Linear(2, 2), n=n),
    ],
)
def test_an_impossible_number_of_members_is_named(make, n):
    with pytest.raises(ValueError, match=rf"got n={n!r}"):
        make(n)


def net(n=3, **dd):
    return nn.Sequential(el.SubspaceLinear(2, 4, n=n, **dd), nn.Sequential(nn.ReLU(), el_norm(n)))


def el_norm(n):
    return el.Subspace(nn.LayerNorm(4), n=n)


def alphas(model):
    return [m.subspace_point.alpha for m in model.modules() if hasattr(m, "subspace_point")]


def test_layers_with_points_of_their_own_draw_their_own():
    model = net()
    model(torch.zeros(1, 2))
    first, second = alphas(model)
    assert not first.equal(second)


def test_a_shared_point_is_drawn_once_per_forward_of_the_owner():
    model = net()
    point = el.share_point(model)
    seen = []
    for _ in range(3):
        model(torch.zeros(1, 2))
        assert all(a is point.alpha for a in alphas(model))
        seen.append(point.alpha)
    assert not seen[0].equal(seen[1])
    model[0](torch.zeros(1, 2))
    assert point.alpha is seen[2]


def test_a_step_takes_one_draw_from_the_generator():
    model = nn.Sequential(net())
    el.share_point(model[0])
    el.share_point(model)
    torch.manual_seed(5)
    model(torch.zeros(1, 2))
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert alphas(model)[0].equal(el.sample_simplex(3))
    assert torch.get_rng_state().equal(state)


def test_sharing_again_moves_the_ownership():
    model = net()
    inner = el.share_point(model)
    outer_model = nn.Sequential(model)
    outer = el.share_point(outer_model)
    outer_model(torch.zeros(1, 2))
    before = outer.alpha
    model(torch.zeros(1, 2))
    assert outer.alpha is before
    assert inner not in [m.subspace_point for m in outer_model.modules() if hasattr(m, "point")]


def test_a_point_that_is_handed_in_is_the_one_shared():
    model, point = net(), el.Point(3)
    assert el.share_point(model, point) is point
    assert model[0].point is point


def test_evaluation_is_at_the_midpoint_and_draws_nothing():
    model = net().eval()
    state = torch.get_rng_state()
    model(torch.zeros(1, 2))
    assert torch.get_rng_state().equal(state)
    assert all(a.equal(torch.full((3,), 1 / 3)) for a in alphas(model))


def test_the_owners_mode_decides_for_a_frozen_part():
    model = net()
    point = el.share_point(model)
    model[1].eval()
    model(torch.zeros(1, 2))
    assert all(a is point.alpha for a in alphas(model))
    assert not point.alpha.equal(torch.full((3,), 1 / 3))


@pytest.mark.parametrize("mode", [True, False])
def test_a_set_point_holds_in_both_modes_until_released(mode):
    model = net().train(mode)
    el.set_point(model, [0.2, 0.3, 0.5])
    state = torch.get_rng_state()
    model(torch.zeros(1, 2))
    assert torch.get_rng_state().equal(state)
    assert all(a.equal(torch.tensor([0.2, 0.3, 0.5])) for a in alphas(model))
    el.set_point(model)
    model(torch.zeros(1, 2))
    assert all(a.equal(torch.full((3,), 1 / 3)) != mode for a in alphas(model))


@pytest.mark.parametrize(("vertex", "expected"), [(0, [1, 0, 0]), (2, [0, 0, 1]), (-2, [0, 1, 0])])
def test_a_vertex_is_a_one_hot_point(vertex, expected):
    model = net()
    el.set_point(model, vertex=vertex)
    assert all(a.tolist() == expected for a in alphas(model))


def test_at_restores_what_was_set_before_also_after_an_error():
    model = net().eval()
    el.set_point(model, vertex=1)
    with contextlib.suppress(ZeroDivisionError), el.at(model, [0.5, 0.5, 0.0]):
        with el.at(model):
            assert alphas(model)[0].tolist() == pytest.approx([1 / 3] * 3)
        assert alphas(model)[0].tolist() == [0.5, 0.5, 0.0]
        raise ZeroDivisionError
    assert all(a.tolist() == [0, 1, 0] for a in alphas(model))


def test_at_restores_each_layers_own_point():
    model = net().eval()
    el.set_point(model[0], vertex=1)
    with el.at(model, vertex=2):
        pass
    assert [a.tolist() for a in alphas(model)] == [[0, 1, 0], pytest.approx([1 / 3] * 3)]


def test_a_set_point_carries_gradients():
    model = net().double()
    alpha = torch.tensor([0.2, 0.3, 0.5], requires_grad=True)
    with el.at(model, alpha):
        model(torch.randn(3, 2).double()).pow(2).sum().backward()
    assert (alpha.grad != 0).all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex128, torch.float64),
    ],
)
def test_alpha_has_at_least_single_precision(dtype, expected):
    layer = el.SubspaceLinear(2, 2, n=3).to(dtype)
    x = torch.zeros(1, 2, dtype=dtype)
    layer(x)
    assert layer.point.alpha.dtype == expected
    layer.eval()
    assert layer.point.alpha.dtype == expected
    el.set_point(layer, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
    assert layer.point.alpha.dtype == expected


def test_the_point_is_no_part_of_the_state_dict():
    assert list(net().state_dict()) == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: el.set_point(m, [0.5, 0.5]), r"\[3\] or \[B, 3\].*got \[2\]"),
        (lambda m: el.set_point(m, torch.ones(3, 4)), r"got \[3, 4\]"),
        (lambda m: el.set_point(m, torch.ones(2, 2, 3)), r"got \[2, 2, 3\]"),
        (lambda m: el.set_point(m, torch.tensor(1.0)), r"got \[\]"),
        (lambda m: el.set_point(m, vertex=3), r"0\.\.2, got 3"),
        (lambda m: el.set_point(m, vertex=-4), r"0\.\.2, got -4"),
        (lambda m: el.set_point(m, vertex=0.5), r"0\.\.2, got 0\.5"),
        (lambda m: el.set_point(m, [1.0, 0.0, 0.0], vertex=1), r"alpha=\[1.*vertex=1"),
        (lambda m: el.set_point(nn.Linear(2, 2), vertex=0), "got Linear"),
        (lambda m: el.set_point(nn.ReLU(), vertex=0), "got ReLU"),
        (lambda m: el.share_point(nn.ReLU()), "got ReLU"),
        (lambda m: el.share_point(m, el.Point(4)), r"n=3 vertices, got n=4"),
        (lambda m: el.share_point(nn.Sequential(m, el_norm(2))), r"got n=\[2, 3\]"),
    ],
)
def test_errors_name_the_offending_value(call, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        call(model)


def test_a_copy_draws_for_itself():
    model = net()
    point = el.share_point(model)
    model(torch.zeros(1, 2))
    before = point.alpha
    copied = copy.deepcopy(model)
    copied(torch.zeros(1, 2))
    assert point.alpha is before
    assert not copied[0].point.alpha.equal(before)
    assert copied[0].point is copied[1][1].subspace_point


def test_a_copy_of_a_part_does_not_take_the_network_along():
    model = nn.Sequential(el.SubspaceLinear(2, 2, n=3), el.SubspaceLinear(200, 200, n=3))
    el.share_point(model)
    model[0](torch.zeros(1, 2))
    assert len(pickle.dumps(model[0])) < 10_000


def test_an_earlier_graph_keeps_its_own_draw():
    model = el.SubspaceLinear(2, 2, n=3, dtype=torch.float64)
    x = torch.randn(4, 2, dtype=torch.float64)
    y = model(x).sum()
    alpha = model.point.alpha
    model(x)
    (grad,) = torch.autograd.grad(y, model.bias)
    torch.testing.assert_close(grad, 4 * alpha[:, None].expand(3, 2))
