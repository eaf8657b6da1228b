"""What the tests of the layers' Triton kernels share: inputs, tolerances, fixtures."""

import pytest
import torch
from interpreted import DEVICE, INTERPRETED

from ensemblayers.ops import _triton

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SIZES = [1, 2, 3, 7, 15, 17, 31, 33, 127, 129]
NAMES = {F32: "fp32", BF16: "bf16"}


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that a kernel does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan() and torch.zeros(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, params=["ieee", "tf32"] if DEVICE == "cuda" else ["ieee"])
def precision(request, monkeypatch):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    # The kernels are right without tensor cores too, though slow.
    monkeypatch.setattr(_triton, "on_tensor_cores", lambda x: True)
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def randn(*shape, dtype=F32):
    return torch.randn(shape, dtype=F64).to(DEVICE, dtype)


def error(found, exact):
    """Relative root mean square."""
    assert found.shape == exact.shape
    return ((found.double() - exact).norm() / exact.norm()).item() if exact.numel() else 0.0


def assert_as_exact_as_the_library(found, exact, library):
    """No more than 1.5 times the error of the same in torch's own kernels of the same dtype.

    Or a few roundings in float32: of a handful of numbers either error is luck.
    """
    for name in found:
        limit = max(1.5 * error(library[name], exact[name]), 4 * torch.finfo(F32).eps)
        if INTERPRETED and found[name].dtype == BF16:  # It cuts off where a card rounds.
            limit = torch.finfo(BF16).eps
        assert error(found[name], exact[name]) <= limit, name


def strided(t):
    """The same values, every other element of a transposed buffer."""
    base = torch.full((*t.shape[:-2], 2 * t.shape[-1], t.shape[-2]), 7.0, dtype=t.dtype)
    view = base.to(t.device)[..., ::2, :].transpose(-1, -2)
    return view.copy_(t)


class Shape:
    """Of a tensor, what the choice of a configuration looks at."""

    def __init__(self, dtype, *shape):
        self.dtype, self.shape = dtype, shape

    def __len__(self):
        return self.shape[0]

    def element_size(self):
        return self.dtype.itemsize


def assert_fits(kernel, k, config, about, card, limit, resources):
    """A compiled kernel spills nothing, and its shared memory is there; print what it takes."""
    registers, spilled = resources
    code = k.asm["ptx"] if card[0] == "cuda" else k.asm["amdgcn"]
    way = next((w for w in ("wgmma.mma_async", "mma.sync", "mfma") if w in code), "none")
    print(
        f"{kernel.__name__:16}{about} {config}: "
        f"{registers} / {spilled} / {k.metadata.shared >> 10}K, {way}"
    )
    assert spilled == 0
    assert k.metadata.shared <= limit
    return way
