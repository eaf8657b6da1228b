"""How a stacked ensemble runs its members: what each strategy does, and says."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from nets import QUIET, conv, dense, each_strategy, images, make, vectors
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import ensemblayers as el

pytestmark = QUIET


@each_strategy
def test_vmap_is_what_runs(strategy, monkeypatch):
    """The tests of strategies compare two ways indeed."""
    calls = []
    ensemble = el.StackedEnsemble(make("conv"), strategy=strategy)
    original = el.StackedEnsemble._loop
    monkeypatch.setattr(
        el.StackedEnsemble, "_loop", lambda *args: calls.append(1) or original(*args)
    )
    ensemble(images(4))
    assert len(calls) == (strategy != "vmap")


@pytest.mark.parametrize(
    "name, reason",
    [
        ("LSTM", "LSTM, a recurrent layer"),
        ("branch", "data-dependent control flow"),
        ("plain tensor", "attributes that differ"),
        ("assigned buffer", "buffer was assigned"),
        ("counter", "attribute was assigned"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_vmap_that_is_a_loop_says_why_once(name, reason):
    ensemble, x = el.StackedEnsemble(make(name), strategy="vmap"), vectors(4)
    with pytest.warns(UserWarning, match=f"(?s)strategy='vmap' runs as a loop.*{reason}") as seen:
        ensemble(x)
    assert len(seen) == 1 and seen[0].filename == __file__
    ensemble(x)
    for strategy in ("auto", "loop"):
        el.StackedEnsemble(make(name), strategy=strategy)(x)


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_fake_tensors_and_counters_see_the_operations(strategy):
    ensemble = el.StackedEnsemble([nn.Linear(512, 300) for _ in range(3)], strategy=strategy)
    x = torch.randn(7, 512)
    with FlopCounterMode(display=False) as counter:
        ensemble(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * 7 * 512 * 300
    with FakeTensorMode():
        ensemble = el.StackedEnsemble([nn.Linear(512, 300) for _ in range(3)], strategy=strategy)
        y = ensemble(torch.empty(7, 512))
        y.sum().backward()
    assert y.shape == (3, 7, 300) and ensemble.module.weight.grad.shape == (3, 300, 512)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_compile(strategy):
    ensemble = el.StackedEnsemble(make("dense"), strategy=strategy)
    compiled, x = torch.compile(ensemble, backend="aot_eager"), vectors(5)
    torch.testing.assert_close(compiled(x), ensemble(x))


def test_hooks_run_once_a_member():
    calls = []
    source = dense()
    source[0].register_forward_hook(lambda *args: calls.append(1))
    el.to_stacked(source, n=3)(vectors(2))
    assert len(calls) == 3


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_threads_may_call_one_ensemble(strategy):
    models = [conv() for _ in range(3)]
    ensemble = copy.deepcopy(el.StackedEnsemble(models, strategy=strategy).eval())
    inputs = [images(2) for _ in range(40)]
    with torch.no_grad():
        wanted = [torch.stack([model.eval()(x) for model in models]) for x in inputs]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(4) as pool:
                outputs = list(pool.map(torch.no_grad()(ensemble), inputs))
        finally:
            sys.setswitchinterval(interval)
    torch.testing.assert_close(outputs, wanted)
    assert all(p.shape[0] == 3 for p in ensemble.parameters())
