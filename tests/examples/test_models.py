import pytest
import torch

from examples.models import mlp, reduced_resnet


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("hidden", "count"), [(100, 89_610), (256, 269_322), (450, 560_710), (600, 837_610)]
)
def test_size_of_the_mlp(hidden, count):
    assert parameters(mlp(784, hidden, 10)) == count


@pytest.mark.parametrize(
    ("width", "side", "count"),
    [
        (20, 32, 496_680),
        (29, 32, 1_031_775),
        (35, 32, 1_495_965),
        (20, 84, 544_680),
        (29, 84, 1_101_375),
        (35, 84, 1_579_965),
    ],
)
def test_size_of_the_resnet(width, side, count):
    model = reduced_resnet(width, 100, side=side)
    assert parameters(model) == count
    assert model(torch.randn(2, 3, side, side)).shape == (2, 100)


def test_the_resnet_takes_the_statistics_of_the_batch():
    model = reduced_resnet(4, 10)
    x = torch.randn(8, 3, 32, 32)
    assert torch.equal(model.train()(x), model.eval()(x))
    assert not list(model.buffers())
