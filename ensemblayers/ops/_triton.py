"""Where the Triton kernels of the layers can run, and what chooses among algorithms there."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from .._transforms import has_tangents

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def takes(*tensors: Tensor | None) -> bool:
    """Whether kernels can take these tensors: real ones on a card that Triton knows."""
    present = [t for t in tensors if t is not None]
    return (
        all(t.is_cuda and t.dtype in _FLOATS and t.layout == torch.strided for t in present)
        and not any(t.is_nested for t in present)
        # A kernel has no forward-mode derivative.
        and not has_tangents()
        and usable(present[0].device)
    )


def takes_index(index: Tensor | None, x: Tensor) -> bool:
    """Whether kernels that take x can take an index too."""
    integers = (torch.int32, torch.int64)
    return index is None or (index.dtype in integers and index.device == x.device)


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for a CUDA device."""
    if module("mix") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def module(name: str) -> ModuleType | None:
    """The kernels of an operation, where Triton is installed."""
    try:
        return importlib.import_module(f".{name}_triton", __package__)
    except ImportError:
        return None


def on_tensor_cores(x: Tensor) -> bool:
    """Whether tensor cores take a product of x: in half precision, or where torch allows tf32."""
    return x.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"


class Forced:
    """Takes one algorithm of an operation in a block, for measurements: ``with forced(name):``."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.name: str | None = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name not in self.names:
            raise ValueError(f"expected an algorithm of {', '.join(self.names)}, got {name!r}")
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before
