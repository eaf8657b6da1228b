"""The subspace linear and the mix in Triton, against plain PyTorch in float64."""

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
from interpreted import (
    DEVICE,
    compiles,
    on_gpu,
    run_interpreted,
    runs,
    starts_interpreter,
)

import ensemblayers as el
from ensemblayers.ops import mix, subspace_linear, tuning

pytest.importorskip("triton", reason="Triton isn't installed")

from ensemblayers.ops import mix_triton
from ensemblayers.ops import subspace_linear_triton as kernels

poisoned, precision = checks.poisoned, checks.precision
# Each size once as rows, features out and features in.
SHAPES = list(zip(SIZES, SIZES[3:] + SIZES[:3], SIZES[6:] + SIZES[:6], strict=True))
ALL = [True, True, True, True]


def simplex(n, *size):
    return el.sample_simplex(n, *size).to(DEVICE)


def outputs(forward, backward, x, weight, bias, alpha, grad):
    y, mixed = forward(x, weight, bias, alpha, True)
    grads = backward(grad, x, weight, bias, alpha, mixed, [True, True, bias is not None, True])
    names = ("x", "weight", "bias", "alpha")
    found = {"y": y} | {f"d_{k}": g for k, g in zip(names, grads, strict=True)}
    if alpha.dim() == 1:
        found["mixed"] = mixed
    if bias is None:
        del found["d_bias"]
    return found


def check(x, weight, bias, alpha, grad, exactly=True):
    plain = (subspace_linear.plain_linear, subspace_linear.plain_linear_backward)
    given = (x, weight, bias, alpha, grad)
    found = outputs(kernels.forward, kernels.backward, *given)
    exact = outputs(*plain, *(None if t is None else t.double() for t in given))
    library = outputs(*plain, *given)
    for name, t in found.items():
        assert t.dtype == library[name].dtype, name
    assert_as_exact_as_the_library(found, exact, library)


def case(rows, outs, ins, n, each, dtype, bias=True):
    alpha = simplex(n, rows) if each else simplex(n)
    biases = randn(n, outs, dtype=dtype) if bias else None
    x, weight = randn(rows, ins, dtype=dtype), randn(n, outs, ins, dtype=dtype)
    return x, weight, biases, alpha, randn(rows, outs, dtype=dtype)


# ------------------------------------------------------------------------------------------- values


@runs
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape, each):
    check(*case(*shape, 3, each, F32))


@runs
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", SHAPES[::4], ids=str)
def test_half_precision(shape, dtype, each):
    check(*case(*shape, 3, each, dtype))


@runs
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 7, 8, 9, 10, 32])
def test_numbers_of_members(n, each):
    with subspace_linear.forced("fused"):
        check(*case(5, 17, 33, n, each, F32, bias=n % 2 == 0))


@runs
@pytest.mark.parametrize("name", ["fused", "mixed"])
@pytest.mark.parametrize("rows", [33, 130])
def test_either_algorithm_at_one_point(name, rows, monkeypatch):
    monkeypatch.setattr(subspace_linear, "GRADIENT_ROWS", 200 if name == "fused" else 0)
    with subspace_linear.forced(name):
        check(*case(rows, 17, 31, 3, False, F32))
        check(*case(rows, 17, 31, 3, False, F32, bias=False))


@runs
def test_a_sum_that_is_split(monkeypatch):
    def split(x, weight, limit):
        return [tuning.Config(16, 16, 16, split=4)]

    monkeypatch.setattr(kernels, "point_configs", split)
    for ins in (129, 256, 7):
        check(*case(5, 33, ins, 3, False, F32))


@runs
@pytest.mark.parametrize("each", [False, True])
def test_strides(each):
    x, weight, bias, alpha, grad = case(7, 17, 33, 3, each, F32)
    spread = strided(bias)
    for k in range(5):
        given = [x, weight, bias, alpha, grad]
        given[k] = strided(given[k]) if given[k].dim() > 1 else given[k].repeat(2)[::2].copy_(alpha)
        check(*given)
    check(strided(x), strided(weight), spread, alpha, strided(grad))


@runs
@pytest.mark.parametrize("each", [False, True])
def test_gradients_of_stride_0(each):
    """As .sum() and expand() send them."""
    x, weight, bias, alpha, _ = case(7, 17, 33, 3, each, F32)
    check(x, weight, bias, alpha, torch.ones((), device=DEVICE).expand(7, 17))
    check(x, weight, bias, alpha, randn(17).expand(7, 17))
    check(x[:1].expand(7, 33), weight[:1].expand(3, 17, 33), bias, alpha, randn(7, 17))


@runs
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_nothing_to_do(shape, each):
    given = case(*shape, 3, each, F32)
    found = outputs(kernels.forward, kernels.backward, *given)
    plain = (subspace_linear.plain_linear, subspace_linear.plain_linear_backward)
    for name, expected in outputs(*plain, *given).items():
        torch.testing.assert_close(found[name], expected, msg=name)


@runs
@pytest.mark.parametrize("each", [False, True])
def test_weights_that_stay_in_float32(each):
    """As under autocast: x in half precision, the weights mixed as they are."""
    x, weight, bias, alpha, grad = case(7, 17, 33, 3, each, F32)
    check(x.half(), weight, bias, alpha, grad.half())


@runs
@pytest.mark.parametrize("each", [False, True])
def test_each_gradient_alone(each):
    x, weight, bias, alpha, grad = case(5, 17, 33, 3, each, F32)
    _, mixed = kernels.forward(x, weight, bias, alpha, True)
    every = kernels.backward(grad, x, weight, bias, alpha, mixed, ALL)
    nothing = x.new_empty(0)
    for needs in itertools.product([False, True], repeat=4):
        some = kernels.backward(grad, x, weight, bias, alpha, nothing, list(needs))
        for g, full, need in zip(some, every, needs, strict=True):
            torch.testing.assert_close(g, full) if need else None
            assert need or g.numel() == 0


@runs
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("n", [1, 3, 10, 32])
@pytest.mark.parametrize("shape", [(1,), (17,), (3, 5, 129)], ids=str)
def test_mix(shape, n, dtype):
    stacked, alpha = randn(n, *shape, dtype=dtype), simplex(n)
    # Not apart from the stack: alpha's gradient would be a small sum of large terms.
    grad = randn(*shape, dtype=dtype) + stacked.mean(0)

    def of(forward, backward, *given):
        pair = backward(given[2], *given[:2], [True, True])
        return {"mix": forward(*given[:2]), "d_stacked": pair[0], "d_alpha": pair[1]}

    plain = (mix.plain_mix, mix.plain_mix_backward)
    exact = of(*plain, *(t.double() for t in (stacked, alpha, grad)))
    found = of(mix_triton.mix, mix_triton.mix_backward, stacked, alpha, grad)
    assert_as_exact_as_the_library(found, exact, of(*plain, stacked, alpha, grad))
    half = mix_triton.mix_backward(grad, stacked, alpha, [True, False])
    torch.testing.assert_close(half[0], found["d_stacked"], rtol=0, atol=0)
    assert half[1].numel() == 0


@runs
def test_mix_of_strided_and_empty_stacks():
    stacked, alpha = randn(3, 5, 7).mT, simplex(3)
    torch.testing.assert_close(mix_triton.mix(stacked, alpha), mix.plain_mix(stacked, alpha))
    grads = mix_triton.mix_backward(randn(1, 1).expand(7, 5), stacked, alpha, [True, True])
    assert grads[0].shape == stacked.shape
    for t in mix_triton.mix_backward(randn(0), randn(3, 0), alpha, [True, True]):
        assert not t.any()


@runs
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("n", [1, 3, 32])
def test_mix_of_many_at_once(n, dtype):
    shapes = [(1,), (17, 3), (), (0, 4), (1100,)]
    stacks, alpha = [randn(n, *shape, dtype=dtype) for shape in shapes], simplex(n)
    grads = [randn(*shape, dtype=dtype) for shape in shapes]
    mixed = mix_triton.mix_all(stacks, alpha)
    d_stacks, d_alpha = mix_triton.mix_all_backward(grads, stacks, alpha)
    expected = 0
    for k, (stacked, g) in enumerate(zip(stacks, grads, strict=True)):
        assert torch.equal(mixed[k], mix_triton.mix(stacked, alpha))
        one, share = mix_triton.mix_backward(g, stacked, alpha, [True, True])
        assert torch.equal(d_stacks[k], one)
        expected = expected + share
    torch.testing.assert_close(d_alpha, expected)


@runs
def test_the_same_bits_each_time():
    given = case(33, 129, 127, 3, False, F32)
    first, second = (outputs(kernels.forward, kernels.backward, *given) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


# ------------------------------------------------------------------------------------------- tuning


@runs
def test_twenty_batch_sizes_are_tuned_once(monkeypatch):
    monkeypatch.setattr(tuning, "_found", {})
    measured = []

    def fastest(candidates, run):
        run(candidates[-1])
        measured.append(candidates[-1])
        return candidates[-1]

    monkeypatch.setattr(tuning, "_fastest", fastest)
    with tuning.tuned():
        for rows in range(17, 37):
            check(*case(rows, 17, 33, 2, False, F32))
            if rows == 33:
                entries = tuning.entries()
    assert tuning.entries() == entries == len(measured) == 4  # Two buckets, forward and gradient.


def test_nothing_is_tuned_unasked_or_in_a_capture(monkeypatch):
    monkeypatch.setattr(tuning, "_found", {})
    monkeypatch.setattr(tuning, "_fastest", None)
    device, default = torch.device("cpu"), tuning.Config(64, 64, 64)
    assert tuning.choose("a key", device, lambda: [default], None) == default
    monkeypatch.setattr(tuning, "_capturing", lambda device: True)
    with tuning.tuned():
        assert tuning.choose("a key", device, lambda: [default], None) == default
    assert tuning.entries() == 0


def test_tuned_configurations_are_stored_and_found_again(monkeypatch, tmp_path):
    device = torch.device("cpu")
    card = tuning.card_name(device)
    config = tuning.Config(16, 32, 64, warps=8, stages=2, split=4)
    monkeypatch.setattr(tuning, "_found", {(card, "a key"): config})
    assert tuning.save(device, tmp_path).name == f"{card}.json"
    monkeypatch.setattr(tuning, "_FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "_found", {})
    tuning.shipped.cache_clear()
    default = tuning.Config(64, 64, 64)
    assert tuning.choose("a key", device, lambda: [default], None) == config
    assert tuning.choose("another key", device, lambda: [default], None) == default
    tuning.shipped.cache_clear()


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 128, 129, 8192, 10**6])
def test_buckets(rows):
    bucket = tuning.bucket(rows)
    assert 16 <= bucket <= 8192 and bucket & (bucket - 1) == 0
    assert bucket >= min(rows, 8192) and (bucket == 16 or bucket < 2 * rows)


# ------------------------------------------------------------------------------------ on a GPU only


@on_gpu
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_layers_take_the_kernels(each, dtype):
    x, weight, bias, alpha, grad = case(33, 129, 127, 3, each, dtype)
    given = [t.requires_grad_() for t in (x, weight, bias, alpha)]
    exact = [t.detach().double().requires_grad_() for t in given]
    y = el.functional.subspace_linear(*given)
    assert "subspace_linear" in str(y.grad_fn) or "Eager" in str(y.grad_fn)
    z = el.functional.subspace_linear(*exact)
    pairs = zip(
        (y, *torch.autograd.grad(y, given, grad)),
        (z, *torch.autograd.grad(z, exact, grad.double())),
        strict=True,
    )
    for ours, theirs in pairs:
        assert error(ours, theirs.detach()) <= max(torch.finfo(dtype).eps, 2e-3)


@on_gpu
def test_autocast_on_a_gpu():
    x, weight, bias, alpha, _ = case(7, 17, 33, 3, False, F32)
    given = [t.requires_grad_() for t in (x, weight, bias, alpha)]
    with torch.autocast("cuda", BF16):
        y = el.functional.subspace_linear(*given)
        assert y.dtype == F.linear(x, weight[0]).dtype
    assert {g.dtype for g in torch.autograd.grad(y.float().sum(), given)} == {F32}


@on_gpu
def test_in_a_cuda_graph():
    x, weight, bias, alpha, grad = case(33, 64, 64, 3, False, BF16)
    outputs(kernels.forward, kernels.backward, x, weight, bias, alpha, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outputs(kernels.forward, kernels.backward, x, weight, bias, alpha, grad)
    for _ in range(2):
        alpha.copy_(simplex(3))
        x.normal_()
        graph.replay()
        expected = outputs(kernels.forward, kernels.backward, x, weight, bias, alpha, grad)
        for name in found:
            assert torch.equal(found[name], expected[name]), name


@on_gpu
def test_offsets_beyond_32_bits():
    outs, ins = 2**16, 2**14
    weight = torch.zeros(3, outs, ins, dtype=BF16, device=DEVICE)
    weight[:, -1] = randn(3, ins, dtype=BF16)
    x, alpha = randn(4, ins, dtype=BF16), simplex(3)
    with subspace_linear.forced("fused"):
        y, mixed = kernels.forward(x, weight, None, alpha, True)
    exact = mix.plain_mix(weight[:, -1].double(), alpha.double())
    assert error(mixed[-1], exact) < 1e-2 and error(y[:, -1], x.double() @ exact) < 1e-2


@on_gpu
def test_torch_compile_and_vmap_on_a_gpu():
    given = [t.requires_grad_() for t in case(7, 17, 33, 3, False, F32)[:4]]
    f = el.functional.subspace_linear
    compiled_f = torch.compile(lambda *t: f(*t).relu(), fullgraph=True)
    torch.testing.assert_close(compiled_f(*given), f(*given).relu(), rtol=1e-2, atol=1e-2)
    mapped = torch.func.vmap(f, (None, None, None, 0))(*given[:3], simplex(3, 5))
    assert mapped.shape == (5, 7, 17)


# ----------------------------------------------------------------------------------- without a GPU


@starts_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


def shipped(limit, x_dtype, w_dtype):
    """Kernels, n, and the configurations that are taken without tuning, for a few sizes."""
    for rows, size in ((10, 1024), (128, 4096)):
        x = Shape(x_dtype, rows, size)
        for n in (3, 10):
            weight = Shape(w_dtype, n, size, size)
            yield kernels.point_kernel, n, kernels.point_configs(x, weight, limit)[0]
        # The others' tiles don't grow with n.
        yield kernels.each_kernel, 3, kernels.each_configs(x, weight, limit)[0]
        yield kernels.gradient_kernel, 3, kernels.gradient_configs(x, x, limit)[0]


def built(kernel, config, card, x_dtype, w_dtype, n):
    like_x, like_w = f"*{NAMES[x_dtype]}", f"*{NAMES[w_dtype]}"
    signature = dict.fromkeys(("x", "grad", "other", "mixed"), like_x)
    signature |= dict.fromkeys(("weight", "bias", "d_weight", "d_bias"), like_w)
    signature |= dict.fromkeys(("alpha", "partial"), "*fp32")
    signature |= {"y": "*fp32" if config.split > 1 else like_x}
    signature |= dict.fromkeys(("rows", "b_member", "b_out", "a_row"), "i32")
    signature |= dict.fromkeys(("outs", "ins", "x_row", "g_row", "other_row"), "i32:16")
    signature |= dict.fromkeys(("w_member", "w_out"), "i32:16")
    constants = dict.fromkeys(("x_in", "w_in", "g_out", "other_out", "a_member"), 1)
    constants |= dict.fromkeys(("KEEP", "EVEN", "WEIGHT", "D_BIAS", "ALPHA"), True)
    constants |= {"N": n, "BIAS": config.split == 1, "SPLIT": config.split, "EACH": False}
    constants |= {"TRIPS": 0, "DOT": kernels._TYPES[x_dtype], "PRECISION": "tf32"}
    constants |= {"OUTS": config.outs, "ROWS": config.rows, "INS": config.ins}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return compiled(kernel, card, signature, constants, **options)


@compiles
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, BF16), (F32, F32), (BF16, F32)])
@pytest.mark.parametrize("card", CARDS, ids=str)
def test_compiles_without_spills(card, x_dtype, w_dtype, tmp_path):
    limit = CARDS[card]
    print(f"\n{card}: registers / bytes spilled / shared memory, tensor cores by")
    for kernel, n, config in dict.fromkeys(shipped(limit, x_dtype, w_dtype)):
        k = built(kernel, config, card, x_dtype, w_dtype, n)
        about = f"{NAMES[x_dtype]:>5} x {NAMES[w_dtype]}  n={n}"
        assert_fits(kernel, k, config, about, card, limit, resources(k, card, tmp_path))
