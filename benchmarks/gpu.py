"""One script for a machine with a GPU: the GPU tests, tuning, and tables of what the kernels do.

    python -m benchmarks.gpu             within 8 minutes
    python -m benchmarks.gpu --quick     within 90 seconds
    python -m benchmarks.gpu --toy       a rehearsal on a CPU, at toy sizes, in Triton's interpreter

It needs a checkout, torch, einops and triton, and for the tests pytest; it installs nothing and
takes nothing from the network. After each section, and each row of the long ones, it writes what it
has to ``benchmarks/results/<card>.json`` and ``.md``; the tile sizes that it found go into the
package. Times are medians with a cold L2 cache, from CUDA graphs where a function can be captured;
ratios are medians of rounds in which all candidates are timed in turn. A candidate whose result is
wrong is reported as wrong, without a time.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--toy" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

import ensemblayers as el
from ensemblayers.ops import mix_next, mix_triton, subspace_linear, tuning
from ensemblayers.ops import subspace_linear_triton as kernels
from examples.models import mlp, reduced_resnet

from .clock import Clock, Prepared, Time

ROOT = Path(__file__).parents[1]
TESTS = ["tests/ops", "tests/test_optim.py"]


@dataclasses.dataclass
class Plan:
    """What is run, and for how long."""

    sizes: tuple[int, ...] = (1024, 4096)
    batches: tuple[int, ...] = (10, 128, 1024, 8192)
    members: tuple[int, ...] = (3, 5, 10)
    dtypes: tuple[str, ...] = ("bf16", "tf32")
    rounds: int = 15
    seconds: float = 8 * 60
    # Shares of the time: a section that meets its end stops, and the next one begins.
    ends: tuple[float, ...] = (0.03, 0.28, 0.5, 0.7, 0.88, 0.95, 1.0)
    copy: int = 2**28  # elements
    product: int = 8192
    mlp: tuple[int, int] = (784, 256)  # features in, hidden
    width: int = 20  # of the ResNet

    @staticmethod
    def quick() -> "Plan":
        few = Plan(sizes=(4096,), batches=(10, 1024), members=(3,), dtypes=("bf16",), rounds=7)
        ends = (0.05, 0.45, 0.45, 0.65, 0.85, 0.95, 1.0)
        return dataclasses.replace(few, seconds=90, ends=ends)

    @staticmethod
    def toy() -> "Plan":
        few = Plan(sizes=(32,), batches=(4,), members=(2,), rounds=2, seconds=300)
        return dataclasses.replace(few, copy=2**10, product=32, mlp=(20, 8), width=1)


class Report:
    """Rows of results, written after each."""

    def __init__(self, folder: Path, card: str) -> None:
        self.path = folder / card
        self.about = {
            "card": card,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "date": datetime.date.today().isoformat(),
        }
        self.sections: dict[str, list[dict[str, Any]]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, section: str, **row: Any) -> None:
        """Print and store a row."""
        self.sections.setdefault(section, []).append(row)
        print(f"{section}: " + ", ".join(f"{k} {_cell(v)}" for k, v in row.items()), flush=True)
        self.write()

    def write(self) -> None:
        data = {**self.about, "sections": self.sections}
        self.path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        about = ", ".join(f"{k} {v}" for k, v in self.about.items() if k != "card")
        lines = [f"# {self.about['card']}", "", about]
        for name, rows in self.sections.items():
            keys = list(dict.fromkeys(k for row in rows for k in row))
            lines += ["", f"## {name}", "", "| " + " | ".join(keys) + " |"]
            lines += ["| " + " | ".join("---" for _ in keys) + " |"]
            lines += ["| " + " | ".join(_cell(r.get(k, "")) for k in keys) + " |" for r in rows]
        self.path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class Bench:
    """What the sections share.

    Args:
        ends: when each section has to stop.
    """

    def __init__(self, plan: Plan, report: Report, device: torch.device) -> None:
        self.plan, self.report, self.device = plan, report, device
        self.clock = Clock(device, plan.rounds)
        self.began = time.monotonic()
        self.until = self.began
        self.bandwidth = float("nan")  # bytes a second, read and written
        self.rates: dict[str, float] = {}  # operations a second

    def left(self) -> bool:
        return time.monotonic() < self.until

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def floor(self, moved: float, operations: float, dtype: str) -> float:
        """The least milliseconds for so many bytes and operations, by this run's own ceilings."""
        return max(moved / self.bandwidth, operations / self.rates[dtype]) * 1e3

    def compare(
        self,
        section: str,
        candidates: dict[str, Callable[[], object]],
        check: Callable[[str], float],
        limit: float,
        floor: float | None = None,
        **about: Any,
    ) -> None:
        """Time the candidates that are right, and add their row: ratios to the first one."""
        wrong = {}
        for name in list(candidates):
            try:
                error = check(name)
            except Exception as e:
                wrong[name] = f"failed: {type(e).__name__}"
                print(f"{section} {about} {name}: {e}", file=sys.stderr)
            else:
                if not error <= limit:
                    wrong[name] = f"wrong by {error:.1e}"
            if name in wrong:
                del candidates[name]
        times = self.clock.race(candidates) if candidates else {}
        row: dict[str, Any] = dict(about)
        for k, (name, t) in enumerate(times.items()):
            row[f"{name} ms" if k == 0 else name] = t.ms if k == 0 else _ratio(t)
        if floor is not None and times:
            row["floor"] = floor / next(iter(times.values())).ms
        self.report.add(section, **row, **wrong)


def _ratio(t: Time) -> str:
    middle, low, high = t.ratio
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]" + ("" if t.graph else " (no graph)")


def error(found: Tensor, exact: Tensor) -> float:
    """Relative root mean square; NaN stays NaN."""
    return float((found.detach().double() - exact.double()).norm() / exact.double().norm())


# -------------------------------------------------------------------------------------- 1 bandwidth


def bandwidth(b: Bench) -> None:
    """Ceilings of the card, and how near the passes over all weights come to them."""
    size = b.plan.copy
    source, target = b.randn(size), b.randn(size)
    ms = b.clock.race({"copy": lambda: target.copy_(source)})["copy"].ms
    b.bandwidth = 8 * size / ms * 1e3
    b.report.add("ceilings", what="copy", GBps=b.bandwidth / 1e9)
    k = b.plan.product
    for dtype in b.plan.dtypes:
        x, y = (b.randn(k, k, dtype=_dtype(dtype)) for _ in range(2))
        with _precision(dtype):
            ms = b.clock.race({"product": lambda x=x, y=y: x @ y})["product"].ms
        b.rates[dtype] = 2 * k**3 / ms * 1e3
        b.report.add("ceilings", what=f"product {dtype}", TFLOPs=b.rates[dtype] / 1e12)
    for n in (3, 5):
        _mix_bandwidth(b, n, size // (2 * n))
        _mix_next_bandwidth(b, n, size // (2 * n))


def _mix_bandwidth(b: Bench, n: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        stacked, alpha = b.randn(n, size, dtype=dtype), _point(b, n)
        wrong = error(mix_triton.mix(stacked, alpha), _mixed(stacked, alpha))
        ms = b.clock.race({"mix": lambda s=stacked, a=alpha: mix_triton.mix(s, a)})["mix"].ms
        share = (n + 1) * size * dtype.itemsize / ms * 1e3 / b.bandwidth
        b.report.add("passes", what=f"mix {str(dtype)[6:]}", n=n, of_copy=share, error=wrong)


def _mix_next_bandwidth(b: Bench, n: int, size: int) -> None:
    rule = mix_next.Sgd(0.01, 0.9, 0.0, 0.0, nesterov=False, first=False, maximize=False)
    vertices, moments = b.randn(n, size), (b.randn(n, size),)
    param, grad = b.randn(size), b.randn(size)
    alpha, following = _point(b, n), _point(b, n)

    def step() -> None:
        mix_next.step_(rule, vertices, moments, [param], [grad], [0], alpha, following)

    step()
    wrong = error(param, _mixed(vertices, following))
    ms = b.clock.race({"step": step})["step"].ms
    share = (4 * n + 2) * size * 4 / ms * 1e3 / b.bandwidth
    b.report.add("passes", what="mix-next, momentum", n=n, of_copy=share, error=wrong)


# ------------------------------------------------------------------------------------------ 2 tests


def tests(b: Bench) -> None:
    """The tests that run on this device, in a process of their own."""
    seconds = max(5.0, b.until - time.monotonic())
    # What compiles for other cards or runs in the interpreter needs no GPU.
    chosen = "not compiles and not interpreter and not native"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, "-k", chosen]
    if b.device.type == "cpu":
        command.append("--collect-only")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode() + "\nstopped: out of time"
    lines = [line for line in output.strip().splitlines() if line.strip()] or ["no output"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR", "E   ")):
            print(line)
    b.report.add("tests", result=lines[-1].strip("= "))


# ----------------------------------------------------------------------------------------- 3 tuning


def tune(b: Bench) -> None:
    """Tile sizes for the grid's shapes, most wanted first, into the package's own file."""
    began = time.monotonic()
    shapes = [
        (size, batch, n, dtype)
        for dtype in b.plan.dtypes
        for n in b.plan.members
        for batch in b.plan.batches
        for size in b.plan.sizes
        if batch <= subspace_linear.GRADIENT_ROWS
    ]
    if b.plan.seconds < 100:
        return
    with tuning.tuned(), torch.no_grad():
        for size, batch, n, dtype in shapes:
            if not b.left():
                break
            x, weight, bias, alpha = _layer(b, size, batch, n, dtype)
            with _precision(dtype):
                if subspace_linear.algorithm(x, weight, alpha) == "fused":
                    kernels.point(x, weight, bias, alpha, True)
                kernels.gradients(x, x, weight, bias, alpha, (True, True, False))
    seconds = time.monotonic() - began
    if tuning.entries() and b.device.type == "cuda":
        tuning.save(b.device)
    b.report.add("tuning", shapes=tuning.entries(), seconds=seconds)


# ---------------------------------------------------------------------------------- 4, 5 the linear


def _layer(b: Bench, size: int, batch: int, n: int, dtype: str) -> tuple[Tensor, ...]:
    t = _dtype(dtype)
    weight = b.randn(n, size, size, dtype=t) / size**0.5
    return b.randn(batch, size, dtype=t), weight, b.randn(n, size, dtype=t), _point(b, n)


def _einsum(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    alpha = alpha.to(weight.dtype)
    w, c = torch.einsum("n,noi->oi", alpha, weight), torch.einsum("n,no->o", alpha, bias)
    return F.linear(x, w, c)


def _with_library(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    with subspace_linear.forced("mixed"):
        return el.functional.subspace_linear(x, weight, bias, alpha)


def _plain(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    return F.linear(x, weight[0], bias[0])


def _grid(b: Bench):
    """Shapes, those where a fused product should pay first."""
    for batch in b.plan.batches:
        for n in b.plan.members:
            for dtype in b.plan.dtypes:
                for size in b.plan.sizes:
                    if not b.left():
                        return
                    yield size, batch, n, dtype


def forward(b: Bench) -> None:
    """A forward pass at a fresh point, without gradients."""
    compiled = torch.compile(_einsum, dynamic=True) if b.device.type == "cuda" else _einsum
    ways = {
        "nn.Linear": _plain,
        "ours": el.functional.subspace_linear,
        "mix + cuBLAS": _with_library,
        "einsum": _einsum,
        "compiled einsum": compiled,
    }
    for size, batch, n, dtype in _grid(b):
        x, weight, bias, alpha = given = _layer(b, size, batch, n, dtype)
        w, c = _mixed(weight, alpha), _mixed(bias, alpha)
        exact = x.double() @ w.mT + c
        single = x.double() @ weight[0].double().mT + bias[0].double()

        def check(name: str, given=given, exact=exact, single=single) -> float:
            return error(ways[name](*given), single if name == "nn.Linear" else exact)

        bytes_w = size * size * weight.element_size()
        moved = n * bytes_w + 2 * batch * size * x.element_size()
        with _precision(dtype), torch.no_grad():
            functions = {k: lambda f=f, given=given: f(*given) for k, f in ways.items()}
            floor = b.floor(moved, 2 * batch * size**2, dtype)
            about = {"in = out": size, "B": batch, "n": n, "dtype": dtype}
            b.compare("forward", functions, check, 1e-2, floor, **about)


def step(b: Bench) -> None:
    """Forward, backward and momentum SGD of one layer."""
    compiled = torch.compile(_einsum, dynamic=True) if b.device.type == "cuda" else _einsum
    ways = {
        "nn.Linear": _plain,
        "SubspaceSGD": None,
        "ours": el.functional.subspace_linear,
        "mix + cuBLAS": _with_library,
        "einsum": _einsum,
        "compiled einsum": compiled,
    }
    for size, batch, n, dtype in _grid(b):
        x, weight, bias, alpha = _layer(b, size, batch, n, dtype)
        x.requires_grad_()
        grad = b.randn(batch, size, dtype=x.dtype)
        outer = grad.double().mT @ x.detach().double()
        trained: dict[str, Tensor] = {}
        functions: dict[str, Callable[[], object]] = {}
        for name, way in ways.items():
            if way is None:
                functions[name], trained[name] = _optimizer_step(x, weight, bias, grad, n)
            else:
                members = 1 if name == "nn.Linear" else n
                functions[name], trained[name] = _layer_step(
                    way, x, weight[:members], bias[:members], alpha[:members], grad
                )

        def check(name: str) -> float:
            functions[name]()  # noqa: B023, called in this iteration
            share = alpha[0] if trained[name].dim() == 3 and len(trained[name]) > 1 else 1.0  # noqa: B023
            found = trained[name].grad if trained[name].dim() == 2 else trained[name].grad[0]  # noqa: B023
            return error(found, share * outer)  # noqa: B023

        bytes_w = size * size * weight.element_size()
        with _precision(dtype):
            floor = b.floor((4 * n + 5) * bytes_w, 6 * batch * size**2, dtype)
            about = {"in = out": size, "B": batch, "n": n, "dtype": dtype}
            b.compare("step", functions, check, 1e-2, floor, **about)


def _layer_step(way, x, weight, bias, alpha, grad):
    weight, bias = (t.clone().requires_grad_() for t in (weight, bias))
    optimizer = torch.optim.SGD([weight, bias], 1e-4, momentum=0.9, fused=x.is_cuda or None)

    def run() -> None:
        x.grad = None
        optimizer.zero_grad()
        way(x, weight, bias, alpha).backward(grad)
        optimizer.step()

    return run, weight


def _optimizer_step(x, weight, bias, grad, n):
    layer = nn.Linear(x.shape[1], weight.shape[1], device=x.device, dtype=x.dtype)
    optimizer = el.optim.SubspaceSGD(layer.parameters(), 1e-4, n=n, sigma=0.1, momentum=0.9)

    def run() -> None:
        x.grad = None
        optimizer.zero_grad()
        layer(x).backward(grad)
        optimizer.step()

    return Prepared(run, optimizer.prepare), layer.weight


# ------------------------------------------------------------------------------------ 6, 7 networks


def networks(b: Bench) -> None:
    """Training steps of the paper's networks, fp32, momentum SGD."""
    inputs, hidden = b.plan.mlp
    perceptron = f"MLP {inputs}-{hidden}-{hidden}-10"
    shapes = {
        f"{perceptron}, B=10": (lambda: mlp(inputs, hidden, 10), (10, inputs)),
        f"{perceptron}, B=64": (lambda: mlp(inputs, hidden, 10), (64, inputs)),
        "reduced ResNet, B=10": (lambda: reduced_resnet(b.plan.width, 100), (10, 3, 32, 32)),
    }
    for name, (make, shape) in shapes.items():
        x = b.randn(*shape)
        y = torch.randint(10, shape[:1], device=b.device)
        functions = {"one network": _network_step(make().to(b.device), x, y)}
        for n in (3, 5):
            model = make().to(b.device)
            optimizer = el.optim.SubspaceSGD(model.parameters(), 0.01, n=n, momentum=0.9)
            functions[f"SubspaceSGD n={n}"] = _network_step(model, x, y, optimizer)
        layers = el.to_subspace(make(), n=3).to(b.device)
        functions["to_subspace n=3"] = _network_step(layers, x, y)
        at_once = el.to_subspace(make(), n=3).to(b.device)
        el.share_point(at_once, at_once=True)
        functions["at once n=3"] = _network_step(at_once, x, y)
        functions["stacked n=3"] = _stacked_step(el.to_stacked(make(), n=3).to(b.device), x, y)
        if "MLP" in name:
            stacked = el.to_stacked(make(), n=10).to(b.device)
            functions["stacked n=10"] = _stacked_step(stacked, x, y)
        # Right or not is what the tests say; here a step has to give a finite loss.
        b.compare("networks", functions, lambda k, f=functions: _finite(f[k]()), 0.0, network=name)
        if not b.left():
            return


def _network_step(model, x, y, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Prepared(run, optimizer.prepare) if hasattr(optimizer, "prepare") else run


def _stacked_step(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = el.ensemble_loss(F.cross_entropy, model(x, shared=True), y)
        loss.backward()
        optimizer.step()
        return loss

    return run


def _finite(loss: Tensor) -> float:
    return 0.0 if bool(loss.isfinite()) else float("inf")


def batch_ensemble(b: Bench) -> None:
    """BatchEnsemble's linear layer with n = 4 against nn.Linear on the same rows."""
    n = 4
    for batch in b.plan.batches:
        for dtype in b.plan.dtypes:
            for size in b.plan.sizes:
                if not b.left():
                    return
                _batch_ensemble_case(b, n, size, batch, dtype)


def _batch_ensemble_case(b: Bench, n: int, size: int, batch: int, dtype: str) -> None:
    t = _dtype(dtype)
    x, weight = b.randn(n * batch, size, dtype=t), b.randn(size, size, dtype=t) / size**0.5
    r, s, bias = (b.randn(n, size, dtype=t) for _ in range(3))
    leaves = [v.requires_grad_() for v in (x, weight, r, s, bias)]
    grad = b.randn(n * batch, size, dtype=t)
    about = {"in = out": size, "rows": n * batch, "n": n, "dtype": dtype}

    def ours() -> Tensor:
        return el.functional.batch_ensemble_linear(x, weight, r, s, bias)

    def plain() -> Tensor:
        return F.linear(x, weight, bias[0])

    def with_backward(f):
        used = leaves if f is ours else [x, weight, bias]
        return lambda: torch.autograd.grad(f(), used, grad)

    rows = x.detach().double().view(n, batch, size) * r.detach().double().unsqueeze(1)
    exact = rows @ weight.detach().double().mT * s.detach().double().unsqueeze(1)
    exact = (exact + bias.detach().double().unsqueeze(1)).flatten(0, 1)
    single = x.detach().double() @ weight.detach().double().mT + bias[0].detach().double()

    def check(name: str) -> float:
        return error(plain(), single) if name == "nn.Linear" else error(ours(), exact)

    functions = {"nn.Linear": plain, "ours": ours}
    with _precision(dtype):
        with torch.no_grad():
            b.compare("BatchEnsemble forward", dict(functions), check, 1e-2, **about)
        steps = {k: with_backward(f) for k, f in functions.items()}
        b.compare("BatchEnsemble forward + backward", steps, check, 1e-2, **about)


# --------------------------------------------------------------------------------------- the script


def _dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "bf16" else torch.float32


class _precision:
    """float32 products in tf32, or exactly."""

    def __init__(self, dtype: str) -> None:
        self.wanted = "ieee" if dtype == "fp32" else "tf32"

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = self.wanted

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = self.before


def _point(b: Bench, n: int) -> Tensor:
    return el.sample_simplex(n, device=b.device)


def _mixed(stacked: Tensor, alpha: Tensor) -> Tensor:
    """The definition in float64, a member at a time: a stack of doubles may not fit."""
    return sum(a.double() * w.detach().double() for a, w in zip(alpha, stacked, strict=True))


def _on_cpu() -> None:
    """For the rehearsal: the kernels take CPU tensors, which the interpreter runs."""
    from ensemblayers.ops import _autograd, _triton, mix

    _triton.takes = lambda *tensors: True
    mix_next._in_cpp, mix_next._in_triton = lambda *_: False, lambda *_: True
    subspace_linear._on_tensor_cores = lambda x: True
    replacements = {
        "mix": mix_triton.mix,
        "mix_backward": mix_triton.mix_backward,
        "subspace_linear": kernels.forward,
        "subspace_linear_backward": kernels.backward,
    }
    for name, kernel in replacements.items():
        _autograd.LIBRARY.impl(name, kernel, "CPU", allow_override=True)
    assert mix.fused_mix is not None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a part of it, in 90 seconds")
    parser.add_argument("--toy", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    plan = Plan.toy() if options.toy else Plan.quick() if options.quick else Plan()
    device = torch.device("cpu" if options.toy else "cuda")
    if options.toy:
        _on_cpu()
        card = "toy"
    elif not torch.cuda.is_available():
        print("error: no GPU; --toy rehearses on a CPU", file=sys.stderr)
        return 2
    else:
        card = torch.cuda.get_device_name().replace(" ", "-").replace("/", "-")
    torch.manual_seed(0)
    bench = Bench(plan, Report(options.out, card), device)
    sections = (bandwidth, tests, tune, forward, step, networks, batch_ensemble)
    for section, end in zip(sections, plan.ends, strict=True):
        bench.until = bench.began + end * plan.seconds
        try:
            section(bench)
        except Exception as e:  # The other sections' results are worth having.
            print(f"{section.__name__}: {type(e).__name__}: {e}", file=sys.stderr)
            bench.report.add("failures", what=section.__name__, error=str(e)[:300])
            if options.toy:
                raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(bench.report.path.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
