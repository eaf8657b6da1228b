"""Two processes over gloo on the loopback interface equal one process on the joint batch."""

import contextlib
import datetime
import io
import os
import sys
import time
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ensemblayers.ops import native
from ensemblayers.optim import SubspaceAdamW, SubspaceSGD

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)

WORLD, STEPS = 2, range(6)
RULES = {
    "sgd": (SubspaceSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (SubspaceAdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
DDP = {
    "wrapped_first": {},
    "wrapped_last": {},
    "bucket_views": {"gradient_as_bucket_view": True},
}


def build(seed):
    """A network whose shards are of one size, of two sizes, and empty on the last rank."""
    torch.manual_seed(seed)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.LayerNorm(3), nn.Linear(3, 1)
    return nn.Sequential(*layers).double()


def optimizer(model, rule, **changes):
    kind, options = RULES[rule]
    return kind(model.parameters(), n=3, sigma=0.3, **(options | changes))


def train(net, opt, steps=STEPS, cut=lambda x: x):
    """Steps of two micro-batches each; what a run shows after each step."""
    seen = []
    for step in steps:
        first, second = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step)).double()
        opt.eval()
        with torch.no_grad():
            seen.append([net(first)])
        opt.train()
        opt.zero_grad()
        with unsynchronised(net):
            net(cut(first)).square().mean().backward()
        net(cut(second)).square().mean().backward()
        if step == 2:
            opt.accumulate()
            net(cut(first)).sin().mean().backward()
        if step == 3:
            seen[-1].append(opt.clip_grad_norm_(0.01))
        opt.step()
        seen[-1] += snapshot(opt)
    return seen


@contextlib.contextmanager
def unsynchronised(net):
    if hasattr(net, "no_sync"):
        with net.no_sync():
            yield
    elif hasattr(net, "set_requires_gradient_sync"):
        net.set_requires_gradient_sync(False)
        yield
        net.set_requires_gradient_sync(True)
    else:
        yield


def snapshot(opt):
    params = [p for group in opt.param_groups for p in group["params"]]
    return [whole(t) for t in (*opt.vertices(), *params, opt.alpha)]


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


# What each of the processes does; the result is saved for the test.


def cut(x):
    return x.chunk(WORLD)[dist.get_rank()]


def ddp(rule, kind):
    model = build(dist.get_rank())  # Each rank has a network of its own: wrapping ends that.
    if kind == "wrapped_last":
        opt = optimizer(model, rule)
        opt.train()
    net = nn.parallel.DistributedDataParallel(model, **DDP[kind])
    if kind != "wrapped_last":
        torch.manual_seed(50 + dist.get_rank())
        opt = optimizer(model, rule)
    carried = []

    def count(state, bucket):
        carried.append(bucket.buffer().numel())
        mean = bucket.buffer().div_(WORLD)
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda f: f.value()[0])

    net.register_comm_hook(None, count)
    seen = train(net, opt, STEPS[:1], cut)
    with no_communication():
        seen += train(net, opt, STEPS[1:], cut)
    # Once a step, and once more in the one that accumulates.
    assert sum(carried) == (len(STEPS) + 1) * sum(p.numel() for p in model.parameters())
    return seen


@contextlib.contextmanager
def no_communication():
    with contextlib.ExitStack() as stack:
        for name in ("all_gather_object", "broadcast"):
            stack.enter_context(mock.patch.object(dist, name, side_effect=AssertionError))
        yield


def shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(rule):
    net = shard(build(0))
    torch.manual_seed(50 + dist.get_rank())
    opt = optimizer(net, rule)
    sizes = sorted({p.to_local().numel() for p in net.parameters()})
    start = snapshot(opt)
    with no_communication():
        return [sizes, start, *train(net, opt, STEPS, cut)]


def fsdp_resumes(rule, folder):
    from torch.distributed import checkpoint as dcp

    net = shard(build(0))
    opt = optimizer(net, rule)
    train(net, opt, STEPS[:3], cut)
    file = io.BytesIO()
    torch.save((net.state_dict(), opt.state_dict()), file)
    file.seek(0)
    checkpoint = {"model": net.state_dict(), "opt": opt.state_dict()}
    dcp.save(checkpoint, checkpoint_id=folder)
    runs = [train(net, opt, STEPS[3:], cut)]

    other = shard(build(1))
    again = optimizer(other, rule, lr=0.7)
    weights, state = torch.load(file, weights_only=False)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    runs.append(train(other, again, STEPS[3:], cut))

    other = shard(build(2))
    again = optimizer(other, rule, lr=0.7)
    checkpoint = {"model": other.state_dict(), "opt": again.state_dict()}
    dcp.load(checkpoint, checkpoint_id=folder)
    other.load_state_dict(checkpoint["model"])
    again.load_state_dict(checkpoint["opt"])
    runs.append(train(other, again, STEPS[3:], cut))
    return runs


def fsdp_points():
    net = shard(build(0))
    opt = optimizer(net, "sgd")
    opt.add_frozen(opt.export(1))
    opt.add_frozen([whole(v[2]) for v in opt.vertices()])
    seen = train(net, opt, STEPS[:2], cut)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    opt.restart()
    return [*seen, snapshot(opt), [whole(v) for v in opt.export(2)]]


def fsdp_errors(too_early):
    def message(call):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            return str(error)

    model = build(0)
    opt = optimizer(model, "sgd")
    shard(model)
    model(torch.ones(2, 4).double()).sum().backward()
    found = {"before_sharding": message(opt.step)}

    model.reshard()
    with torch.no_grad():
        model(torch.ones(2, 4).double())
    found["gathered"] = message(lambda: optimizer(model, "sgd"))

    plain = build(0)
    found["no_gradients"] = message(optimizer(plain, "sgd").step)
    found["frozen_layer"] = message(partly_trained)
    found["before_init"] = message(too_early.step)

    opt = optimizer(model, "sgd")
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    model(torch.ones(2, 4).double()).sum().backward()
    found["loaded_weights"] = message(opt.step)
    return found


def partly_trained():
    model = build(0)
    opt = optimizer(model, "sgd")
    model[0].requires_grad_(False)
    model(torch.ones(2, 4).double()).sum().backward()
    opt.step()


def apart():
    """Ranks that train networks of their own, without a wrapper."""
    model = build(dist.get_rank())
    opt = optimizer(model, "sgd")
    before = snapshot(opt)
    model(torch.ones(2, 4).double()).sum().backward()
    opt.step()
    with no_communication():
        opt.step()
    return [before, snapshot(opt)]


def work(rank, port, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    too_early = optimizer(build(0), "sgd")
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, WORLD + 1, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    cases = {f"ddp_{rule}_{kind}": (ddp, rule, kind) for rule in RULES for kind in DDP}
    cases |= {f"fsdp_{rule}": (fsdp, rule) for rule in RULES}
    cases |= {
        f"resume_{rule}": (fsdp_resumes, rule, f"{folder}/checkpoint_{rule}") for rule in RULES
    }
    cases |= {"points": (fsdp_points,), "errors": (fsdp_errors, too_early), "apart": (apart,)}
    for name, (function, *args) in cases.items():
        try:
            result = function(*args)
        except Exception:
            result = traceback.format_exc()
        torch.save(result, folder / f"{name}_{rank}.pt")
    dist.barrier()  # None closes its connections while the other works.
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function that gives both ranks' results of a case, from one start of the processes."""
    native.available()  # Built once, here, rather than in both processes at the same time.
    folder = tmp_path_factory.mktemp("ranks")
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, WORLD + 1, True, limit, wait_for_workers=False)
    context = torch.multiprocessing.spawn(
        work, (store.port, folder), nprocs=WORLD, join=False, daemon=True
    )
    try:
        end = time.monotonic() + 90
        while not context.join(timeout=1):
            assert time.monotonic() < end, "the processes hang"
    finally:
        for process in context.processes:
            process.kill()

    def get(name):
        found = [torch.load(folder / f"{name}_{r}.pt", weights_only=False) for r in range(WORLD)]
        for result in found:
            assert not isinstance(result, str), result
        return found

    return get


def equal(found, expected, **tolerance):
    for each in found:
        torch.testing.assert_close(each, expected, **tolerance)


CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize("kind", DDP)
@pytest.mark.parametrize("rule", RULES)
def test_ddp_equals_one_process_and_carries_one_gradient(results, rule, kind):
    model = build(0)
    if kind != "wrapped_last":
        torch.manual_seed(50)
    equal(results(f"ddp_{rule}_{kind}"), train(model, optimizer(model, rule)), **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_fsdp_equals_one_process(results, rule):
    found = results(f"fsdp_{rule}")
    sizes = [each.pop(0) for each in found]
    assert sizes[0] != sizes[1] and 0 in sizes[1]
    model = build(0)
    torch.manual_seed(50)
    opt = optimizer(model, rule)
    start = snapshot(opt)
    equal([each.pop(0) for each in found], start, rtol=0, atol=0)
    equal(found, train(model, opt), **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_fsdp_resumes_bit_identically(results, rule):
    for goes_on, *resumed in results(f"resume_{rule}"):
        equal(resumed, goes_on, rtol=0, atol=0)


def test_fsdp_exports_freezes_and_restarts(results):
    model = build(0)
    opt = optimizer(model, "sgd")
    opt.add_frozen(opt.export(1))
    opt.add_frozen(opt.export(2))
    seen = train(model, opt, STEPS[:2])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    opt.restart()
    equal(results("points"), [*seen, snapshot(opt), opt.export(2)], **CLOSE)


def test_an_optimizer_that_was_built_too_early_says_so(results):
    for found in results("errors"):
        assert "after fully_shard" in found["before_sharding"]
        assert "model.reshard()" in found["gathered"]
        assert "init_process_group" in found["before_init"]
        assert "restart()" in found["loaded_weights"]
        assert found["no_gradients"] is None and found["frozen_layer"] is None


def test_ranks_without_a_wrapper_keep_their_own_networks(results):
    found = results("apart")
    for rank, (before, after) in enumerate(found):
        torch.testing.assert_close(before[0][0], next(build(rank).parameters()).detach())
        torch.testing.assert_close(after[-1], found[0][1][-1])
    assert (found[0][1][0] - found[1][1][0]).abs().min() > 1e-6
