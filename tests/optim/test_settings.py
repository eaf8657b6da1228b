"""torch's global settings, which no number of a step depends on."""

import pytest
import torch
from explicit import backward, close, net

from ensemblayers.optim import SubspaceAdamW, SubspaceSGD


def run(subspace, model, steps=8):
    torch.manual_seed(3)
    opt = subspace(model.parameters(), lr=0.05, n=3, sigma=0.5)
    for group in opt.param_groups:
        group["momentum"] = 0.9  # Of no use for AdamW.
    for step in range(steps):
        opt.zero_grad()
        backward(model)
        opt.step()
        if step % 3 != 1:
            opt.eval()
            opt.train()
    opt.set_point([0.2, 0.3, 0.5])
    return [*(p.detach() for p in model.parameters()), *opt.vertices()]


@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype(backend, subspace, dtype):
    model, same = net(), net()
    same.load_state_dict(model.state_dict())
    expected = run(subspace, model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        close(run(subspace, same), expected, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
def test_the_default_device(backend, subspace):
    model, x = net(), torch.randn(4, 5, dtype=torch.float64)
    with torch.device("meta"):
        opt = subspace(model.parameters(), lr=0.05, n=3, sigma=0.5)
        for _ in range(70):  # More than are drawn at a time.
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
            opt.eval()
            opt.train()
        opt.set_point([0.2, 0.3, 0.5])
        opt.restart()
        opt.load_state_dict(opt.state_dict())
    assert all(v.isfinite().all() for v in opt.vertices())


@pytest.mark.parametrize("subspace", [SubspaceSGD, SubspaceAdamW])
def test_inference_mode(backend, subspace):
    model = net()
    opt = subspace(model.parameters(), lr=0.05, n=3, sigma=0.5)
    for change in (lambda: opt.add_frozen(opt.export(0)), opt.clear_frozen, opt.eval, opt.train):
        with torch.inference_mode():
            change()
        opt.train()
        backward(model)
        opt.step()
    with torch.inference_mode():
        opt.load_state_dict(opt.state_dict())
    opt.vertices()[0][0] += 1
