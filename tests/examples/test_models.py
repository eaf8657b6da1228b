import os
import subprocess
import sys

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


GRADIENTS = """
import torch
from examples.models import Block

torch.set_num_threads(1)
torch.manual_seed(0)
narrow, exact = Block(WIDTH, 2 * WIDTH, 2, 0.0), Block(WIDTH, 2 * WIDTH, 2, 0.0).double()
exact.load_state_dict(narrow.state_dict())
narrow.to(memory_format=torch.channels_last)
for block in (narrow, exact):  # Without the ReLU, whose gradient jumps at 0.
    block.inner = block.outer = torch.nn.Identity()
for _ in range(20):
    x, up = torch.randn(10, WIDTH, 32, 32), torch.randn(10, 2 * WIDTH, 16, 16)
    narrow.zero_grad(), exact.zero_grad()
    narrow(x.to(memory_format=torch.channels_last)).backward(up)
    exact(x.double()).backward(up.double())
    for p, q in zip(narrow.parameters(), exact.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 3e-6 * q.grad.norm()
"""


@pytest.mark.parametrize("isa", ["AVX2", "DEFAULT"])
@pytest.mark.parametrize("width", [3, 4, 8])
def test_gradients_of_a_narrow_block(width, isa):
    """In a process of its own, which a fault of the memory would end."""
    program = GRADIENTS.replace("WIDTH", str(width))
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
