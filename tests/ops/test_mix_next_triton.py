"""The fused pass in Triton, against plain PyTorch in float64."""

import subprocess
import sys

import pytest
import torch
from cards import CARDS, compiled, resources
from interpreted import (
    DEVICE,
    INTERPRETED,
    compiles,
    on_gpu,
    run_interpreted,
    runs,
    starts_interpreter,
)

from ensemblayers.ops import mix_next
from ensemblayers.ops.mix_next import AdamW, Sgd

pytest.importorskip("triton", reason="Triton isn't installed")

from ensemblayers.ops import mix_next_triton

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
RTOL = {F32: 1e-6, F64: 1e-14}
SIZES = [1, 2, 3, 7, 0, 17, 33, 127, 129, 1100]

MOMENTUM = Sgd(0.1, 0.9, 0.0, 0.01, nesterov=False, first=False, maximize=False)
RULES = {
    "sgd": Sgd(0.1, 0.0, 0.0, 0.0, nesterov=False, first=False, maximize=False),
    "decay": Sgd(0.1, 0.0, 0.0, 0.3, nesterov=False, first=False, maximize=False),
    "momentum": MOMENTUM,
    "first": Sgd(0.1, 0.9, 0.2, 0.01, nesterov=False, first=True, maximize=False),
    "dampening": Sgd(0.1, 0.9, 0.2, 0.0, nesterov=False, first=False, maximize=True),
    "nesterov": Sgd(0.1, 0.9, 0.0, 0.01, nesterov=True, first=False, maximize=False),
    "nesterov first": Sgd(0.1, 0.9, 0.0, 0.01, nesterov=True, first=True, maximize=True),
    "adamw 1": AdamW(0.1, (0.9, 0.999), 1e-8, 0.01, step=1, maximize=False),
    "adamw 7": AdamW(0.1, (0.9, 0.999), 1e-8, 0.01, step=7, maximize=True),
    "adamw 5000": AdamW(0.1, (0.0, 0.99), 1e-3, 0.0, step=5000, maximize=False),
}


class Case:
    """Vertices, moments, parameters and gradients of random numbers, the outputs of NaN."""

    def __init__(self, rule, n, frozen, vertex, point, sizes=SIZES):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, dtype=F64, generator=generator)

        # Columns between parameters belong to nobody, and have to stay as they are.
        self.columns = [3 + sum(sizes[:k]) + 5 * k for k in range(len(sizes))]
        width = self.columns[-1] + sizes[-1] + 2
        self.rule = rule
        self.vertices = randn(n + frozen, width).to(DEVICE, vertex)
        count = 2 if isinstance(rule, AdamW) else int(rule.momentum > 0)
        first = isinstance(rule, Sgd) and rule.first
        self.moments = tuple(
            torch.full((n, width), torch.nan) if first else randn(n, width).abs()
            for _ in range(count)
        )
        self.moments = tuple(m.to(DEVICE, vertex) for m in self.moments)
        self.params = [torch.full((s,), torch.nan, dtype=point, device=DEVICE) for s in sizes]
        self.grads = [randn(s).to(DEVICE, point) for s in sizes]
        self.alpha = torch.softmax(randn(n), 0).to(vertex)
        self.next = torch.softmax(randn(n + frozen), 0).to(vertex)

    def to(self, vertex, point):
        """A copy in other dtypes."""
        new = object.__new__(Case)
        new.columns, new.rule = self.columns, self.rule
        new.vertices = self.vertices.to(vertex, copy=True)
        new.moments = tuple(m.to(vertex, copy=True) for m in self.moments)
        new.params = [p.to(point, copy=True) for p in self.params]
        new.grads = [g.to(point, copy=True) for g in self.grads]
        new.alpha, new.next = self.alpha.to(vertex), self.next.to(vertex)
        return new

    def step(self, module, rule=None):
        buffers = (self.vertices, self.moments, self.params, self.grads, self.columns)
        module.step_(rule or self.rule, *buffers, self.alpha, self.next)
        return self

    def mix(self, module):
        module.mix_(self.vertices, self.next, self.params, self.columns)
        return self

    def outputs(self):
        return self.vertices, *self.moments, torch.cat(self.params)


@pytest.fixture
def plain(monkeypatch):
    """The definition: plain PyTorch, whatever else there is."""
    monkeypatch.setattr(mix_next, "_in_cpp", lambda *args: False)
    monkeypatch.setattr(mix_next, "_in_triton", lambda *args: False)
    return mix_next


def assert_close(case, expected, rtol):
    for a, b in zip(case.outputs(), expected.outputs(), strict=True):
        known = ~b.isnan()
        assert torch.equal(known, ~a.isnan())
        a, b = a[known].double(), b[known]
        assert (a - b).norm() <= rtol * b.norm()


def assert_rounded(case, single):
    """Parameters in half precision are those in float32, rounded."""
    for a, b in zip(case.outputs()[:-1], single.outputs()[:-1], strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    found, exact = torch.cat(case.params), torch.cat(single.params)
    if INTERPRETED and found.dtype == BF16:  # The interpreter cuts off where a card rounds.
        exact = (exact.view(torch.int32) & -(2**16)).view(F32)
    assert torch.equal(found, exact.to(found.dtype))


# ------------------------------------------------------------------------------------------- values


@runs
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_step_of_each_rule(plain, rule, dtype):
    case = Case(rule, 3, 1, dtype, dtype)
    expected = case.to(F64, F64).step(plain)
    assert_close(case.step(mix_next_triton), expected, RTOL[dtype])


@runs
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("rule", ["sgd", "nesterov", "adamw 7"])
def test_step_of_half_precision_parameters(rule, dtype):
    case = Case(RULES[rule], 3, 1, F32, dtype)
    single = case.to(F32, F32).step(mix_next_triton)
    assert_rounded(case.step(mix_next_triton), single)


@runs
@pytest.mark.parametrize("rule", ["momentum", "adamw 1"])
@pytest.mark.parametrize(
    ("n", "frozen"), [(1, 0), (1, 2), (2, 1), (3, 0), (4, 2), (5, 0), (10, 1), (32, 0), (33, 2)]
)
def test_step_of_n_vertices(plain, rule, n, frozen):
    case = Case(RULES[rule], n, frozen, F32, F32, SIZES[:6])
    expected = case.to(F64, F64).step(plain)
    assert_close(case.step(mix_next_triton), expected, RTOL[F32])


@runs
@pytest.mark.parametrize("size", [1, 511, 512, 513])
def test_step_of_one_parameter(plain, size):
    case = Case(MOMENTUM, 2, 0, F32, F32, [size])
    expected = case.to(F64, F64).step(plain)
    assert_close(case.step(mix_next_triton), expected, RTOL[F32])


@runs
@pytest.mark.parametrize(("n", "frozen"), [(1, 0), (3, 0), (5, 2), (32, 0)])
@pytest.mark.parametrize("point", [F32, F64, BF16, F16])
def test_mix(plain, n, frozen, point):
    vertex = F64 if point == F64 else F32
    case = Case(RULES["sgd"], n, frozen, vertex, point, SIZES[:6])
    if point in RTOL:
        expected = case.to(F64, F64).mix(plain)
        assert_close(case.mix(mix_next_triton), expected, RTOL[point])
    else:
        single = case.to(F32, F32).mix(mix_next_triton)
        assert_rounded(case.mix(mix_next_triton), single)


@runs
@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_on_the_device(plain, shape):
    case = Case(RULES["adamw 7"], 3, 0, F32, F32, [33])
    expected = case.to(F64, F64).step(plain)
    case.alpha, case.next = case.alpha.to(DEVICE), case.next.to(DEVICE)
    lr, step = torch.full(shape, 0.1, device=DEVICE), torch.full(shape, 7.0, device=DEVICE)
    rule = AdamW(lr, (0.9, 0.999), 1e-8, 0.01, step, maximize=True)
    assert_close(case.step(mix_next_triton, rule), expected, RTOL[F32])


@runs
def test_gradients_that_move(plain):
    case = Case(MOMENTUM, 3, 0, F32, F32, [33, 7])
    expected = case.to(F64, F64).step(plain).step(plain)
    case.step(mix_next_triton)
    case.grads = [g.clone() for g in case.grads]
    assert_close(case.step(mix_next_triton), expected, RTOL[F32])


@runs
def test_nothing_to_do():
    case = Case(MOMENTUM, 3, 0, F32, F32, [0, 0])
    before = case.to(F32, F32)
    assert_close(case.step(mix_next_triton).mix(mix_next_triton), before, 0)


@runs
def test_numbers_in_plain_pytorch(plain):
    """Tensors as lr and step mean the same in the definition."""
    one = torch.ones((), dtype=F64)
    for rule, same in (
        (RULES["adamw 7"], AdamW(0.1 * one, (0.9, 0.999), 1e-8, 0.01, 7 * one, maximize=True)),
        (RULES["sgd"], Sgd(0.1 * one, 0.0, 0.0, 0.0, False, False, False)),
    ):
        case = Case(rule, 3, 0, F64, F64, [33])
        assert_close(case.to(F64, F64).step(plain, same), case.step(plain), 1e-15)


# ------------------------------------------------------------------------------------ on a GPU only


@on_gpu
def test_dispatch():
    case = Case(MOMENTUM, 3, 1, F32, F32)
    direct = case.to(F32, F32).step(mix_next_triton).mix(mix_next_triton)
    assert_close(case.step(mix_next).mix(mix_next), direct.to(F64, F64), 0)


@on_gpu
def test_offsets_beyond_32_bits():
    width, size = 2**30, 1000
    vertices = torch.empty(4, width, device=DEVICE)
    vertices[:, -size:] = torch.randn(4, size, device=DEVICE)
    param, alpha = torch.empty(size, device=DEVICE), torch.full((4,), 0.25)
    mix_next_triton.mix_(vertices, alpha, [param], [width - size])
    torch.testing.assert_close(param, vertices[:, -size:].mean(0))


@on_gpu
@pytest.mark.parametrize("rule", ["momentum", "adamw 1"])
def test_in_a_cuda_graph(rule):
    case = Case(RULES[rule], 3, 1, F32, F32)
    eager = case.to(F32, F32)
    case.alpha, case.next = case.alpha.to(DEVICE), case.next.to(DEVICE)
    lr, step = torch.tensor(0.1, device=DEVICE), torch.tensor(1.0, device=DEVICE)

    def with_numbers(lr, step):
        fields = dict(vars(RULES[rule]), lr=lr)
        return type(RULES[rule])(**fields | ({"step": step} if "step" in fields else {}))

    captured = with_numbers(lr, step)
    case.step(mix_next_triton, captured)  # Compiles and knows the parameters: a capture can't.
    eager.step(mix_next_triton)
    step.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.grads = [g * 1 for g in case.grads]  # In the graph's own memory, as after a backward.
        case.step(mix_next_triton, captured)
        step.add_(1)
    for k in range(3):
        draw = torch.softmax(torch.randn(4), 0)
        for one in (case, eager):
            one.next.copy_(draw)
        lr.fill_(0.1 / (k + 1))
        graph.replay()
        eager.step(mix_next_triton, with_numbers(0.1 / (k + 1), k + 2))
        for one in (case, eager):
            one.alpha.copy_(draw[:3])
    assert_close(case, eager.to(F64, F64), 1e-6)


# ----------------------------------------------------------------------------------- without a GPU


@starts_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


@compiles
def test_triton_is_imported_late_and_not_needed():
    program = """
import sys
import ensemblayers.optim
from ensemblayers.ops import mix_next
assert "triton" not in sys.modules
sys.modules["triton"] = None
assert mix_next._triton() is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def built(kernel, card, vertex, point, n, flags):
    """A kernel compiled for a card, with one frozen row."""
    module = mix_next_triton
    size = {"fp32": 4, "fp64": 8}[vertex]
    constants = {"POINT": module._TYPES[point], "N": n, "ROWS": n + 1, "MAXIMIZE": False, **flags}
    constants |= {"CHUNK": module.chunk(n, size), "BLOCK": module.BLOCK}
    if not flags.get("MOMENTUM"):
        constants["buffer"] = None
    types = dict.fromkeys(("vertices", "buffer", "average", "square"), f"*{vertex}")
    types |= {"width": "i64", "table": "*i64", "owner": "*i32", "grads": "*i64"}
    types |= dict.fromkeys(("alpha", "next_alpha", "lr", "step", "numbers"), "*fp64")
    return compiled(kernel, card, types, constants, num_warps=module.WARPS)


@compiles
@pytest.mark.parametrize("card", CARDS, ids=str)
def test_compiles_without_spills(card, tmp_path):
    sgd, module = {"NESTEROV": False, "FIRST": False}, mix_next_triton
    kernels = {
        "mix": (module.mix_kernel, {}),
        "sgd": (module.sgd_kernel, {**sgd, "MOMENTUM": False}),
        "nesterov": (module.sgd_kernel, {**sgd, "MOMENTUM": True, "NESTEROV": True}),
        "adamw": (module.adamw_kernel, {}),
    }
    print(f"\n{card}: registers / bytes spilled\n{'':14}" + "".join(f"{k:>12}" for k in kernels))
    for vertex, point in (("fp32", F32), ("fp32", BF16)):
        for n in (3, 5, 10, 32):
            row = []
            for name, (kernel, flags) in kernels.items():
                k = built(kernel, card, vertex, point, n, flags)
                registers, spilled = resources(k, card, tmp_path)
                if card[0] == "cuda" and point == BF16:
                    assert "cvt.rn.bf16" in k.asm["ptx"]  # Rounds to nearest.
                row.append(f"{registers} / {spilled}")
                assert spilled == 0, f"{name}, n={n}, {point} on {card} spills"
            print(f"{str(point)[6:]:>9} n={n:<3}" + "".join(f"{cell:>12}" for cell in row))
