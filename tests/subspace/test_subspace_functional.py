"""The functions of subspaces: mix, subspace_linear, subspace_conv."""

import pytest
import torch
import torch.nn.functional as F
from derivatives import CONV, assert_same, rand, simplex, strided
from hypothesis import given, settings
from hypothesis import strategies as st

import ensemblayers as el
from ensemblayers import functional as EF

SIZES = [1, 2, 3, 7, 15, 17, 31, 33, 127, 129]
property_test = settings(max_examples=30, deadline=None, derandomize=True)
close = torch.testing.assert_close


def weighted(stacked, alpha):
    return sum(alpha[i] * stacked[i] for i in range(len(stacked)))


def per_example(f, x, weight, bias, alpha):
    """f at each example's own weighted sum of weights."""
    rows = [
        f(x[b : b + 1], weighted(weight, a), None if bias is None else weighted(bias, a))
        for b, a in enumerate(alpha)
    ]
    return torch.cat(rows)


# mix


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 2), (2, 1, 3, 2), (0, 4), (4, 0)])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_mix_is_the_weighted_sum(n, shape):
    stacked, alpha = rand(n, *shape), simplex(n)
    assert_same(
        lambda: EF.mix(stacked, alpha), lambda: weighted(stacked, alpha) + 0, stacked, alpha
    )


@pytest.mark.parametrize("batch", [0, 1, 4])
def test_mix_at_many_points_is_mix_at_each(batch):
    stacked, alpha = rand(3, 2, 5), simplex(batch, 3)
    mixed = EF.mix(stacked, alpha)
    assert mixed.shape == (batch, 2, 5)
    for row, a in zip(mixed, alpha, strict=True):
        close(row, weighted(stacked, a))


@pytest.mark.parametrize("batch", [(), (2,)])
def test_mix_has_first_and_second_derivatives(batch):
    inputs = (rand(3, 2, 2), simplex(*batch, 3))
    assert torch.autograd.gradcheck(EF.mix, inputs)
    assert torch.autograd.gradgradcheck(EF.mix, inputs)


def test_mix_takes_any_strides():
    base = rand(6, 4, 3, grad=False)
    for stacked in (base.transpose(0, 2), base[::2], base.flip(1), base[:1].expand(3, 4, 3)):
        leaf = stacked.detach().clone().requires_grad_()
        view, alpha = stacked.detach().requires_grad_(), simplex(len(stacked))
        g = torch.randn(*stacked.shape[1:]).double().t().contiguous().t()
        out = EF.mix(view, alpha)
        close(out, weighted(leaf, alpha))
        close(
            torch.autograd.grad(out, view, g), torch.autograd.grad(weighted(leaf, alpha), leaf, g)
        )
    alpha = torch.tensor([0.5], dtype=torch.float64).expand(2)
    close(EF.mix(base[:2], alpha), base[:2].mean(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (4,)])
def test_mix_of_half_precision_rounds_once_and_not_alpha(dtype, batch):
    stacked, alpha = torch.randn(5, 4000).to(dtype), el.sample_simplex(5, *batch)
    exact = alpha.double() @ stacked.double()
    mixed = EF.mix(stacked, alpha)
    assert mixed.dtype == dtype
    error = (mixed.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps / 2 + 2e-6).all()


def test_autocast_leaves_mix_as_it_is():
    stacked, alpha = torch.randn(3, 40), el.sample_simplex(3)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = EF.mix(stacked, alpha)
    assert mixed.dtype == torch.float32
    close(mixed, EF.mix(stacked, alpha), rtol=0, atol=0)


def test_gradients_of_a_large_stack():
    """Of a megabyte and more their memory is kept; the values are those of any other."""
    stacked, alpha = rand(3, 300, 200), simplex(3)
    kept = []
    for _ in range(3):
        out = EF.mix(stacked, alpha)
        close(out, weighted(stacked, alpha))
        g = torch.randn_like(out)
        found = torch.autograd.grad(out, (stacked, alpha), g)
        close(found, torch.autograd.grad(weighted(stacked, alpha), (stacked, alpha), g))
        kept.append((found[0], found[0].clone()))
    for grad, copy in kept:  # None was overwritten while it was in use.
        assert torch.equal(grad, copy)
    once = torch.autograd.grad(EF.mix(stacked, alpha).pow(2).sum(), alpha, create_graph=True)[0]
    twice = torch.autograd.grad(weighted(stacked, alpha).pow(2).sum(), alpha, create_graph=True)[0]
    close(
        torch.autograd.grad(once.sum(), (stacked, alpha)),
        torch.autograd.grad(twice.sum(), (stacked, alpha)),
    )
    (alone,) = torch.autograd.grad(EF.mix(stacked, alpha.detach()).sum(), stacked)
    close(alone, alpha.detach().view(3, 1, 1).expand_as(stacked).contiguous())


@pytest.mark.parametrize("shape", [(2,), (5, 2), (4,)])
def test_mix_names_a_wrong_number_of_weights(shape):
    with pytest.raises(ValueError, match=rf"expected 3 weights .*got alpha \[{shape[0]}"):
        EF.mix(torch.zeros(3, 7), torch.zeros(shape))


# subspace_linear


@pytest.mark.parametrize("shape", [(2,), (4, 2)])
def test_subspace_linear_names_a_wrong_number_of_weights(shape):
    with pytest.raises(ValueError, match=r"expected 3 weights .*got alpha"):
        EF.subspace_linear(rand(4, 5), rand(3, 2, 5), None, torch.zeros(shape))


@property_test
@given(
    n=st.integers(1, 4),
    batch=st.integers(0, 4),
    lead=st.lists(st.integers(0, 3), max_size=2),
    inner=st.integers(1, 5),
    outer=st.integers(1, 5),
    bias=st.booleans(),
    each=st.booleans(),
)
def test_subspace_linear_equals_linear_at_the_point(n, batch, lead, inner, outer, bias, each):
    x, weight = rand(batch, *lead, inner), rand(n, outer, inner)
    bias = rand(n, outer) if bias else None
    alpha = simplex(batch, n) if each else simplex(n)

    def reference():
        if not each:
            return F.linear(
                x, weighted(weight, alpha), None if bias is None else weighted(bias, alpha)
            )
        if not batch:
            return x.new_zeros(0, *lead, outer) + 0 * sum(t.sum() for t in used)
        return per_example(F.linear, x, weight, bias, alpha)

    used = [t for t in (x, weight, bias, alpha) if t is not None]
    assert_same(lambda: EF.subspace_linear(x, weight, bias, alpha), reference, *used)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(("inner", "outer"), list(zip(SIZES, SIZES[::-1], strict=True)))
def test_subspace_linear_at_odd_sizes(inner, outer, each):
    x, weight, bias = rand(3, inner), rand(3, outer, inner), rand(3, outer)
    alpha = simplex(3, 3) if each else simplex(3)
    rows = alpha if each else alpha.expand(3, 3)
    assert_same(
        lambda: EF.subspace_linear(x, weight, bias, alpha),
        lambda: per_example(F.linear, x, weight, bias, rows),
        x,
        weight,
        bias,
        alpha,
    )


@pytest.mark.parametrize("batch", [(), (2,)])
def test_subspace_linear_has_first_and_second_derivatives(batch):
    inputs = (rand(2, 3), rand(2, 2, 3), rand(2, 2), simplex(*batch, 2))
    assert torch.autograd.gradcheck(EF.subspace_linear, inputs)
    assert torch.autograd.gradgradcheck(EF.subspace_linear, inputs)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("op", ["linear", "conv"])
def test_strided_inputs_and_incoming_gradients(op, each):
    weight = rand(3, 4, 5) if op == "linear" else rand(3, 4, 5, 2, 2)
    x, bias = rand(6, 5, *(() if op == "linear" else (3, 3)), grad=False), rand(3, 4)
    alpha = simplex(6, 3) if each else simplex(3)
    rows = alpha if each else alpha.expand(6, 3)
    f, plain = (EF.subspace_linear, F.linear) if op == "linear" else (EF.subspace_conv, F.conv2d)
    consumers = [
        lambda y: y.sum(),
        lambda y: y[::2].pow(2).sum(),
        lambda y: y.transpose(0, 1).pow(3).sum(),
        lambda y: torch.cat([y, 2 * y], 1)[:, 1:].pow(2).sum(),
        lambda y: y.mean(0).expand(3, *y.shape[1:]).sum(),
        lambda y: torch.outer(torch.arange(1.0, 7).double(), y.flatten(1).sum(1)).sum(),
    ]
    for view in strided(x):
        for consume in consumers:
            view = view.detach().requires_grad_()
            assert_same(
                lambda v=view, c=consume: c(f(v, weight, bias, alpha)),
                lambda v=view, c=consume: c(per_example(plain, v, weight, bias, rows)),
                view,
                weight,
                bias,
                alpha,
            )


# subspace_conv


@property_test
@given(data=st.data())
def test_subspace_conv_equals_conv_at_the_point(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    space, groups = draw(1, 2, 3), draw(1, 2)
    padding = draw(0, 1, "valid", "same", (1,) * space)
    options = {
        "stride": 1 if padding == "same" else draw(1, 2, (2,) + (1,) * (space - 1)),
        "padding": padding,
        "dilation": draw(1, 2),
        "groups": groups,
    }
    n, batch, each = draw(1, 3), draw(1, 3), draw(False, True)
    x = rand(batch, groups * draw(1, 2), *(draw(5, 6) for _ in range(space)))
    weight = rand(n, groups * 2, x.shape[1] // groups, *(draw(1, 2) for _ in range(space)))
    bias = rand(n, groups * 2) if draw(False, True) else None
    alpha = simplex(batch, n) if each else simplex(n)
    rows = alpha if each else alpha.expand(batch, n)
    assert_same(
        lambda: EF.subspace_conv(x, weight, bias, alpha, **options),
        lambda: per_example(lambda *args: CONV[space](*args, **options), x, weight, bias, rows),
        x,
        weight,
        bias,
        alpha,
    )


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("space", [1, 2, 3])
def test_subspace_conv_has_first_and_second_derivatives(space, batch):
    kernel = (2,) + (1,) * (space - 1)
    x = rand(2, 2, 3, *(1,) * (space - 1))
    inputs = (x, rand(2, 2, 1, *kernel), rand(2, 2), simplex(*batch, 2))

    def f(*args):
        return EF.subspace_conv(*args, groups=2)

    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("space", [1, 2, 3])
def test_subspace_conv_without_a_batch_dimension(space):
    x, weight, bias = rand(2, *(4,) * space), rand(3, 5, 2, *(3,) * space), rand(3, 5)
    alpha = simplex(3)
    assert_same(
        lambda: EF.subspace_conv(x, weight, bias, alpha),
        lambda: CONV[space](x, weighted(weight, alpha), weighted(bias, alpha)),
        x,
        weight,
        bias,
        alpha,
    )


@pytest.mark.parametrize("each", [False, True])
def test_an_empty_batch_has_an_empty_output_and_zero_gradients(each):
    alpha = simplex(0, 3) if each else simplex(3)
    weight, kernel, bias = rand(3, 4, 2), rand(3, 4, 2, 3, 3), rand(3, 4)
    for y, w in [
        (EF.subspace_linear(rand(0, 2), weight, bias, alpha), weight),
        (EF.subspace_linear(rand(0, 7, 2), weight, bias, alpha), weight),
        (EF.subspace_conv(rand(0, 2, 5, 5), kernel, bias, alpha), kernel),
    ]:
        assert y.shape[0] == 0 and y.shape.numel() == 0
        assert not any(g.any() for g in torch.autograd.grad(y.sum(), [w, bias, alpha]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: EF.subspace_linear(torch.zeros(4, 2), torch.zeros(3, 1, 2), None, a), "4 exam"),
        (lambda a: EF.subspace_linear(torch.zeros(5), torch.zeros(3, 1, 5), None, a), r"x \[5\]"),
        (
            lambda a: EF.subspace_conv(torch.zeros(4, 2, 3), torch.zeros(3, 1, 2, 3), None, a),
            r"4 examples of x \[4, 2, 3\], got alpha \[5, 3\]",
        ),
        (
            lambda a: EF.subspace_conv(torch.zeros(5, 3), torch.zeros(3, 1, 5, 3), None, a),
            r"got x \[5, 3\]",
        ),
    ],
)
def test_points_that_do_not_match_the_examples_are_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.full((5, 3), 1 / 3))


# 1x1 convolutions as linear layers


@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize(
    ("options", "linear"),
    [
        ({}, True),
        ({"padding": "same"}, True),
        ({"dilation": 2}, True),
        ({"padding": 1}, False),
        ({"stride": 2}, False),
        ({"groups": 2}, False),
    ],
)
def test_a_1x1_convolution_goes_through_the_linear_where_that_is_fused(
    space, options, linear, monkeypatch
):
    calls = []

    def fused_linear(x, weight, bias, alpha):
        calls.append(x.shape)
        return EF.F.linear(x, EF.mix(weight, alpha), EF.mix(bias, alpha))

    monkeypatch.setattr(EF.ops.subspace_linear, "is_fused", lambda *tensors: True)
    monkeypatch.setattr(EF, "subspace_linear", fused_linear)
    x = rand(2, 4, *[5, 4, 3][:space], grad=False).movedim(1, -1).contiguous().movedim(-1, 1)
    groups = options.get("groups", 1)
    weight, bias, alpha = rand(3, 6, 4 // groups, *[1] * space), rand(3, 6), simplex(3)
    y = EF.subspace_conv(x, weight, bias, alpha, **options)
    z = CONV[space](x, weighted(weight, alpha), weighted(bias, alpha), **options)
    close(y, z)
    assert bool(calls) == linear
    EF.subspace_conv(x.contiguous(), weight, bias, alpha, **options)
    EF.subspace_conv(x, rand(3, 6, 4 // groups, *[2] * space), bias, alpha, **options)
    assert len(calls) == linear  # Neither with the channels first nor with a larger kernel.
