"""BatchEnsemble's linear layer and its scales in Triton, against plain PyTorch in float64."""

import itertools

import checks
import pytest
import torch
import torch.nn.functional as F
from cards import CARDS, compiled, resources
from checks import (
    BF16,
    F16,
    F32,
    NAMES,
    SIZES,
    Shape,
    assert_as_exact_as_the_library,
    assert_fits,
    error,
    randn,
    strided,
)
from interpreted import DEVICE, compiles, on_gpu, run_interpreted, runs, starts_interpreter

import ensemblayers as el
from ensemblayers.ops import batch_ensemble_linear as op
from ensemblayers.ops import member_scale, tuning

pytest.importorskip("triton", reason="Triton isn't installed")

from ensemblayers.ops import batch_ensemble_linear_triton as kernels
from ensemblayers.ops import member_scale_triton as scales
from ensemblayers.ops import subspace_linear_triton

poisoned, precision = checks.poisoned, checks.precision
# Each size once as rows a group, features out and features in.
SHAPES = list(zip(SIZES, SIZES[3:] + SIZES[:3], SIZES[6:] + SIZES[:6], strict=True))
ALL = [True, True, True, True, True, False]  # The index of the members has no gradient.
KINDS = pytest.mark.parametrize("indexed", [False, True], ids=["in order", "by index"])


def index(groups, n):
    """Members in no order; of several, one has no rows."""
    return torch.randint(max(n - 1, 1), (groups,)).to(DEVICE)


def case(each, outs, ins, n, indexed, dtype, bias=True):
    """x, weight, r, s, bias, members, and the gradient of the output."""
    groups = n + 1 if indexed else n
    biases = randn(n, outs, dtype=dtype) if bias else None
    x, weight = randn(groups * each, ins, dtype=dtype), randn(outs, ins, dtype=dtype)
    r, s = randn(n, ins, dtype=dtype), randn(n, outs, dtype=dtype)
    members = index(groups, n) if indexed else None
    return x, weight, r, s, biases, members, randn(groups * each, outs, dtype=dtype)


def outputs(forward, backward, *given):
    *inputs, grad = given
    needs = [True, True, True, True, inputs[4] is not None, False]
    y, grads = forward(*inputs), backward(grad, *inputs, needs)
    names = ("x", "weight", "r", "s", "bias")
    found = {f"d_{k}": g for k, g, need in zip(names, grads, needs[:5], strict=True) if need}
    return {"y": y} | found


OURS = (kernels.forward, kernels.backward)
PLAIN = (op.plain_members_linear, op.plain_members_linear_backward)


def in_double(tensors):
    return [t.double() if t is not None and t.is_floating_point() else t for t in tensors]


def check(*given, ours=OURS, plain=PLAIN, of=outputs):
    found, library = of(*ours, *given), of(*plain, *given)
    for name, t in found.items():
        assert t.dtype == library[name].dtype, name
    assert_as_exact_as_the_library(found, of(*plain, *in_double(given)), library)


# ------------------------------------------------------------------------------------------- values


@runs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape):
    with op.forced("fused"):
        check(*case(*shape, 2, shape[0] % 4 == 3, F32))


@runs
@KINDS
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", SHAPES[::4], ids=str)
def test_half_precision(shape, dtype, indexed):
    with op.forced("fused"):
        check(*case(*shape, 3, indexed, dtype))


@runs
@KINDS
@pytest.mark.parametrize("n", [1, 4, 32])
def test_numbers_of_members(n, indexed):
    check(*case(3, 17, 33, n, indexed, F32, bias=n != 4))


@runs
@KINDS
@pytest.mark.parametrize("name", ["fused", "scaled", "folded"])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_every_algorithm(name, dtype, indexed, monkeypatch):
    monkeypatch.setattr(op, "GRADIENT_ROWS", 100 if name == "fused" else 0)
    with op.forced(name):
        check(*case(5, 17, 31, 3, indexed, dtype))
        check(*case(5, 17, 31, 2, indexed, dtype, bias=False))


@runs
@KINDS
def test_tiles_of_several_members_and_of_one(indexed, monkeypatch):
    config = tuning.Config(32, 16, 32, split=2 if indexed else 1)
    monkeypatch.setattr(kernels, "product_configs", lambda *_: [config])
    for each in (5, 16, 30):
        with op.forced("fused"):
            check(*case(each, 33, 66, 2, indexed, F32))


@runs
@KINDS
def test_strides(indexed):
    given = list(case(7, 17, 33, 3, indexed, F32))
    spread = [k for k, t in enumerate(given) if t is not None and t.dim() > 1]
    with op.forced("fused"):
        for k in spread:
            check(*(strided(t) if i == k else t for i, t in enumerate(given)))
    for name in ("scaled", "fused", "folded"):
        with op.forced(name):
            check(*(strided(t) if i in spread else t for i, t in enumerate(given)))


@runs
@KINDS
def test_gradients_of_stride_0(indexed):
    """As .sum() and expand() send them."""
    x, weight, r, s, bias, members, grad = case(7, 17, 33, 3, indexed, F32)
    one = torch.ones((), device=DEVICE)
    check(x, weight, r, s, bias, members, one.expand(len(x), 17))
    check(x, weight, r, s, bias, members, randn(17).expand(len(x), 17))
    alike = (weight[:1].expand(17, 33), r[:1].expand(3, 33), s[:1].expand(3, 17))
    check(x[:1].expand(len(x), 33), *alike, bias, members, grad)


@runs
@KINDS
@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_nothing_to_do(shape, indexed):
    given = case(*shape, 3, indexed, F32)
    found = outputs(*OURS, *given)
    for name, expected in outputs(*PLAIN, *given).items():
        torch.testing.assert_close(found[name], expected, msg=name)


@runs
@KINDS
def test_weights_that_stay_in_float32(indexed):
    """As under autocast: x in half precision, the weights as they are."""
    x, weight, r, s, bias, members, grad = case(7, 17, 33, 3, indexed, F32)
    for name in ("fused", "scaled", "folded"):
        with op.forced(name):
            check(x.half(), weight, r, s, bias, members, grad.half())


@runs
@KINDS
def test_each_gradient_alone(indexed):
    *inputs, grad = case(5, 17, 33, 3, indexed, F32)
    every = kernels.backward(grad, *inputs, ALL)
    for needs in itertools.product([False, True], repeat=5):
        some = kernels.backward(grad, *inputs, [*needs, False])
        for g, full, need in zip(some, every, needs, strict=True):
            torch.testing.assert_close(g, full) if need else None
            assert need or g.numel() == 0


@runs
def test_a_member_that_is_not_there_gives_nan():
    """An index is not checked, which would wait for the device; but it is not taken for another."""
    x, weight, r, s, bias, _, _ = case(2, 17, 33, 3, False, F32)
    members = torch.tensor([1, 3, -1], device=DEVICE)
    nan = torch.tensor([False, False, True, True, True, True], device=DEVICE)
    for name in ("fused", "scaled"):
        with op.forced(name):
            y = kernels.forward(x, weight, r, s, bias, members)
        assert torch.equal(y.isnan().all(1), nan) and torch.equal(y.isnan().any(1), nan)


@runs
@KINDS
def test_the_same_bits_each_time(indexed):
    given = case(33, 65, 70, 2, indexed, F32)
    first, second = (outputs(*OURS, *given) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


# ----------------------------------------------------------------------------------------- scales


def scale_outputs(forward, backward, *given):
    *inputs, grad = given
    grads = backward(grad, *inputs, [True, True, inputs[2] is not None, False])
    found = {"y": forward(*inputs), "d_x": grads[0], "d_scale": grads[1]}
    return found if inputs[2] is None else found | {"d_shift": grads[2]}


def check_scales(*given):
    ours = (scales.forward, scales.backward)
    plain = (member_scale.plain_scale, member_scale.plain_scale_backward)
    check(*given, ours=ours, plain=plain, of=scale_outputs)


def scale_case(each, channels, space, n, indexed, dtype=F32, shift=True):
    groups = n + 1 if indexed else n
    x, grad = (randn(groups * each, channels, *space, dtype=dtype) for _ in range(2))
    shifts = randn(n, channels, dtype=dtype) if shift else None
    members = index(groups, n) if indexed else None
    return x, randn(n, channels, dtype=dtype), shifts, members, grad


@runs
@KINDS
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("space", [(), (1,), (3, 2, 2), (33, 35)], ids=str)
def test_scales(space, dtype, indexed):
    check_scales(*scale_case(2, 3, space, 2, indexed, dtype, shift=True))
    check_scales(*scale_case(1, 3, space, 2, indexed, dtype, shift=False))


@runs
@KINDS
def test_scales_of_any_layout(indexed):
    x, scale, shift, members, grad = scale_case(2, 5, (4, 3), 3, indexed)
    last = torch.channels_last
    wide = torch.cat([x, x], 3)[..., 1:4].copy_(x)
    views = [x.to(memory_format=last), x.transpose(2, 3).contiguous().transpose(2, 3), wide]
    grads = [grad, grad.to(memory_format=last), grad[:1, :1].expand_as(grad)]
    for view, g in itertools.product(views, grads):
        check_scales(view, strided(scale), strided(shift), members, g)
    assert scales.forward(views[0], scale, shift, members).is_contiguous(memory_format=last)


@runs
@KINDS
def test_scales_of_nothing(indexed):
    for each, channels, space in ((0, 3, (2,)), (2, 0, (2,)), (2, 3, (0,))):
        given = scale_case(each, channels, space, 3, indexed)
        found = scale_outputs(scales.forward, scales.backward, *given)
        plain = (member_scale.plain_scale, member_scale.plain_scale_backward)
        for name, expected in scale_outputs(*plain, *given).items():
            torch.testing.assert_close(found[name], expected, msg=name)


@runs
def test_each_gradient_of_scales_alone():
    x, scale, shift, members, grad = scale_case(2, 5, (4, 3), 3, True)
    every = scales.backward(grad, x, scale, shift, members, [True, True, True, False])
    for needs in itertools.product([False, True], repeat=3):
        some = scales.backward(grad, x, scale, shift, members, [*needs, False])
        for g, full, need in zip(some, every, needs, strict=True):
            assert torch.equal(g, full) if need else g.numel() == 0


# ------------------------------------------------------------------------------------ on a GPU only


@on_gpu
@KINDS
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_layers_take_the_kernels(dtype, indexed):
    *given, members, grad = case(33, 129, 127, 3, indexed, dtype)
    given = [t.requires_grad_() for t in given]
    exact = [t.detach().double().requires_grad_() for t in given]
    y = el.functional.batch_ensemble_linear(*given, members=members)
    assert "Eager" in str(y.grad_fn)
    z = el.functional.batch_ensemble_linear(*exact, members=members)
    pairs = zip(
        (y, *torch.autograd.grad(y, given, grad)),
        (z, *torch.autograd.grad(z, exact, grad.double())),
        strict=True,
    )
    for ours, theirs in pairs:
        assert error(ours, theirs.detach()) <= max(torch.finfo(dtype).eps, 2e-3)


@on_gpu
def test_autocast_on_a_gpu():
    *given, _, _ = case(7, 17, 33, 3, False, F32)
    given = [t.requires_grad_() for t in given]
    with torch.autocast("cuda", BF16):
        y = el.functional.batch_ensemble_linear(*given)
        assert y.dtype == F.linear(given[0], given[1]).dtype
    assert {g.dtype for g in torch.autograd.grad(y.float().sum(), given)} == {F32}


@on_gpu
@KINDS
def test_in_a_cuda_graph(indexed):
    given = case(33, 64, 64, 3, indexed, BF16)
    outputs(*OURS, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outputs(*OURS, *given)
    for _ in range(2):
        given[0].normal_()
        graph.replay()
        expected = outputs(*OURS, *given)
        for name in found:
            assert torch.equal(found[name], expected[name]), name


@on_gpu
def test_torch_compile_and_vmap_on_a_gpu():
    given = [t.requires_grad_() for t in case(7, 17, 33, 3, False, F32)[:5]]
    f = el.functional.batch_ensemble_linear
    compiled_f = torch.compile(lambda *t: f(*t).relu(), fullgraph=True)
    torch.testing.assert_close(compiled_f(*given), f(*given).relu(), rtol=1e-2, atol=1e-2)
    mapped = torch.func.vmap(f, (0, None, None, None, None))(randn(5, 21, 33), *given[1:])
    assert mapped.shape == (5, 21, 17)


@on_gpu
def test_convolutions_take_the_scales():
    x, weight = randn(6, 4, 9, 9), randn(8, 4, 3, 3)
    given = [t.requires_grad_() for t in (x, weight, randn(3, 4), randn(3, 8), randn(3, 8))]
    exact = [t.detach().double().requires_grad_() for t in given]
    y, z = (el.functional.batch_ensemble_conv(*t, padding=1) for t in (given, exact))
    assert "Eager" in str(y.grad_fn)
    g = torch.randn_like(y)
    grads = zip(
        torch.autograd.grad(y, given, g), torch.autograd.grad(z, exact, g.double()), strict=True
    )
    for ours, theirs in [(y, z.detach()), *grads]:
        assert error(ours, theirs) <= 2e-3


# ----------------------------------------------------------------------------------- without a GPU


@starts_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


def test_the_rule():
    def name(rows, size, indexed=False, dtype=BF16):
        x, weight = Shape(dtype, rows, size), torch.empty(size, size, device="meta")
        return op.algorithm(x, weight, 4, indexed)

    assert [name(rows, 1024) for rows in (40, 4096, 8192, 8196)] == ["fused"] * 3 + ["folded"]
    assert [name(rows, 4096) for rows in (4092, 4096, 32772)] == ["fused", "scaled", "folded"]
    assert name(32772, 4096, indexed=True) == "scaled"
    with op.forced("folded"):
        assert name(40, 1024) == "folded" and name(40, 1024, indexed=True) == "fused"
    with pytest.raises(ValueError, match="'mixed'"), op.forced("mixed"):
        pass


def test_the_rule_without_tensor_cores(monkeypatch):
    monkeypatch.setattr(op._triton, "on_tensor_cores", lambda x: False)
    weight = torch.empty(1024, 1024, device="meta")
    names = [op.algorithm(Shape(F32, rows, 1024), weight, 4, False) for rows in (128, 132, 8196)]
    assert names == ["fused", "scaled", "folded"]
    assert [op.gradient_algorithm(Shape(F32, rows, 9), 4, False) for rows in (128, 132)] == [
        "fused",
        "library",
    ]
    assert op.gradient_algorithm(Shape(F32, 10**6, 9), 4, True) == "fused"


def shipped(limit, x_dtype, w_dtype):
    """Kernels, rows a group, and the configurations taken without tuning, for a few sizes."""
    for each, size in ((10, 1024), (32, 4096), (2000, 2048)):
        x, weight = Shape(x_dtype, 4 * each, size), Shape(w_dtype, size, size)
        yield kernels.product_kernel, each, kernels.product_configs(x, weight, limit, each)[0]
        if each != 10:
            yield kernels.gradient_kernel, each, kernels.gradient_configs(x, weight, limit, each)[0]


def built(kernel, each, config, card, x_dtype, w_dtype, **flags):
    like_x, like_w = f"*{NAMES[x_dtype]}", f"*{NAMES[w_dtype]}"
    signature = dict.fromkeys(("x", "grad", "products"), like_x)
    signature |= dict.fromkeys(("weight", "bias", "r", "s", "d_weight", "d_bias"), like_w)
    signature |= dict.fromkeys(("members", "order", "starts"), "*i64")
    signature |= dict.fromkeys(("d_r", "d_s"), "*fp32")
    signature |= {"y": "*fp32" if config.split > 1 else like_x}
    signature |= dict.fromkeys(("n", "rows", "each", "r_member", "s_member", "b_member"), "i32")
    signature |= dict.fromkeys(("outs", "ins", "x_row", "g_row", "w_out"), "i32:16")
    constants = dict.fromkeys(("x_in", "w_in", "g_out", "r_in", "s_out", "b_out"), 1)
    constants |= dict.fromkeys(("BIAS", "EVEN", "WEIGHT", "FAST"), True)
    constants |= {"N": 4, "SAME": kernels.has_one_member(each, config.rows)}
    constants |= {"SPLIT": config.split, "TRIPS": 0, "PRECISION": "tf32"}
    constants |= {"DOT": subspace_linear_triton._TYPES[x_dtype], **flags}
    constants |= {"OUTS": config.outs, "ROWS": config.rows, "INS": config.ins}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return compiled(kernel, card, signature, constants, **options)


@compiles
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, BF16), (F32, F32), (BF16, F32)])
@pytest.mark.parametrize("card", CARDS, ids=str)
def test_compiles_without_spills(card, x_dtype, w_dtype, tmp_path):
    limit = CARDS[card]
    print(f"\n{card}: registers / bytes spilled / shared memory, tensor cores by")
    for kernel, each, config in shipped(limit, x_dtype, w_dtype):
        flags = {"INDEXED": each < 1000, "GIVEN": each > 1000}
        k = built(kernel, each, config, card, x_dtype, w_dtype, **flags)
        about = f"{NAMES[x_dtype]:>5} x {NAMES[w_dtype]} {each} rows"
        assert_fits(kernel, k, config, about, card, limit, resources(k, card, tmp_path))


@compiles
@pytest.mark.parametrize("card", CARDS, ids=str)
def test_scales_compile_without_spills(card, tmp_path):
    pointers = ("x", "grad", "y", "d_x", "scale", "shift")
    signature = dict.fromkeys(pointers, "*bf16") | {"members": "*i64"}
    signature |= dict.fromkeys(("d_scale", "d_shift"), "*fp32")
    signature |= dict.fromkeys(("n", "each", "scale_member", "shift_member"), "i32")
    signature |= dict.fromkeys(("channels", "space", "x_channel"), "i32:16")
    constants = dict.fromkeys(("x_space", "scale_channel", "shift_channel"), 1)
    constants |= dict.fromkeys(("INDEXED", "SHIFT", "SCALE", "X"), True)
    constants |= {"PARTS": 8, "C": 1, "S": scales.BLOCK}
    for kernel in (scales.scale_kernel, scales.scale_backward_kernel):
        k = compiled(kernel, card, signature, constants, num_warps=scales.WARPS)
        found = resources(k, card, tmp_path)
        assert_fits(kernel, k, scales.BLOCK, "bf16", card, CARDS[card], found)
