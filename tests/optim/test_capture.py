"""Steps in CUDA graphs."""

import pytest
import torch
from explicit import backward, close, net
from torch import nn

from ensemblayers import _optimizer
from ensemblayers.optim import SubspaceAdamW, SubspaceSGD


@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
def test_a_captured_step_reads_its_numbers_when_it_is_replayed(subspace, monkeypatch):
    """A capture and its replays without a device: the same calls in the same order."""
    kwargs = {"momentum": 0.9} if subspace is SubspaceSGD else {}
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = net()
        opt = subspace(model.parameters(), lr=0.1, n=3, sigma=0.5, **kwargs)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for step in range(5):
            opt.zero_grad()
            backward(model)
            if captured and step > 1:
                opt.prepare()
                with monkeypatch.context() as patch:
                    patch.setattr(_optimizer, "_is_capturing", lambda blocks: True)
                    opt.step()
            else:
                opt.step()
            schedule.step()
        runs.append([*opt.vertices(), *model.parameters(), opt.alpha])
    close(*runs, rtol=1e-12, atol=1e-13)


def test_a_capture_needs_a_step_and_all_gradients(monkeypatch):
    opt = SubspaceSGD(net().parameters(), lr=0.1, n=3)
    monkeypatch.setattr(_optimizer, "_is_capturing", lambda blocks: True)
    with pytest.raises(RuntimeError, match="before the capture"):
        opt.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
def test_training_in_a_cuda_graph(subspace):
    kwargs = {"momentum": 0.9} if subspace is SubspaceSGD else {}
    x, y = torch.randn(8, 4).cuda(), torch.randint(3, (8,)).cuda()
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
        opt = subspace(model.parameters(), lr=0.1, n=3, sigma=0.5, **kwargs)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

        def step(model=model, opt=opt):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            opt.step()

        graph = torch.cuda.CUDAGraph()
        for k in range(6):
            opt.zero_grad(set_to_none=k < 3 or not captured)
            if captured and k >= 3:
                opt.prepare()
                if k == 3:
                    opt.zero_grad(set_to_none=True)
                    with torch.cuda.graph(graph):
                        step()
                graph.replay()
            else:
                step()
            schedule.step()
        runs.append([*opt.vertices(), *model.parameters(), opt.alpha])
    close(*runs, rtol=1e-5, atol=1e-6)
