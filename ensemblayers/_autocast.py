"""Autocast inside of torch.func.vmap, as it is outside."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What autocast casts, all of it: inputs, weights and biases.
_PRODUCTS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
_PRODUCTS |= {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
_PRODUCTS |= {F.scaled_dot_product_attention, F.prelu}
# Norms take half precision beside weights in float32, which they don't when mapped. Their outputs
# are of the input's dtype again; off the CPU, autocast has some of them give float32.
_NORMS = {F.batch_norm, F.instance_norm}
_NORMS_IN_FLOAT32 = {F.layer_norm, F.group_norm}
_HALF = (torch.float16, torch.bfloat16)
_ATTENTION = F.multi_head_attention_forward
_ATTENTION_BIASES = {6: "in_proj_bias", 12: "out_proj_bias"}  # Its arguments that go to F.linear.


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast, where it is at work on a type of device."""
    if device == "meta" or not torch.is_autocast_enabled(device):  # No autocast on meta.
        return None
    return torch.get_autocast_dtype(device)


def mapped_autocast(device: str) -> contextlib.AbstractContextManager:
    """Have autocast, where it is at work on a type of device, cast what layers take under vmap.

    Mapped, F.linear is a product and a sum, and of the sum autocast knows nothing: with a bias in
    float32 the output is float32. The same holds for convolutions, attention and norms. This knows
    the functions that torch.nn's layers call; a caller has to compare the outputs' dtypes.
    """
    dtype = autocast_dtype(device)
    return contextlib.nullcontext() if dtype is None else _MappedAutocast(dtype)


class _MappedAutocast(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _PRODUCTS or func is _ATTENTION:
            some = func is _ATTENTION
            args = [
                self._cast(t) if not some or k in _ATTENTION_BIASES else t
                for k, t in enumerate(args)
            ]
            kwargs = {
                k: self._cast(t) if not some or k in _ATTENTION_BIASES.values() else t
                for k, t in kwargs.items()
            }
        if args and (func in _NORMS or func in _NORMS_IN_FLOAT32):
            x, *rest = args
            out = func(x.float() if x.dtype in _HALF else x, *rest, **kwargs)
            return out.to(x.dtype) if func in _NORMS or x.device.type == "cpu" else out
        return func(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if eligible and value.dtype != torch.float64 else value
