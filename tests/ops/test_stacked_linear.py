"""Stacked linear layers: products in parts, and the weight's gradient of a product in C++."""

import pytest
import torch
from errors import rms_error
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ensemblayers as el
from ensemblayers.functional import stacked_linear
from ensemblayers.ops import native
from ensemblayers.ops import stacked_linear as op

BOUND = 2e-6

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler")


@pytest.fixture
def written(monkeypatch):
    """The shapes of gradients that C++ wrote; it does from the smallest weight on."""
    shapes, write = [], op._write

    def note(grad, x, d_weight):
        shapes.append(tuple(d_weight.shape))
        write(grad, x, d_weight)

    monkeypatch.setattr(op, "_write", note)
    monkeypatch.setattr(op, "LARGE_WEIGHT", 0)
    return shapes


def tensors(n, rows, inner, outer, shared):
    x = torch.randn(rows, inner) if shared else torch.randn(n, rows, inner)
    weight, bias = torch.randn(n, outer, inner), torch.randn(n, outer)
    return [t.requires_grad_() for t in (x, weight, bias)]


def exact(tensors, g, shared):
    own = [t.detach().double().requires_grad_() for t in tensors]
    y = torch.einsum("bi,noi->nbo" if shared else "nbi,noi->nbo", own[0], own[1]) + own[2][:, None]
    return torch.autograd.grad(y, own, g.double())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, 10, 64, 256])
@pytest.mark.parametrize("inner,outer", [(784, 256), (33, 13), (1, 1), (512, 7), (100, 300)])
@pytest.mark.parametrize("n", [1, 3])
def test_the_gradients_are_those_of_double_precision(n, rows, inner, outer, shared, written):
    own = tensors(n, rows, inner, outer, shared)
    y = stacked_linear(*own, shared=shared)
    g = torch.randn_like(y)
    for _ in range(2):  # The second time into memory that is kept.
        found = torch.autograd.grad(y, own, g, retain_graph=True)
        for d, e in zip(found, exact(own, g, shared), strict=True):
            assert rms_error(d, e) < BOUND
    assert written == [(n, outer, inner)] * 2


@pytest.fixture
def parts(monkeypatch):
    """Whether products were computed in parts, forward and backward, on three threads."""
    found, before = [], torch.get_num_threads()
    has_parts = op._has_parts

    def note(x, weight):
        found.append(has_parts(x, weight))
        return found[-1]

    monkeypatch.setattr(op, "_has_parts", note)
    torch.set_num_threads(3)
    yield found
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("n, rows", [(1, 64), (2, 64), (2, 63), (3, 64), (4, 300)])
def test_threads_that_would_idle_share_a_product(n, rows, shared, bias, dtype, parts):
    x, weight, shift = (t.detach() for t in tensors(n, rows, 512, 256, shared))
    own = [t.to(dtype).requires_grad_() for t in ((x, weight, shift) if bias else (x, weight))]
    y = stacked_linear(*own, shared=shared)
    g = torch.randn_like(y)
    found = torch.autograd.grad(y, own, g)
    enough = rows * 512 * 256 >= op.LEAST_WORK
    assert parts == [n % 3 != 0 and enough and dtype != torch.bfloat16] * 2
    if dtype == torch.bfloat16:
        return
    zero = torch.zeros_like(shift)
    wanted = exact([x, weight, own[2] if bias else zero], g, shared)
    for d, e in zip(found, wanted, strict=False):
        assert rms_error(d, e) < BOUND
    with torch.no_grad():
        assert torch.equal(stacked_linear(*own, shared=shared), y)
    z = x.double() @ weight.double().mT + (shift.double()[:, None] if bias else 0)
    assert rms_error(y, z) < BOUND


@pytest.mark.parametrize("n, batched, alone", [(2, 0, 2), (3, 0, 0), (4, 1, 1), (5, 1, 2)])
def test_as_many_as_divide_by_the_threads_are_one_product(n, batched, alone, parts):
    own = tensors(n, 64, 512, 256, False)
    g = torch.randn(n, 64, 256)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stacked_linear(*own).backward(g)
    calls = {event.key: event.count for event in profile.key_averages()}
    # The output, x's gradient and the weight's.
    assert calls.get("aten::baddbmm_", 0) == 3 * batched
    assert calls.get("aten::addmm_", 0) == 3 * alone
    assert not op._has_parts(torch.randn(64, 512), torch.randn(8, 256, 512))  # Few would idle.


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
@pytest.mark.parametrize("grad", [True, False])
def test_dtypes_are_not_mixed(n, name, grad, parts):
    own = dict(zip(("x", "weight", "bias"), tensors(n, 64, 512, 256, True), strict=True))
    own[name] = own[name].detach().double().requires_grad_()
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        stacked_linear(**own, shared=True)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("grad", [True, False])
def test_other_numbers_of_members_are_errors(n, more, grad, parts):
    x, weight, bias = tensors(n, 64, 512, 256, False)
    other = torch.randn(n + more, 64, 512)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError):
        stacked_linear(other, weight, bias)
    weight = weight.detach()
    y = stacked_linear(x, weight, bias)
    weight.data = torch.randn(n + more, 256, 512)
    with pytest.raises(RuntimeError):
        y.sum().backward()


@pytest.mark.parametrize("shared", [True, False])
def test_a_flop_counter_sees_products_in_parts(shared, parts):
    own = tensors(4, 64, 512, 256, shared)
    with FlopCounterMode(display=False) as flops:
        y = stacked_linear(*own, shared=shared)
    assert flops.get_total_flops() == 2 * 4 * 64 * 512 * 256
    for loss in (y.sum(), stacked_linear(*own, shared=shared).sum()):
        with FlopCounterMode(display=False) as flops:
            loss.backward()
        assert flops.get_total_flops() == 2 * 2 * 4 * 64 * 512 * 256
    assert parts[0]  # In the one pass that nothing watched.


@pytest.mark.parametrize("shared", [True, False])
def test_large_weights_few_rows_and_float32_only(shared, written, monkeypatch):
    monkeypatch.setattr(op, "LARGE_WEIGHT", 8 << 20)

    def takes(rows=4, inner=1024, outer=2048, dtype=torch.float32):
        written.clear()
        own = [
            t.detach().to(dtype).requires_grad_() for t in tensors(2, rows, inner, outer, shared)
        ]
        stacked_linear(*own, shared=shared).sum().backward()
        return bool(written)

    assert takes()
    assert takes(outer=1024) == shared  # Of all members at once, or of each.
    assert not takes(outer=512)
    assert not takes(rows=257)
    assert not takes(rows=0)
    assert not takes(dtype=torch.float64)


@pytest.mark.parametrize("shared", [True, False])
def test_strided_inputs_and_gradients(shared, written):
    x, weight, bias = tensors(3, 12, 40, 24, shared)
    given = [x.detach().mT.contiguous().mT.requires_grad_(), weight, bias]
    y = stacked_linear(*given, shared=shared)
    for g in (torch.randn(24, 12, 3).permute(2, 1, 0), torch.randn(1, 1, 24).expand(3, 12, 24)):
        found = torch.autograd.grad(y, given, g, retain_graph=True)
        for d, e in zip(found, exact(given, g, shared), strict=True):
            assert rms_error(d, e) < BOUND
    assert len(written) == 2


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("n, rows", [(3, 8), (2, 64)])
def test_a_permuted_weights_gradient_has_its_layout(n, rows, shared, written, parts):
    x, weight, _ = tensors(n, rows, 512, 256, shared)
    weight = weight.detach().mT.contiguous().mT.requires_grad_()
    y = stacked_linear(x, weight, shared=shared)
    g = torch.randn_like(y)
    y.backward(g)
    assert weight.grad.stride() == weight.stride() and not written and parts == [n == 2] * 2
    wanted = exact([x, weight, torch.zeros(n, 256)], g, shared)
    assert rms_error(x.grad, wanted[0]) < BOUND and rms_error(weight.grad, wanted[1]) < BOUND


def test_only_what_is_needed_is_computed(written):
    x, weight, bias = tensors(3, 8, 16, 32, True)
    y = stacked_linear(x, weight.detach(), bias, shared=True)
    y.sum().backward()
    assert not written
    stacked_linear(x.detach(), weight, shared=True).sum().backward()
    assert written == [(3, 32, 16)]


def test_what_watches_or_differentiates_the_backward_pass_sees_torchs_operations(written):
    x, weight, bias = tensors(3, 8, 16, 32, True)
    y = stacked_linear(x, weight, bias, shared=True)
    with FlopCounterMode(display=False) as flops:
        y.sum().backward(retain_graph=True)
    assert flops.get_total_flops() == 2 * 2 * 3 * 8 * 16 * 32
    torch.autograd.grad(y, weight, torch.ones_like(y), create_graph=True)
    basis = torch.eye(y.numel()).view(-1, *y.shape)
    inputs = [x, weight, bias]
    found = torch.autograd.grad(y, inputs, basis[:4], is_grads_batched=True, retain_graph=True)
    assert not written
    for k, own in enumerate(zip(*found, strict=True)):
        alone = torch.autograd.grad(y, inputs, basis[k], retain_graph=True)
        assert all(torch.allclose(d, e, atol=1e-6) for d, e in zip(own, alone, strict=True))


def test_weights_of_other_data_are_refused(written):
    x, weight, bias = tensors(3, 8, 16, 32, True)
    y = stacked_linear(x, weight, bias, shared=True)
    weight.data = torch.randn(3, 8, 8)
    with pytest.raises(RuntimeError):
        y.sum().backward()


def test_an_ensemble_trains_as_its_members_do(written):
    members = [nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4)) for _ in range(3)]
    ensemble = el.StackedEnsemble(members)
    x = torch.randn(16, 20)
    parts = [ensemble.parameters(), *(m.parameters() for m in members)]
    optimizers = [torch.optim.SGD(p, lr=0.1, momentum=0.9) for p in parts]
    for _ in range(3):
        loss = ensemble(x).square().sum() + sum(m(x).square().sum() for m in members)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert len(written) == 6
    for i, m in enumerate(members):
        for own, alone in zip(ensemble.member(i).parameters(), m.parameters(), strict=True):
            assert torch.allclose(own, alone, atol=1e-5)
