"""Graphed steps: on CUDA, and their bookkeeping with a stand-in for the capture."""

import pytest
import torch
import torch.nn.functional as F

from examples import graphs
from examples.graphs import WARM_UP, GraphedBackward
from examples.models import mlp


def check(model, device):
    """Train on batches of two sizes, each step's gradients beside autograd's."""
    parameters = list(model.parameters())

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    backward = GraphedBackward(loss, parameters)
    for size in [4] * (WARM_UP + 2) + [3] + [4, 4] + [3] * (WARM_UP + 1) + [2, 4, 3]:
        x, y = torch.randn(size, 6, device=device), torch.randint(3, (size,), device=device)
        expected = torch.autograd.grad(loss(x, y), parameters)
        backward(x, y)
        torch.testing.assert_close([p.grad for p in parameters], list(expected))
        with torch.no_grad():
            for p in parameters:
                p.sub_(0.1 * p.grad)
    assert len(backward.graphs) == 2  # The batch of two came once.


def test_gradients_by_replays(monkeypatch):
    model = mlp(6, 5, 3, 0.0)

    def captured(call):
        call()
        grads = [p.grad for p in model.parameters()]

        def replay():  # Writes memory, and sets nothing in Python.
            call()
            for p, g in zip(model.parameters(), grads, strict=True):
                g.copy_(p.grad)
                p.grad = None

        return replay

    monkeypatch.setattr(graphs, "_captured", captured)
    monkeypatch.setattr(graphs, "_aside", lambda call: call())
    check(model, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gradients_on_cuda():
    check(mlp(6, 5, 3, 0.0).cuda(), "cuda")
