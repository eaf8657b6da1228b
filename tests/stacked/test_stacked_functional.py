"""functional.stacked_linear equals n layers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from derivatives import assert_same, rand, strided

from ensemblayers import functional as EF


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(), (4,), (0,), (2, 3)])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (3, 7), (17, 15), (127, 129), (0, 2)])
def test_stacked_linear_equals_n_layers(inner, outer, lead, bias, shared):
    x, weight = rand(*(() if shared else (3,)), *lead, inner), rand(3, outer, inner)
    bias = rand(3, outer) if bias else None

    def reference():
        own = [x] * 3 if shared else x
        rows = [F.linear(own[i], weight[i], None if bias is None else bias[i]) for i in range(3)]
        return torch.stack(rows)

    assert_same(
        lambda: EF.stacked_linear(x, weight, bias, shared=shared), reference, x, weight, bias
    )


@pytest.mark.parametrize("shared", [False, True])
def test_stacked_linear_has_first_and_second_derivatives(shared):
    inputs = (rand(3, 4) if shared else rand(2, 3, 4), rand(2, 5, 4), rand(2, 5))
    function = partial(EF.stacked_linear, shared=shared)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("shared", [False, True])
def test_stacked_linear_of_strided_tensors(shared):
    weight, bias = rand(4, 5, 6, grad=False).mT, rand(4, 6, grad=False)[:, ::2].repeat(1, 2)
    for x in strided(rand(4, 7, 5, grad=False)):
        x = x[0] if shared else x
        own = [t.detach().requires_grad_() for t in (x, weight, bias)]
        for consume in (torch.sum, lambda y: torch.cat([y, y], 1)[:, 1:].transpose(0, 2).sum()):
            assert_same(
                lambda own=own, c=consume: c(EF.stacked_linear(*own, shared=shared)),
                lambda own=own, c=consume: c(own[0] @ own[1].mT + own[2][:, None]),
                *own,
            )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 1), (2, 5), (3, 5, 1), (3, 5, 5)], ids=str)
def test_a_bias_is_not_broadcast(shape, shared):
    x = torch.zeros(*(() if shared else (3,)), 5, 4)
    with pytest.raises(ValueError, match=r"\[3, 5, 4\], got"):
        EF.stacked_linear(x, torch.zeros(3, 5, 4), torch.zeros(shape), shared=shared)
