"""Where the Triton kernels of the layers can run."""

import functools
import importlib
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
