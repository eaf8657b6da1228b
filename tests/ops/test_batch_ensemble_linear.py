import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from ensemblayers.ops import batch_ensemble_linear as op
from ensemblayers.ops import native

SIZES = [1, 2, 3, 5, 6, 7, 15, 17, 31, 33, 65, 127, 129]
NAMES = ("x", "weight", "r", "s", "bias")


@pytest.fixture(params=["plain", "native"])
def backend(request, monkeypatch):
    """Each backend in turn; the native one has to be there, or its tests show nothing."""
    if request.param == "plain":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("no C++ compiler")
    return request.param


def inputs(n, b, inner, outer, dtype=torch.float64, bias=True):
    shapes = [(n * b, inner), (outer, inner), (n, inner), (n, outer), (n, outer)]
    made = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return made if bias else [*made[:-1], None]


def of_a_first_layer(args):
    """The same, whose x needs no gradient: those of weight and r come from another kernel."""
    return [args[0].detach(), *args[1:]]


def reference(x, weight, r, s, bias):
    """One plain layer a member, with its own weight."""
    rows = []
    for i, own in enumerate(x.reshape(len(r), len(x) // len(r), x.shape[1])):
        y = own @ (weight * torch.outer(s[i], r[i])).t()
        rows.append(y if bias is None else y + bias[i])
    return torch.cat(rows)


def assert_same(args, grad=None, tolerance=None):
    exact = [None if t is None else t.detach().double().requires_grad_() for t in args]
    y, z = op.linear(*args), reference(*exact)
    g = torch.randn_like(y) if grad is None else grad
    needed = [k for k, t in enumerate(args) if t is not None and t.requires_grad]
    got = [y, *torch.autograd.grad(y, [args[k] for k in needed], g)]
    want = [z, *torch.autograd.grad(z, [exact[k] for k in needed], g.double())]
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == args[0].dtype and a.shape == b.shape
        assert_near(a.detach(), b.detach(), k, tolerance)


def assert_near(a, b, what=None, tolerance=None):
    error = (a.double() - b).norm() / (b.norm() + 1e-30)
    assert error < (tolerance or (1e-12 if a.dtype == torch.float64 else 2e-6)), (what, error)


@pytest.mark.parametrize(("inner", "outer"), list(zip(SIZES, SIZES[::-1], strict=True)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients(backend, inner, outer, dtype, bias):
    for n, b in ((1, 4), (3, 5), (4, 33)):
        args = inputs(n, b, inner, outer, dtype, bias)
        assert_same(args)
        assert_same(of_a_first_layer(args))


@pytest.mark.parametrize("shape", [(2, 70, 1300, 40), (3, 300, 530, 13), (2, 1100, 300, 25)])
def test_several_blocks_of_rows_and_groups_of_panels(backend, shape):
    args = inputs(*shape, dtype=torch.float32)
    assert_same(args)
    assert_same(of_a_first_layer(args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 127, 40, 30), (1, 128, 40, 30), (4, 33, 770, 65), (3, 50, 30, 517), (2, 64, 17, 1)],
)
def test_products_with_few_rows_and_with_many(backend, shape, dtype):
    """From 128 on they are the package's own; of sums in several parts, of parts of tiles."""
    for bias in (True, False):
        args = inputs(*shape, dtype=dtype, bias=bias)
        assert_same(args)
        assert_same(of_a_first_layer(args))
        with torch.inference_mode():
            exact = [None if t is None else t.double() for t in args]
            assert_near(op.linear(*args), reference(*exact))
    args[1] = args[1].detach()
    assert_same(args)


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
@pytest.mark.parametrize("rows,own", [(127, False), (128, True)])
@pytest.mark.parametrize("recorded", [True, False])
def test_which_products_are_taken(rows, own, recorded, monkeypatch):
    calls, run = [], op._forward
    monkeypatch.setattr(op, "_forward", lambda *args: calls.append(args[-2:]) or run(*args))
    with torch.set_grad_enabled(recorded):
        y = op.linear(*inputs(1, rows, 6, 5))
        op.linear(*inputs(1, rows, 1200, 1000, dtype=torch.float32))
    assert calls == ([(own, True), (False, True)] if recorded else [(True, False)] * own)
    assert y.requires_grad == recorded


@pytest.mark.parametrize("rows", [120, 1200])
def test_products_with_a_weight_that_no_cache_holds(backend, rows):
    assert_same(inputs(2, rows // 2, 1030, 1100, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 528, 301), (1, 1030, 512, 300), (2, 4, 530, 300)])
def test_gradients_that_no_cache_holds(backend, shape, dtype):
    """Of whole and partial tiles, and of rows that begin anywhere in a line of the cache."""
    assert_same(of_a_first_layer(inputs(*shape, dtype=dtype)))


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
def test_a_gradient_at_any_address():
    x, weight, r, s, _ = (t.detach().float() for t in inputs(2, 5, 512, 300))
    grad, y = torch.randn(2, 10, 300)
    memory, found = torch.zeros(weight.numel() + 16), []
    for start in (0, 1):
        out = memory[start : start + weight.numel()].view_as(weight)
        torch.ops.ensemblayers.batch_ensemble_backward(grad, x, weight, r, s, y, out, False, False)
        found.append(out.clone())
    assert torch.equal(*found) and found[0].all() and not memory[-15:].any()


@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=5)), ids=str)
def test_any_gradients_alone(backend, needed):
    args = [t.requires_grad_(need) for t, need in zip(inputs(2, 4, 5, 3), needed, strict=True)]
    if any(needed):
        assert_same(args)
    else:
        torch.testing.assert_close(op.linear(*args), reference(*args))


def test_any_strides(backend):
    n, b, inner, outer = 3, 4, 7, 5
    x, weight, r, s, bias = (t.detach() for t in inputs(n, b, inner, outer))
    views = {
        "x": [x.t().contiguous().t(), torch.cat([x, x], 1)[:, :inner], x[:1].expand_as(x)],
        "weight": [torch.cat([weight, weight])[:outer]],
        "r": [r.t().contiguous().t(), r[:1].expand_as(r), torch.cat([r, r], 1)[:, :inner]],
        "s": [s.t().contiguous().t(), s[:1].expand_as(s)],
        "bias": [bias.t().contiguous().t(), torch.cat([bias, bias], 1)[:, :outer]],
    }
    args = dict(zip(NAMES, (x, weight, r, s, bias), strict=True))
    for name, some in views.items():
        for view in some:
            own = {**args, name: view}
            assert_same([t.detach().requires_grad_() for t in own.values()])
    args = [t.requires_grad_() for t in args.values()]
    ones = torch.ones((), dtype=torch.float64)
    columns = torch.randn(outer, n * b, dtype=torch.float64).t()
    for grad in (ones.expand(n * b, outer), columns, torch.cat([columns] * 2, 1)[:, 2:][:, :outer]):
        assert_same(args, grad)


def test_zero_scales_have_gradients(backend):
    args = inputs(2, 4, 5, 3)
    with torch.no_grad():
        args[2][0] = 0
        args[3][1] = 0
    assert_same(args)


def test_one_tensor_in_several_places(backend):
    x, square, scale = (torch.randn(8, 4), torch.randn(4, 4), torch.randn(2, 4))
    square, scale = square.double().requires_grad_(), scale.double().requires_grad_()
    args = (x.double(), square, scale, scale, scale)
    for create_graph in (False, True):
        results = []
        for f in (op.linear, reference):
            y = f(*args).pow(2).sum()
            results.append(torch.autograd.grad(y, [square, scale], create_graph=create_graph))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("bias", [True, False])
def test_first_and_second_derivatives(backend, bias):
    args = inputs(2, 4, 3, 2, bias=bias)
    assert torch.autograd.gradcheck(op.linear, args)
    assert torch.autograd.gradgradcheck(op.linear, args)


def test_gradients_accumulate_and_outlive_the_next_step(backend):
    args = inputs(2, 8, 600, 600, dtype=torch.float32)  # A weight of 1.4 MB.
    weight, seen = args[1], []
    for _ in range(3):
        weight.grad = None
        (once,) = torch.autograd.grad(op.linear(*args).sum(), weight)
        for k in (1, 2):
            op.linear(*args).sum().backward()
            torch.testing.assert_close(weight.grad, k * once)
        seen.append(weight.grad)
    assert all(torch.equal(g, seen[0]) for g in seen)


def test_the_number_of_threads_changes_nothing(backend):
    args = of_a_first_layer(inputs(3, 40, 300, 200, dtype=torch.float32))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            y = op.linear(*args)
            results.append([y, *torch.autograd.grad(y.square().sum(), args[1:])])
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))


@pytest.mark.parametrize("of_x", [True, False])
def test_the_kernels_run(backend, of_x, monkeypatch):
    calls, run = [], op._Linear.apply
    monkeypatch.setattr(op._Linear, "apply", lambda *args: calls.append(1) or run(*args))
    x, *rest = inputs(2, 4, 5, 3)
    op.linear(x.requires_grad_(of_x), *rest).sum().backward()
    assert len(calls) == (backend == "native")


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
def test_what_the_kernels_do_not_take(monkeypatch):
    monkeypatch.setattr(op._Linear, "apply", None)
    few = inputs(3, op.LEAST_ROWS - 1, 5, 3)
    empty = inputs(3, 0, 5, 3)
    half = inputs(2, 4, 5, 3, dtype=torch.bfloat16)
    transposed = inputs(2, 4, 5, 3)
    transposed[1] = torch.randn(5, 3, dtype=torch.float64).t().requires_grad_()
    for args in (few, empty, transposed):
        assert_same(args, tolerance=1e-12)
    assert_same(half, tolerance=3e-2)
    args = inputs(2, 4, 5, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert op.linear(*args).dtype == torch.bfloat16
    with torch.no_grad():
        op.linear(*args)
    mixed = [args[0].double(), *args[1:]]
    with pytest.raises(RuntimeError, match="dtype"):
        op.linear(*mixed)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 4, 40])
def test_folded_weights(rows, bias, monkeypatch):
    args = [None if t is None else t.detach() for t in inputs(3, rows, 6, 4, bias=bias)]
    calls, run = [], op.folded_linear
    monkeypatch.setattr(op, "folded_linear", lambda *args: calls.append(1) or run(*args))
    with torch.no_grad():
        y = op.linear(*args)
        torch.testing.assert_close(y, reference(*args))
        torch.testing.assert_close(run(*args), y)
    assert len(calls) == (rows * (6 + 4) > op.FOLD * 6 * 4)
    op.linear(*args)  # With gradients, they would be those of n weights.
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        op.linear(*(None if t is None else t.float() for t in args))
    assert len(calls) == (rows * (6 + 4) > op.FOLD * 6 * 4)


def test_forward_mode(backend):
    args = [t.detach() for t in inputs(2, 4, 5, 3)]
    tangents = [torch.randn_like(t) for t in args]
    _, expected = torch.func.jvp(reference, tuple(args), tuple(tangents))
    args = [t.requires_grad_() for t in args]
    with torch.autograd.forward_ad.dual_level():
        dual = [
            torch.autograd.forward_ad.make_dual(a, t) for a, t in zip(args, tangents, strict=True)
        ]
        y = op.plain_linear(*dual)
        z = op.linear(*dual)
        for out in (y, z):
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, expected)


def test_tracers_and_fake_tensors_see_the_operations(backend):
    args = [t.detach().requires_grad_() for t in inputs(2, 4, 5, 3)]

    def gradients(*args):
        y = op.linear(*args).pow(2).sum()
        return torch.autograd.grad(y, args)

    traced = make_fx(gradients)(*args)
    torch.testing.assert_close(traced(*args), gradients(*args))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t) for t in args]
        shapes = [g.shape for g in gradients(*fake)]
    assert shapes == [t.shape for t in args]
    assert [g.shape for g in gradients(*fake)] == shapes  # Outside of the mode, too.
    with FlopCounterMode(display=False) as counter:
        op.linear(*args).sum().backward()
    assert counter.get_total_flops() >= 3 * 2 * 8 * 5 * 3


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize(
    "wrong",
    [
        {"r": (4, 1)},
        {"r": (4, 5)},
        {"r": (4, 9)},
        {"s": (4, 1)},
        {"s": (4, 3)},
        {"s": (2, 7)},
        {"bias": (4, 1)},
        {"bias": (2, 7)},
        {"bias": (7,)},
        {"x": 5},
        {"x": 900},
    ],
    ids=str,
)
def test_other_shapes_broadcast_or_fail_as_in_the_definition(backend, rows, wrong):
    x, weight, *fast = inputs(4, rows, 6, 7, bias=True)
    named = dict(zip(("r", "s", "bias"), fast, strict=True))
    for name, shape in wrong.items():
        if name == "x":
            x = torch.randn(len(x), shape, dtype=x.dtype)
        else:
            named[name] = torch.randn(shape, dtype=x.dtype, requires_grad=True)

    def result(function):
        try:
            y = function(x, weight, *named.values())
            return [y, *torch.autograd.grad(y.square().sum(), [weight, *named.values()])]
        except RuntimeError:
            return None

    got, want = result(op.linear), result(op.plain_linear)
    assert (got is None) == (want is None)
    if want is not None:
        torch.testing.assert_close(got, want)


CHANGES = {
    "dtype": lambda t: t.data.float(),
    "shape": lambda t: t.data[:2].clone(),
    "order": lambda t: t.data.t().contiguous().t(),
}


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("rows", [8, 128])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_with_other_data_before_the_backward_pass(change, rows, of_x):
    args = inputs(2, rows, 16, 12)
    args = args if of_x else of_a_first_layer(args)
    y = op.linear(*args)
    args[1].data = change(args[1])
    with pytest.raises(RuntimeError, match="since the forward pass"):
        y.sum().backward()


def test_a_backward_pass_with_tangents(backend):
    args = inputs(2, 64, 6, 5)
    y, forward_ad = op.linear(*args), torch.autograd.forward_ad
    g, t = torch.randn(2, *y.shape, dtype=y.dtype)
    expected = torch.autograd.grad(y, args, t, retain_graph=True)
    with forward_ad.dual_level():
        found = torch.autograd.grad(y, args, forward_ad.make_dual(g, t))
        tangents = [forward_ad.unpack_dual(d).tangent for d in found]
    torch.testing.assert_close(tangents, list(expected))
