"""The options of nn.Conv1d, 2d, 3d, shared by the convolution layers of every kind."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class ConvOptions(nn.Module):
    """A convolution layer without parameters: it has the attributes of nn.Conv1d, 2d or 3d."""

    plain_class: type[nn.Module]

    def _read_options(self, *args, **kwargs) -> nn.Module:
        """Take over the options, checked and completed by torch.nn; return its layer, on meta."""
        conv = self.plain_class(*args, **kwargs, device="meta")
        self.__dict__.update((k, v) for k, v in vars(conv).items() if k not in self.__dict__)
        return conv

    def _padded(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Pad x where the convolution itself can't; return it with the options for the call."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        options = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        return x, {"padding": padding, **options}

    def _options_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}"
        text += f", kernel_size={self.kernel_size}, stride={self.stride}"
        space = len(self.kernel_size)
        defaults = {"padding": (0,) * space, "dilation": (1,) * space, "groups": 1}
        for name, default in (defaults | {"padding_mode": "zeros"}).items():
            value = getattr(self, name)
            text += "" if value == default else f", {name}={value!r}"
        return text
