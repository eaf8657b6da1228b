import gc
import platform
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ensemblayers as el
from ensemblayers import _gradients
from ensemblayers._gradients import gradient_memory, unbind

SHAPE = (3, 512, 256)  # 1.5 MB


def leaf(*shape, **options):
    return torch.randn(*(shape or SHAPE), **options).requires_grad_()


def test_memory_comes_back_once_nothing_uses_it():
    p = leaf()
    first = gradient_memory(p)
    place, view = first.data_ptr(), first.detach()[1]
    del first
    second = gradient_memory(p)
    assert second.data_ptr() != place  # The view still shows the first one's values.
    del view, second
    third = gradient_memory(p)
    assert third.shape == p.shape and gradient_memory(leaf()).data_ptr() != third.data_ptr()
    place = third.data_ptr()
    del third
    other = torch.empty(SHAPE)  # Would get the memory, were it free.
    assert gradient_memory(p).data_ptr() == place != other.data_ptr()


def test_memory_that_is_held_as_a_storage_or_by_another_process_is_left_alone():
    for hold in (lambda g: g.untyped_storage(), lambda g: g.share_memory_().data_ptr()):
        p = leaf()
        first = gradient_memory(p)
        held, place = hold(first), first.data_ptr()
        del first
        second = gradient_memory(p)
        assert second.data_ptr() != place
        del second, held


def test_memory_whose_storage_was_freed_is_not_taken():
    p = leaf()
    gradient_memory(p).untyped_storage().resize_(0)
    assert gradient_memory(p).zero_().shape == p.shape


class Keep(TorchDispatchMode):
    """Holds what operations return, as loggers do."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.kept.append(out)
        return out


@pytest.mark.parametrize(
    "around",
    [Keep, torch.inference_mode, lambda: FakeTensorMode(allow_non_fake_inputs=True)],
    ids=["dispatch", "inference", "fake"],
)
def test_what_surrounds_one_backward_pass_leaves_nothing_to_the_next(around):
    ensemble, x = el.StackedEnsemble([nn.Linear(512, 512) for _ in range(3)]), torch.randn(4, 512)
    weight = ensemble.module.weight
    y = ensemble(x).sum()
    with around():
        y.backward()
    ensemble.zero_grad()
    ensemble(x).sum().backward()
    first = weight.grad
    assert type(first) is torch.Tensor and not first.is_inference()
    kept = first.clone()
    ensemble.zero_grad()
    ensemble(2 * x).sum().backward()
    assert torch.equal(first, kept) and torch.allclose(weight.grad, 2 * first)


FAULTS = """
import resource
import torch
from ensemblayers._gradients import gradient_memory

gradient_memory(torch.zeros(3, 512, 512, requires_grad=True))
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(9 << 18) for _ in range(5)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del blocks
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library's own rules")
def test_freed_memory_stays_with_the_process():
    """Five blocks of 9 MB, over 10 000 pages, come without a fault once they were there."""
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1000


def test_memory_has_the_leafs_layout_and_dtype():
    form = torch.randn(3, 64, 64, 5, 16).transpose(2, 4)
    for p in (form, form.double(), torch.randn(1, 512).expand(1024, 512)):
        for _ in range(2):
            out = gradient_memory(p)
            assert out.shape == p.shape and out.dtype == p.dtype
            assert out.stride() == torch.empty_like(p).stride()
    p = leaf()
    own = torch.randn(SHAPE)
    for data in (own.repeat(1, 2, 1), own, own.view(6, 256, 256), own.mT.contiguous().mT):
        gradient_memory(p)
        p.data = data
        out = gradient_memory(p)
        assert out.shape == data.shape and out.stride() == data.stride()
    p = own.to(torch.complex64)[:, :256].contiguous().requires_grad_()
    gradient_memory(p)
    p.data = torch.randn(3, 256, 256, dtype=torch.float64)
    assert gradient_memory(p).dtype == torch.float64


def test_memory_goes_with_its_leaf():
    gc.collect()
    p, before = leaf(), len(_gradients._kept)
    gradient_memory(p)
    assert len(_gradients._kept) == before + 1
    del p
    gc.collect()
    assert len(_gradients._kept) == before
    gradient_memory(leaf(2, 2))
    gradient_memory(leaf() * 2)  # No leaf.
    assert len(_gradients._kept) == before


@pytest.mark.parametrize("some", [(0, 1, 2), (1,), (2, 0)])
@pytest.mark.parametrize("permuted", [False, True])
def test_unbind_has_the_gradients_of_unbind(some, permuted):
    data = torch.randn(3, 256, 512).mT if permuted else torch.randn(SHAPE)
    p, q = data.clone().requires_grad_(), data.clone().requires_grad_()
    g = torch.randn(len(some), *SHAPE[1:])
    for _ in range(3):  # The second and third time into p.grad, or into memory that is kept.
        for own, split in ((p, unbind), (q, torch.unbind)):
            rows = split(own)
            torch.stack([rows[i].sin() for i in some]).backward(g)
        assert torch.equal(p.grad, q.grad) and p.grad.stride() == q.grad.stride()
    p.grad = q.grad = None
    rows = unbind(p)
    (d,) = torch.autograd.grad(rows[some[0]].pow(3).sum(), p, create_graph=True)
    (d2,) = torch.autograd.grad(d.sum(), p)
    assert torch.allclose(d2[some[0]], 6 * p[some[0]])


def test_a_members_gradients_are_stored_before_the_next_members():
    models = [nn.Sequential(*(nn.Linear(512, 512) for _ in range(2))) for _ in range(3)]
    ensemble, events = el.StackedEnsemble(models, strategy="loop"), []
    places = [p for p in ensemble.parameters() if p.dim() == 3]

    def watch(module, args, y):
        y.register_hook(lambda g: events.append(sum(map(stored, places))))

    def stored(p):
        kept = _gradients._kept.get(id(p), _gradients._NOTHING)[1]
        rows = torch.full((3, 1), torch.nan) if kept is None else kept
        return sum(not row.isnan().any() for row in rows)

    for m in ensemble.module:
        m.register_forward_hook(watch)
    y = ensemble(torch.randn(4, 512))
    for p in places:
        gradient_memory(p).fill_(torch.nan)
    y.sum().backward()
    assert events == list(range(6))


def test_two_threads_go_through_one_graph():
    p, g = leaf(8, 512, 512), torch.randn(8, 512, 512)
    rows = torch.stack([r.clone() for r in unbind(p)])
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            found = pool.map(
                lambda k: torch.autograd.grad(rows, p, g * k, retain_graph=True)[0], (1, 2)
            )
            for k, d in enumerate(found, 1):
                assert torch.equal(d, g * k)


def test_a_backward_pass_that_fails_leaves_nothing():
    p = leaf()
    rows, fail = unbind(p), [True]
    a, b, c = (row.clone() for row in rows)

    def broken(g):
        if fail.pop():
            raise RuntimeError("broken")

    a.register_hook(broken)
    total = (a + 2 * b + 3 * c).sum()
    with pytest.raises(RuntimeError, match="broken"):
        total.backward(retain_graph=True)
    fail.append(False)
    (d,) = torch.autograd.grad(a.sum() + 5 * c.sum(), p, retain_graph=True)
    assert [r.unique().tolist() for r in d] == [[1.0], [0.0], [5.0]]


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_training_gets_the_same_memory_each_step(strategy):
    ensemble = el.StackedEnsemble([nn.Linear(256, 512) for _ in range(3)], strategy=strategy)
    opt = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    weight = ensemble.module.weight
    places = set()
    for _ in range(3):
        opt.zero_grad()
        ensemble(torch.randn(4, 256)).square().sum().backward()
        places.add(weight.grad.data_ptr())
        opt.step()
    assert places == {_gradients._kept[id(weight)][1].data_ptr()}


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_gradients_that_are_kept_keep_their_values(strategy):
    ensemble = el.StackedEnsemble([nn.Linear(256, 512) for _ in range(3)], strategy=strategy)
    weight, seen = ensemble.module.weight, []
    for k in range(3):
        ensemble.zero_grad()
        y = ensemble(torch.full((4, 256), float(k + 1)))
        y.sum().backward(retain_graph=True)
        seen.append(weight.grad)
    for k, g in enumerate(seen):
        assert torch.equal(g, torch.full(SHAPE, 4.0 * (k + 1)))
    y.sum().backward()
    assert torch.equal(weight.grad, torch.full(SHAPE, 24.0))


LARGE_LAYERS = {
    "subspace": (lambda: el.SubspaceLinear(512, 256, n=3), (2, 512)),
    "stacked": (lambda: el.StackedEnsemble([nn.Linear(512, 256) for _ in range(3)]), (2, 512)),
    "loop": (
        lambda: el.StackedEnsemble([nn.Linear(512, 256) for _ in range(3)], strategy="loop"),
        (2, 512),
    ),
    "batch_ensemble": (lambda: el.BatchEnsembleLinear(512, 1024, n=2), (8, 512)),
    "at_once": (lambda: at_once(nn.Conv1d(512, 256, 1)), (2, 512, 1)),
}


def at_once(layer):
    model = el.to_subspace(nn.Sequential(layer), n=3)
    el.share_point(model, at_once=True)
    return model


@pytest.mark.parametrize("name", LARGE_LAYERS)
def test_a_batch_of_gradients(name):
    """Each is that of its own backward pass: memory that was made outside can't hold them all."""
    build, shape = LARGE_LAYERS[name]
    model = build().double().eval()
    x = leaf(*shape, dtype=torch.float64)
    y = model(x)
    inputs = [x, *model.parameters()]
    many = torch.randn(2, *y.shape, dtype=torch.float64)
    batched = torch.autograd.grad(y, inputs, many, is_grads_batched=True, retain_graph=True)
    for k, g in enumerate(many):
        one = torch.autograd.grad(y, inputs, g, retain_graph=True)
        torch.testing.assert_close([b[k] for b in batched], list(one))


@pytest.mark.parametrize(
    "convert",
    [partial(el.to_batch_ensemble, n=4), partial(el.to_stacked, n=3), partial(el.to_subspace, n=3)],
    ids=["BatchEnsemble", "stacked", "subspace"],
)
def test_a_trace_can_be_saved(convert):
    """A tracer sees the operations themselves, no functions of Python's, with large weights too."""
    layers = nn.Linear(600, 700), nn.Unflatten(1, (7, 10, 10)), nn.Conv2d(7, 3, 3)
    model = convert(nn.Sequential(*layers)).train(convert.func is not el.to_subspace)
    x, file = torch.randn(16, 600), BytesIO()
    with warnings.catch_warnings(action="ignore"):  # That torch.export is to be preferred.
        torch.jit.save(torch.jit.trace(model, x, check_trace=False), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x), model(x))
