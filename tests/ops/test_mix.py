"""The mix of a large stack on a CPU, in C++ where that is built and without it."""

import pytest
import torch
from errors import rms_error

from ensemblayers.functional import mix
from ensemblayers.ops import native

SHAPE = (9, 517, 1013)  # Above the size from which the stack goes to C++, and of odd lengths.


@pytest.fixture(params=["C++", "PyTorch"])
def route(request, monkeypatch):
    if request.param == "PyTorch":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize("n", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_large_stack_is_mixed_as_precisely_as_its_dtype_allows(route, dtype, n):
    stacked = torch.randn(SHAPE)[:n].to(dtype)
    alpha = torch.rand(n, 2, dtype=torch.promote_types(dtype, torch.float32))[:, 0]  # strided
    expected = torch.einsum("n,n...->...", alpha.double(), stacked.double())
    found = mix(stacked, alpha)
    assert found.dtype == dtype and found.shape == SHAPE[1:]
    # One rounding of the result; the sum itself has alpha's precision.
    assert rms_error(found, expected) <= 0.6 * torch.finfo(dtype).eps


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_a_large_stack(route, dtype, leaf):
    source = torch.randn(3, *SHAPE[1:]).to(dtype).requires_grad_()
    stacked = source if leaf else source * 2
    alpha = torch.rand(3, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    grad = torch.randn(SHAPE[1:]).to(dtype)
    d_stacked, d_alpha = torch.autograd.grad(mix(stacked, alpha), (stacked, alpha), grad)
    g, tolerance = grad.double(), 0.6 * torch.finfo(dtype).eps
    outer = alpha.detach().double().view(3, 1, 1) * g
    products = (stacked.detach().double() * g).sum((1, 2))
    assert rms_error(d_stacked, outer) <= tolerance
    assert d_alpha.dtype == alpha.dtype
    # Sums of half a million terms of either sign, in alpha's precision.
    torch.testing.assert_close(d_alpha.double(), products, rtol=1e-4, atol=1e-2)


def test_second_derivatives_and_transforms_of_a_large_stack(route):
    stacked = torch.randn(2, 300, 300, dtype=torch.float64, requires_grad=True)
    alpha = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def value(stacked, alpha):
        return mix(stacked, alpha).pow(3).mean()

    (first,) = torch.autograd.grad(value(stacked, alpha), alpha, create_graph=True)
    second = torch.stack([torch.autograd.grad(f, alpha, retain_graph=True)[0] for f in first])
    hessian = torch.func.hessian(value, argnums=1)(stacked.detach(), alpha.detach())
    mixed = torch.einsum("n,nij->ij", alpha, stacked).detach()
    expected = 6 * torch.einsum("ij,nij,mij->nm", mixed, stacked, stacked).detach() / mixed.numel()
    torch.testing.assert_close(second, expected)
    torch.testing.assert_close(hessian, expected)
    tangent = torch.func.jvp(lambda a: value(stacked.detach(), a), (alpha.detach(),), (alpha,))[1]
    torch.testing.assert_close(tangent, (first * alpha).sum())
