"""Whole training steps: ``opt.zero_grad(); loss.backward(); opt.step()``, against one network's.

    pytest benchmarks/test_steps.py
    pytest benchmarks/test_steps.py -k "MLP and optimizer" --seconds 10

A row's ratio is to the same plain network with torch.optim.SGD(momentum=0.9): for BatchEnsemble on
the same n * B rows, for a stacked ensemble to n such networks, one by one, each with its optimizer.
``goal`` is what a row should reach with one thread on a machine that does nothing else. ``memory``
is a step's peak: parameters, the optimizer's state, gradients and activations, as torch allocates
them. How to read the table: conftest.py.
"""

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from references import Eager, at_points, close, compiled, mixed
from torch import Tensor, nn

import ensemblayers as el
from ensemblayers import _ahead

LR, MOMENTUM, SIGMA = 1e-3, 0.9, 0.1
GOALS = {
    ("MLP, B=10", 3): 1.15,
    ("MLP, B=64", 3): 1.10,
    ("2048x2048, B=10", 3): 1.60,
    ("2048x2048, B=64", 3): 1.45,
    ("2048x2048, B=512", 3): 1.05,
    ("MLP, B=10", 5): 1.30,
    ("MLP, B=64", 5): 1.20,
    ("2048x2048, B=10", 5): 2.50,
    ("2048x2048, B=64", 5): 1.90,
    ("2048x2048, B=512", 5): 1.15,
    ("resnet18, B=16", 3): 1.10,
}


@dataclass
class Training:
    """A way to train n networks: a step, and what a check and the memory's account need."""

    step: Callable[[], None]
    optimizers: list[torch.optim.Optimizer]
    vertices: Callable[[], list[Tensor]]  # [n, *shape], one a parameter of the plain network.
    alpha: Callable[[], Tensor] | None = None  # The point of a step; None: n networks.
    ahead: bool = False  # Whether alpha is drawn before the step.


@dataclass
class Task:
    net: nn.Module
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    separate: bool = False  # Whether x and y are [n, B, ...], a batch a member.
    check_lr: float = 0.1  # A check's steps, that float32 shows well.
    tolerance: float = 1e-4  # Of what the steps change.

    def of_member(self, i: int) -> "Task":
        """Member i's own network and batch."""
        x, y = (t[i] if self.separate else t for t in (self.x, self.y))
        return dataclasses.replace(self, net=copy.deepcopy(self.net), x=x, y=y, separate=False)

    def training(self, call: Callable[[Tensor], Tensor], opt: torch.optim.Optimizer, **kw):
        def step():
            opt.zero_grad()
            self.loss(call(self.x), self.y).backward()
            opt.step()

        return Training(step, [opt], **kw)


def mlp(batch: int) -> Task:
    sizes = [784, 256, 256, 10]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    return Task(net, torch.randn(batch, 784), torch.randint(10, (batch,)), F.cross_entropy)


def square(batch: int) -> Task:
    x, y = torch.randn(2, batch, 2048)
    return Task(nn.Linear(2048, 2048), x, y, F.mse_loss)


def convolutions(batch: int) -> Task:
    blocks = []
    for a, b in ((3, 16), (16, 32)):
        blocks += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)]
        blocks += [nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 8 * 8, 10))
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    return Task(net, x, y, F.cross_entropy, tolerance=1e-2)


def resnet18(batch: int) -> Task:
    models = pytest.importorskip("torchvision.models")
    x, y = torch.randn(batch, 3, 64, 64), torch.randint(10, (batch,))
    # 18 layers of BatchNorm, the last over 2x2: float32 gradients are off by up to 1 %.
    net = models.resnet18(num_classes=10)
    return Task(net, x, y, F.cross_entropy, check_lr=LR, tolerance=2e-2)


TASKS = {
    "MLP, B=10": partial(mlp, 10),
    "MLP, B=64": partial(mlp, 64),
    "2048x2048, B=10": partial(square, 10),
    "2048x2048, B=64": partial(square, 64),
    "2048x2048, B=512": partial(square, 512),
    "resnet18, B=16": partial(resnet18, 16),
}


def one_network(task: Task, **options: bool) -> Training:
    net = copy.deepcopy(task.net)
    opt = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, **options)
    return task.training(net, opt, vertices=lambda: [p.detach()[None] for p in net.parameters()])


def optimizer(task: Task, n: int) -> Training:
    net = copy.deepcopy(task.net)
    opt = el.optim.SubspaceSGD(net.parameters(), lr=LR, n=n, sigma=SIGMA, momentum=MOMENTUM)
    return task.training(net, opt, vertices=opt.vertices, alpha=lambda: opt.alpha, ahead=True)


def layers(task: Task, n: int) -> Training:
    model = el.to_subspace(task.net, n=n, sigma=SIGMA)
    point = el.share_point(model)
    return _stacked(task, model, model, lambda: point.alpha)


def einsum(task: Task, n: int, compile: bool = False) -> Training:
    model = Eager(task.net, n=n, sigma=SIGMA)
    return _stacked(task, model, compiled(model) if compile else model, lambda: model.alpha)


def loop(task: Task, n: int) -> Training:
    each = [one_network(task.of_member(i)) for i in range(n)]

    def step():
        for training in each:
            training.step()

    def vertices():
        return [torch.cat(rows) for rows in zip(*(t.vertices() for t in each), strict=True)]

    return Training(step, [opt for t in each for opt in t.optimizers], vertices)


def stacked(task: Task, n: int) -> Training:
    model = el.to_stacked(task.net, n=n)
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def step():
        opt.zero_grad()
        outputs = model(task.x, shared=not task.separate)
        if task.separate:
            sum(map(task.loss, outputs, task.y)).backward()
        else:
            el.ensemble_loss(task.loss, outputs, task.y).backward()
        opt.step()

    return Training(step, [opt], lambda: [p.detach() for p in model.parameters()])


def _stacked(task: Task, model: nn.Module, call: Callable, alpha: Callable) -> Training:
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    vertices = list(model.parameters())
    return task.training(call, opt, vertices=lambda: [v.detach() for v in vertices], alpha=alpha)


CANDIDATES = {
    "SubspaceSGD n=3": partial(optimizer, n=3),
    "SubspaceSGD n=5": partial(optimizer, n=5),
    "to_subspace + SGD n=3": partial(layers, n=3),
    "eager einsum + SGD n=3": partial(einsum, n=3),
    "compiled einsum + SGD n=3": partial(einsum, n=3, compile=True),
    "loop over n=3 networks": partial(loop, n=3),
}


@pytest.mark.parametrize(
    "case,name",
    [(c, k) for c in TASKS for k in CANDIDATES if "resnet" not in c or k == "SubspaceSGD n=3"],
    ids=lambda v: v.replace(" ", ""),
)
def test_step(compare, case, name, tmp_path):
    task = TASKS[case]()
    candidate, baseline = CANDIDATES[name](task), one_network(task)
    for training in (candidate, baseline):
        check(task, training)
    peak, one = (peak_memory(t, tmp_path / "trace.json") for t in (candidate, baseline))
    headline = name.startswith("SubspaceSGD")
    compare(
        case,
        (name, candidate.step),
        ("one network + SGD", baseline.step),
        check=lambda: None,
        seconds=3.0 if headline else 1.0,
        cycle=_ahead.STEPS if headline else 1,
        goal=GOALS.get((case, int(name[-1]))) if headline else None,
        memory={"peak": peak, "baseline": one, "ratio": peak / one},
    )


STACKED = {
    **{f"MLP, B={b}": partial(mlp, b) for b in (10, 64, 512)},
    "convolutions, B=16": partial(convolutions, 16),
    "resnet18, B=16": partial(resnet18, 16),
}


@pytest.mark.parametrize("batches", ["shared", "separate"])
@pytest.mark.parametrize("case", STACKED, ids=lambda v: v.replace(" ", ""))
def test_stacked_step(compare, case, batches):
    n, task = 3, STACKED[case]()
    if batches == "separate":
        x, y = (
            torch.stack([t[torch.randperm(len(t))] for _ in range(n)]) for t in (task.x, task.y)
        )
        task = dataclasses.replace(task, x=x, y=y, separate=True)
    candidate, baseline = stacked(task, n), loop(task, n)
    for training in (candidate, baseline):
        check(task, training)
    compare(
        f"{case}, {batches}",
        (f"StackedEnsemble n={n}", candidate.step),
        (f"{n} networks", baseline.step),
        check=lambda: None,
        seconds=1.5,
        goal=1.0,
    )


MEMBERS = 4
SHARED = {
    **{f"MLP, B={b}": partial(mlp, b * MEMBERS) for b in (10, 64, 512)},
    **{f"2048x2048, B={b}": partial(square, b * MEMBERS) for b in (10, 64, 512)},
}


@pytest.mark.parametrize("case", SHARED, ids=lambda v: v.replace(" ", ""))
def test_batch_ensemble_step(compare, case):
    task = SHARED[case]()
    model = el.to_batch_ensemble(task.net, n=MEMBERS)
    # Fused, both: torch's fastest, and r and s are more tensors.
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    candidate, baseline = task.training(model, opt, vertices=list), one_network(task, fused=True)
    check(task, baseline)
    check_batch_ensemble(task, model, candidate)
    compare(
        f"{case}x{MEMBERS}",
        (f"to_batch_ensemble n={MEMBERS}", candidate.step),
        ("one network", baseline.step),
        check=lambda: None,
        seconds=1.5,
        goal=1.15,
    )


def check_batch_ensemble(task: Task, model: el.BatchEnsemble, training: Training) -> None:
    """Compare a step's gradients with those of each member's weights, written out in float64."""
    training.step()
    names, params = zip(*model.module.named_parameters(), strict=True)
    training.optimizers[0].zero_grad()
    task.loss(model(task.x), task.y).backward()
    exact = {k: p.detach().double().requires_grad_() for k, p in zip(names, params, strict=True)}
    net = copy.deepcopy(task.net).double()
    outputs = []
    for i, rows in enumerate(task.x.double().chunk(MEMBERS)):
        own = []
        for name, _ in net.named_parameters():
            layer = name.rpartition(".")[0]
            fast = [exact[f"{layer}.{k}".lstrip(".")][i] for k in ("s", "r")]
            of_bias = name.endswith("bias")
            own.append(exact[name][i] if of_bias else exact[name] * torch.outer(*fast))
        outputs += at_points(net, [own], rows)
    y = task.y.double() if task.y.is_floating_point() else task.y
    task.loss(torch.cat(outputs), y).backward()
    close([p.grad for p in params], [exact[k].grad for k in names], 1e-4, "gradient")


def check(task: Task, training: Training, steps: int = 2) -> None:
    """Compare what some steps change with momentum SGD on the vertices, written out in float64."""
    net = copy.deepcopy(task.net).double()
    groups = [group for opt in training.optimizers for group in opt.param_groups]
    for group in groups:
        group["lr"] = task.check_lr
    start = [v.double().clone() for v in training.vertices()]
    vertices = [v.clone() for v in start]
    moments = [torch.zeros_like(v) for v in start]
    x, y = (t.double() if t.is_floating_point() else t for t in (task.x, task.y))
    for _ in range(steps):
        alpha = training.alpha() if training.ahead else None
        training.step()
        if training.alpha is not None and not training.ahead:
            alpha = training.alpha()
        n = len(vertices[0])
        points = torch.eye(n) if alpha is None else alpha.detach()[None]
        gradients = [torch.zeros_like(v) for v in vertices]
        for i, point in enumerate(points.double()):
            own = [p.requires_grad_() for p in mixed(point, vertices)]
            rows, target = (t[i] if task.separate else t for t in (x, y))
            value = task.loss(at_points(net, [own], rows)[0], target)
            for g, total in zip(torch.autograd.grad(value, own), gradients, strict=True):
                total += point.view(-1, *(1,) * g.dim()) * g
        for v, m, g in zip(vertices, moments, gradients, strict=True):
            m.mul_(MOMENTUM).add_(g)
            v.sub_(task.check_lr * m)
    for k, (got, want, old) in enumerate(zip(training.vertices(), vertices, start, strict=True)):
        # A float32 vertex keeps a change only to its own precision.
        rounding = steps * torch.finfo(torch.float32).eps * want.norm()
        error, change = (got.double() - want).norm(), (want - old).norm()
        assert error <= task.tolerance * change + rounding, (
            f"parameter {k}: {error:.1e} of {change:.1e}"
        )
    for group in groups:
        group["lr"] = LR


def peak_memory(training: Training, trace) -> int:
    """Bytes that are allocated at most in a step: what there is before it, and what it adds."""
    before: dict[int, int] = {}
    for opt in training.optimizers:
        opt.zero_grad()
        held = [p for group in opt.param_groups for p in group["params"]]
        held += [t for s in opt.state.values() for t in s.values() if isinstance(t, Tensor)]
        held += [b.ahead.kept for b in getattr(opt, "_blocks", ()) if b.ahead]  # With the points.
        before |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        training.step()
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    now = peak = sum(before.values())
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
