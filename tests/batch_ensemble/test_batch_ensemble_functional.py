"""The functions of BatchEnsemble equal n plain layers."""

import pytest
import torch
import torch.nn.functional as F
from derivatives import CONV, assert_same, rand, strided

from ensemblayers import functional as EF


def member_weight(weight, r, s, groups=1):
    """W * (s r^T), where a group of a convolution sees its own part of r."""
    out, inner = weight.shape[:2]
    per_group = r.reshape(groups, inner).repeat_interleave(out // groups, 0)
    return weight * (s[:, None] * per_group).reshape(out, inner, *(1,) * (weight.dim() - 2))


def each_member(f, x, weight, r, s, bias, groups=1):
    n = len(r)
    return torch.cat(
        [
            f(part, member_weight(weight, r[i], s[i], groups), None if bias is None else bias[i])
            for i, part in enumerate(x.reshape(n, len(x) // n, *x.shape[1:]))
        ]
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (3, 7), (17, 15), (33, 2), (127, 129)])
def test_batch_ensemble_linear_equals_n_plain_layers(inner, outer, lead, bias):
    x, weight = rand(6, *lead, inner), rand(outer, inner)
    r, s, bias = rand(3, inner), rand(3, outer), rand(3, outer) if bias else None
    assert_same(
        lambda: EF.batch_ensemble_linear(x, weight, r, s, bias),
        lambda: each_member(F.linear, x, weight, r, s, bias),
        *(x, weight, r, s, bias),
    )


@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"padding": "same", "dilation": 2},
        {"groups": 2, "padding": "valid"},
        {"groups": 4},
    ],
)
def test_batch_ensemble_conv_equals_n_plain_layers(space, options):
    groups = options.get("groups", 1)
    x, weight = rand(6, 4, *(5,) * space), rand(8, 4 // groups, *(2,) * space)
    r, s, bias = rand(3, 4), rand(3, 8), rand(3, 8)
    assert_same(
        lambda: EF.batch_ensemble_conv(x, weight, r, s, bias, **options),
        lambda: each_member(
            lambda *args: CONV[space](*args, **options), x, weight, r, s, bias, groups
        ),
        *(x, weight, r, s, bias),
    )


def test_batch_ensemble_has_first_and_second_derivatives():
    linear = (rand(4, 3), rand(2, 3), rand(2, 3), rand(2, 2), rand(2, 2))
    conv = (rand(4, 2, 3), rand(2, 2, 2), rand(2, 2), rand(2, 2), rand(2, 2))
    for f, inputs in [(EF.batch_ensemble_linear, linear), (EF.batch_ensemble_conv, conv)]:
        assert torch.autograd.gradcheck(f, inputs)
        assert torch.autograd.gradgradcheck(f, inputs)


def test_batch_ensemble_takes_strided_inputs_and_incoming_gradients():
    x, weight, r, s, bias = rand(6, 5, grad=False), rand(4, 5), rand(3, 5), rand(3, 4), rand(3, 4)
    for view in strided(x):
        view = view.detach().requires_grad_()
        for consume in (torch.sum, lambda y: torch.cat([y, y], 1)[:, 1:].t().pow(2).sum()):
            assert_same(
                lambda v=view, c=consume: c(EF.batch_ensemble_linear(v, weight, r, s, bias)),
                lambda v=view, c=consume: c(each_member(F.linear, v, weight, r, s, bias)),
                *(view, weight, r, s, bias),
            )


@pytest.mark.parametrize("rank", [None, 1, 3])
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("op", ["linear", "conv"])
def test_batch_ensemble_with_members_equals_each_rows_own_layer(op, repeats, rank):
    pairs = () if rank is None else (rank,)
    space = () if op == "linear" else (4,)
    f, plain = getattr(EF, f"batch_ensemble_{op}"), F.linear if op == "linear" else F.conv1d
    members = torch.tensor([2, 0, 2, 2, 0])  # None of member 1.
    x, weight = rand(5 * repeats, 3, *space), rand(4, 3, *(2,) * len(space))
    r, s, bias = rand(3, *pairs, 3), rand(3, *pairs, 4), rand(3, 4)

    def reference():
        rows = []
        for j, row in enumerate(x):
            i = members[j // repeats]
            each = zip(r[i].view(-1, 3), s[i].view(-1, 4), strict=True)
            own = sum(member_weight(weight, a, b) for a, b in each)
            rows.append(plain(row[None], own, bias[i]))
        return torch.cat(rows)

    assert_same(lambda: f(x, weight, r, s, bias, members=members), reference, x, weight, r, s, bias)


@pytest.mark.parametrize("members", [[0, 1], [], [[0, 1, 0]]], ids=str)
def test_members_of_other_rows_are_an_error(members):
    members = torch.tensor(members, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"members .* got"):
        EF.batch_ensemble_linear(rand(3, 2), rand(4, 2), rand(2, 2), rand(2, 4), members=members)


def test_batch_ensemble_of_an_empty_batch():
    r, s, bias = rand(3, 2), rand(3, 4), rand(3, 4)
    assert EF.batch_ensemble_linear(rand(0, 2), rand(4, 2), r, s, bias).shape == (0, 4)
    y = EF.batch_ensemble_conv(rand(0, 2, 5, 5), rand(4, 2, 3, 3), r, s, bias)
    assert y.shape == (0, 4, 3, 3)


@pytest.mark.parametrize("op", ["linear", "conv"])
def test_a_batch_that_does_not_divide_is_an_error_with_both_numbers(op):
    f = getattr(EF, f"batch_ensemble_{op}")
    space = () if op == "linear" else (3, 3)
    with pytest.raises(ValueError, match=r"n=3 members, got 7 rows"):
        f(torch.zeros(7, 2, *space), torch.zeros(4, 2, *space), torch.ones(3, 2), torch.ones(3, 4))


def test_batch_ensemble_conv_without_a_batch_dimension_is_an_error():
    with pytest.raises(ValueError, match=r"got \[2, 5, 5\]"):
        EF.batch_ensemble_conv(
            torch.zeros(2, 5, 5), torch.zeros(4, 2, 3, 3), torch.ones(2, 2), torch.ones(2, 4)
        )
