"""torch.compile and torch.export."""

import pytest
import torch
from errors import rms_error
from fast_weights import linear_pair
from torch import nn

import ensemblayers as el


def test_compile():
    model = el.BatchEnsemble(nn.Sequential(linear_pair({}, n=2)[0], nn.ReLU()))
    x = torch.randn(4, 5, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mode in (True, False):
        model.train(mode)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("rank", [1, 2])
def test_export(mode, rank):
    model = el.BatchEnsemble(nn.Sequential(linear_pair({}, n=2, rank=rank)[0], nn.ReLU()))
    model, x = model.train(mode), torch.randn(8, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


def test_compiled_training_has_the_gradients_of_eager_training():
    layer, _ = linear_pair({}, n=2, init="normal")
    x = torch.randn(8, 5, dtype=torch.float64)
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = call(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), list(layer.parameters()))])
    torch.testing.assert_close(*results)


def test_inductor_takes_images_of_any_size():
    torch._dynamo.reset()
    layer = el.BatchEnsembleConv2d(3, 4, 3, n=2)
    compiled = torch.compile(layer, dynamic=True)
    for size in (10, 13):
        x = torch.randn(8, 3, size, size)
        results = []
        for call in (layer, compiled):
            y = call(x)
            results.append([y, *torch.autograd.grad(y.sin().sum(), list(layer.parameters()))])
        assert all(rms_error(a, b) < 1e-6 for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_export_with_any_number_of_rows(training, recorded):
    model = el.to_batch_ensemble(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), n=2)
    model.train(training)
    rows = 2 * torch.export.Dim("half", min=2, max=512) if training else torch.export.Dim.DYNAMIC
    with torch.set_grad_enabled(recorded):
        exported = torch.export.export(model, (torch.randn(8, 6),), dynamic_shapes=(({0: rows},),))
        for count in (20, 400):
            x = torch.randn(count, 6)
            torch.testing.assert_close(exported.module()(x), model(x))


class WithMembers(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, members):
        return self.model(x, members=members)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_export_with_any_batch_from_one_row_on(indexed, strict):
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    model = el.to_batch_ensemble(net, n=3, init="normal").eval()
    x, rows = torch.randn(6, 2, 4, 4), torch.export.Dim.DYNAMIC
    whole = WithMembers(model) if indexed else model

    def inputs(x):
        return (x, torch.randint(3, (len(x),))) if indexed else (x,)

    sizes = ({0: rows}, {0: rows}) if indexed else (({0: rows},),)
    exported = torch.export.export(whole, inputs(x), dynamic_shapes=sizes, strict=strict)
    for count in (1, 2, 3, 50):
        given = inputs(torch.randn(count, 2, 4, 4))
        torch.testing.assert_close(exported.module()(*given), whole(*given))
