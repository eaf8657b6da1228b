"""torchvision's networks as subspaces."""

import pytest
import torch
from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer, resnet18, vit_b_16
from torchvision.models.video import SwinTransformer3d
from zoo import classes, close, exact

import ensemblayers as el


def small_vit():
    return VisionTransformer(8, 4, 2, 2, 12, 24, num_classes=5)


def without_zeros(model):
    for p in model.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    return model


@pytest.mark.parametrize(
    ("build", "size"), [(resnet18, 32), (small_vit, 8)], ids=["resnet18", "vit"]
)
def test_torchvisions_models_equal_the_source_and_collapse_to_its_classes(build, size):
    source = without_zeros(build())
    model = el.to_subspace(source, n=3)
    x = torch.randn(2, 3, size, size)
    el.set_point(model, vertex=0)
    for mode in (True, False):
        source.train(mode), model.train(mode)
        exact(model(x), source(x))
    exact(dict(model.named_buffers()), dict(source.named_buffers()))
    el.set_point(model)
    plain = el.collapse(model)
    assert classes(plain) == classes(source)
    close(plain(x), model(x), rtol=1e-4, atol=1e-5)
    model.load_state_dict(source.state_dict(), strict=True)
    with torch.no_grad(), el.at(model, vertex=0):
        exact(model(x), source(x))


@pytest.mark.parametrize("dims", [2, 3])
def test_a_windowed_transformer_equals_the_source(dims):
    options = {"depths": [1, 1], "num_heads": [2, 2], "num_classes": 5}
    if dims == 2:
        source = SwinTransformer([2, 2], 8, window_size=[4, 4], **options)
    else:
        source = SwinTransformer3d([2, 2, 2], 8, window_size=[2, 4, 4], **options)
    source = without_zeros(source).eval()
    model = el.to_subspace(source, n=2).eval()
    x = torch.randn(2, 3, *(16,) * dims)
    el.set_point(model, vertex=0)
    assert torch.equal(model(x), source(x))


def test_a_large_vision_transformer_equals_the_source():
    source = without_zeros(vit_b_16(image_size=32)).eval()
    model = el.to_subspace(source, n=2)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad(), el.at(model, vertex=0):
        exact(model(x), source(x))
    assert classes(el.member(model, 0)) == classes(source)


@pytest.mark.parametrize("build", [resnet18, small_vit], ids=["resnet18", "vit"])
def test_every_vertex_of_torchvisions_models_gets_a_gradient(build):
    model = el.to_subspace(build(), n=3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(2, 3, *((32, 32) if build is resnet18 else (8, 8)))).sum().backward()
        for k, p in model.named_parameters():
            assert p.grad.flatten(1).any(1).all(), k
