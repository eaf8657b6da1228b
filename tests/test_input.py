"""Whether an input is one batch for all members or one a member."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models import VisionTransformer

import ensemblayers as el


class StandardConv(nn.Conv2d):
    pass


@pytest.mark.parametrize("kind", [StandardConv, nn.ConvTranspose2d])
@pytest.mark.filterwarnings("error")
def test_shared_with_other_convolutions(kind):
    ensemble = el.StackedEnsemble([kind(3, 2, 3, padding=1) for _ in range(3)])
    assert ensemble(torch.zeros(3, 3, 5, 5)).shape == (3, 3, 2, 5, 5)
    assert ensemble(torch.zeros(3, 4, 3, 5, 5)).shape == (3, 4, 2, 5, 5)


class Residual(nn.Module):
    """Code of its own around layers that take the input as it comes."""

    def __init__(self):
        super().__init__()
        self.conv, self.skip = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)

    def forward(self, x, scale=1.0, mask=None):
        y = torch.relu(self.conv(x)) + self.skip(x)
        return (y if mask is None else y * mask).mean((2, 3)) * scale


class OfRows(nn.Module):
    """Code before the first layer."""

    def __init__(self, code, features=12):
        super().__init__()
        self.layer, self.code = nn.Linear(features, 3), code

    def forward(self, rows):
        return self.layer(self.code(rows))


class Frames(nn.Module):
    """A convolution for each frame of a video, whatever its batch."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def flatten(x):
    return x.flatten(1)


def flatten_by_keyword(x):
    return torch.flatten(torch.relu(x), start_dim=1)


def view(x):
    return x.view(len(x), -1)


def mean(x):
    return x.mean(1)


def branch_on_dims(x):
    return x.flatten(1) if x.dim() > 2 else x


def conv2d():
    return nn.Conv2d(3, 4, 3)


# The members, and the shape of an example, where the number of dimensions tells what an input is.
TOLD = {
    "flatten": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), (2, 3)),
    "flatten vectors": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), (6,)),
    "flatten images": (
        lambda: nn.Sequential(nn.Dropout(0.0), nn.Flatten(), nn.ReLU(), nn.Linear(27, 3)),
        (3, 3, 3),
    ),
    "flatten in code": (lambda: OfRows(flatten), (3, 4)),
    "flatten by keyword": (lambda: OfRows(flatten_by_keyword), (3, 2, 2)),
    "identity": (lambda: nn.Sequential(nn.Identity(), conv2d()), (3, 4, 4)),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.0), conv2d()), (3, 4, 4)),
    "activation": (lambda: nn.Sequential(nn.Sequential(nn.LeakyReLU()), conv2d()), (3, 4, 4)),
    "norm": (lambda: nn.Sequential(nn.GroupNorm(1, 3), conv2d()), (3, 4, 4)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()), (3, 4, 4)),
    "padding": (lambda: nn.Sequential(nn.ReflectionPad2d(1), conv2d()), (3, 4, 4)),
    "pool": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)), (3, 4, 4)),
    "pool 1d": (lambda: nn.Sequential(nn.AvgPool1d(2), nn.Conv1d(3, 2, 1)), (3, 4)),
    "pool 3d": (lambda: nn.AdaptiveAvgPool3d(1), (3, 2, 2, 2)),
    "code": (Residual, (3, 4, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (5, 4)),
    "parametrized": (lambda: parametrizations.weight_norm(conv2d()), (3, 4, 4)),
    "vit": (lambda: VisionTransformer(8, 4, 1, 2, 8, 16, num_classes=3), (3, 8, 8)),
}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.filterwarnings("error")
def test_the_first_layer_tells_what_is_shared(name, batch):
    build, shape = TOLD[name]
    models = [build().eval() for _ in range(3)]
    ensemble = el.StackedEnsemble(models)
    x = torch.randn(batch, *shape)
    torch.testing.assert_close(ensemble(x), torch.stack([m(x) for m in models]))
    x = torch.randn(3, batch, *shape)
    own = torch.stack([m(b) for m, b in zip(models, x, strict=True)])
    torch.testing.assert_close(ensemble(x, shared=False), own)
    if batch > 1 or "flatten" not in name:
        torch.testing.assert_close(ensemble(x), own)
    if batch == 1 and name == "flatten":  # It could be a batch of three.
        torch.testing.assert_close(ensemble(x), torch.stack([m(x) for m in models]))


# Where nothing tells, an input is shared.
NOT_TOLD = {
    "view": (lambda: OfRows(view), (3, 4)),
    "mean": (lambda: OfRows(mean, 3), (2, 3)),
    "branch": (lambda: OfRows(branch_on_dims), (3, 4)),
    "frames": (Frames, (2, 3, 4, 4)),
    "partly flattened": (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(4, 3)), (3, 2, 2)),
    "elementwise": (lambda: nn.Sequential(nn.ReLU(), nn.Tanh()), (2, 3)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), None),
}


@pytest.mark.parametrize("name", NOT_TOLD)
@pytest.mark.filterwarnings("error")
def test_an_input_is_shared_where_nothing_tells(name):
    build, shape = NOT_TOLD[name]
    models = [build() for _ in range(3)]
    x = torch.randint(9, (3, 5)) if shape is None else torch.randn(3, *shape)
    ensemble = el.StackedEnsemble(models)
    torch.testing.assert_close(ensemble(x), torch.stack([m(x) for m in models]))
    x = x[:, None].expand(3, 2, *x.shape[1:])
    own = torch.stack([m(b) for m, b in zip(models, x, strict=True)])
    torch.testing.assert_close(ensemble(x, shared=False), own)


def test_the_argument_may_be_named():
    models = [OfRows(flatten) for _ in range(3)]
    ensemble, x = el.StackedEnsemble(models), torch.randn(3, 2, 3, 4)
    assert torch.equal(ensemble(rows=x), ensemble(x))
