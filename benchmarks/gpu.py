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
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if "--toy" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ensemblayers as el
from ensemblayers.ops import (
    batch_ensemble_linear_triton,
    member_scale_triton,
    mix_next,
    mix_triton,
    subspace_linear,
    tuning,
)
from ensemblayers.ops import subspace_linear_triton as kernels
from examples.models import mlp, reduced_resnet

from .clock import Prepared
from .gpu_batch_ensemble import batch_ensemble, tune_batch_ensemble
from .gpu_bench import LIMITS, Bench, Plan, Report, dtype_of, error, precision

ROOT = Path(__file__).parents[1]
# Those that run otherwise where there is a GPU.
TESTS = sorted(map(str, ROOT.glob("tests/ops/test_*_triton.py")))
TESTS += ["tests/optim", "tests/examples/test_graphs.py"]

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
        x, y = (b.randn(k, k, dtype=dtype_of(dtype)) for _ in range(2))
        with precision(dtype):
            ms = b.clock.race({"product": lambda x=x, y=y: x @ y})["product"].ms
        b.rates[dtype] = 2 * k**3 / ms * 1e3
        b.report.add("ceilings", what=f"product {dtype}", TFLOPs=b.rates[dtype] / 1e12)
    for n in (3, 5):
        _mix_bandwidth(b, n, size // (2 * n))
        _mix_next_bandwidth(b, n, size // (2 * n))


def _mix_bandwidth(b: Bench, n: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        stacked, alpha = b.randn(n, size, dtype=dtype), _point(b, n)
        off = error(mix_triton.mix(stacked, alpha), _mixed(stacked, alpha))
        limit = LIMITS["float32" if dtype == torch.float32 else "bf16"]
        moved = (n + 1) * size * dtype.itemsize
        call = functools.partial(mix_triton.mix, stacked, alpha)
        _pass(b, f"mix {str(dtype)[6:]}", n, call, moved, off <= limit)


def _mix_next_bandwidth(b: Bench, n: int, size: int) -> None:
    rule = mix_next.Sgd(0.01, 0.9, 0.0, 0.0, nesterov=False, first=False, maximize=False)
    vertices, moments = b.randn(n, size), (b.randn(n, size),)
    param, grad = b.randn(size), b.randn(size)
    alpha, following = _point(b, n), _point(b, n)

    def step() -> None:
        mix_next.step_(rule, vertices, moments, [param], [grad], [0], alpha, following)

    step()
    right = error(param, _mixed(vertices, following)) <= LIMITS["float32"]
    _pass(b, "mix-next, momentum", n, step, (4 * n + 2) * size * 4, right)


def _pass(b: Bench, what: str, n: int, call, moved: int, right: bool) -> None:
    """A row: the bytes a second of a pass over all weights, as a share of the copy's."""
    share = moved / b.clock.race({what: call})[what].ms * 1e3 / b.bandwidth
    b.report.add("passes", what=what, n=n, of_copy=share if right else "wrong")


# ------------------------------------------------------------------------------------------ 2 tests


def tests(b: Bench) -> None:
    """The tests that run on this device, a process for each file: compilation takes most time."""
    # What compiles for other cards or runs in the interpreter needs no GPU.
    chosen = "not spills and not interpreter"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    rehearsed = b.device.type == "cpu"
    groups = [["--collect-only", *TESTS]] if rehearsed else [[file] for file in TESTS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [
        subprocess.Popen([*command, *group], cwd=ROOT, env=environment, **pipes) for group in groups
    ]
    # A thread each, as a full pipe would stop its writer.
    with ThreadPoolExecutor(len(groups)) as pool:
        outcomes = pool.map(lambda process: _outcome(process, b.until), running)
        for group, lines in zip(groups, outcomes, strict=True):
            for line in lines:
                if line.startswith(("FAILED", "ERROR", "E   ")):
                    print(line)
            b.report.add("tests", file=Path(group[-1]).name, result=lines[-1].strip("= "))


def _outcome(process: subprocess.Popen, until: float) -> list[str]:
    """The lines that tests print, which have until then."""
    try:
        output, _ = process.communicate(timeout=max(5.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0] + "\nstopped: out of time"
    return [line for line in output.strip().splitlines() if line.strip()] or ["no output"]


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
    half = (began + b.until) / 2
    with tuning.tuned(), torch.no_grad():
        for size, batch, n, dtype in shapes:
            if time.monotonic() > half:
                break
            x, weight, bias, alpha = _layer(b, size, batch, n, dtype)
            with precision(dtype):
                if subspace_linear.algorithm(x, weight, alpha) == "fused":
                    kernels.point(x, weight, bias, alpha, True)
                kernels.gradients(x, x, weight, bias, alpha, (True, True, False))
        tune_batch_ensemble(b)
    seconds = time.monotonic() - began
    if tuning.entries() and b.device.type == "cuda":
        tuning.save(b.device)
    b.report.add("tuning", shapes=tuning.entries(), seconds=seconds)


# ---------------------------------------------------------------------------------- 4, 5 the linear


def _layer(b: Bench, size: int, batch: int, n: int, dtype: str) -> tuple[Tensor, ...]:
    t = dtype_of(dtype)
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
        with precision(dtype), torch.no_grad():
            functions = {k: lambda f=f, given=given: f(*given) for k, f in ways.items()}
            floor = b.floor(moved, 2 * batch * size**2, dtype)
            about = {"in = out": size, "B": batch, "n": n, "dtype": dtype}
            b.compare("forward", functions, check, LIMITS[dtype], floor, **about)


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
        # Of each, the trained weight, and the share of the gradient that its first member gets.
        gradients: dict[str, tuple[Tensor, float | Tensor]] = {}
        functions: dict[str, Callable[[], object]] = {}
        for name, way in ways.items():
            if way is None:
                functions[name], own = _optimizer_step(x, weight, bias, grad, n)
                gradients[name] = own, 1.0
                continue
            members = 1 if way is _plain else n
            some = (weight[:members], bias[:members], alpha[:members])
            functions[name], own = _layer_step(way, x, *some, grad)
            gradients[name] = own, 1.0 if way is _plain else alpha[0]

        def check(name: str, functions=functions, gradients=gradients, outer=outer) -> float:
            functions[name]()
            weight, share = gradients[name]
            return error(weight.grad.view(-1, *outer.shape)[0], share * outer)

        bytes_w = size * size * weight.element_size()
        with precision(dtype):
            floor = b.floor((4 * n + 5) * bytes_w, 6 * batch * size**2, dtype)
            about = {"in = out": size, "B": batch, "n": n, "dtype": dtype}
            b.compare("step", functions, check, LIMITS[dtype], floor, **about)


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


# --------------------------------------------------------------------------------------- the script


def _point(b: Bench, n: int) -> Tensor:
    return el.sample_simplex(n, device=b.device)


def _mixed(stacked: Tensor, alpha: Tensor) -> Tensor:
    """The definition in float64, a member at a time: a stack of doubles may not fit."""
    return sum(a.double() * w.detach().double() for a, w in zip(alpha, stacked, strict=True))


def _on_cpu() -> None:
    """For the rehearsal: the kernels take CPU tensors, which the interpreter runs."""
    from ensemblayers.ops import _autograd, _triton

    _triton.takes = lambda *tensors: True
    mix_next._in_cpp, mix_next._in_triton = lambda *_: False, lambda *_: True
    _triton.on_tensor_cores = lambda x: True
    _triton.takes_index = lambda *tensors: True
    replacements = {
        "mix": mix_triton.mix,
        "mix_backward": mix_triton.mix_backward,
        "subspace_linear": kernels.forward,
        "subspace_linear_backward": kernels.backward,
        "batch_ensemble_linear": batch_ensemble_linear_triton.forward,
        "batch_ensemble_linear_backward": batch_ensemble_linear_triton.backward,
        "member_scale": member_scale_triton.forward,
        "member_scale_backward": member_scale_triton.backward,
    }
    for name, kernel in replacements.items():
        _autograd.LIBRARY.impl(name, kernel, "CPU", allow_override=True)


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
