"""Layers whose members share one weight and differ by a rank-1 factor.

Source: Wen, Tran, Ba 2020, "BatchEnsemble: An Alternative Approach to Efficient Ensemble and
Lifelong Learning", https://arxiv.org/abs/2002.06715
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import functional
from ._conv import ConvOptions
from ._init import reset_affine_
from ._module import PlainKeys
from .simplex import check_n

INITS = ("random_sign", "normal", "ones")


class BatchEnsembleLayer(nn.Module):
    """What the BatchEnsemble layers have in common: one weight, n pairs of fast weights."""

    plain_class: type[nn.Module]
    weight: nn.Parameter
    r: nn.Parameter
    s: nn.Parameter
    bias: nn.Parameter | None

    def _attach(self, n: int, init: str, dd: dict[str, Any]) -> None:
        check_n(n)
        if init not in INITS:
            raise ValueError(f"expected init to be one of {', '.join(INITS)}, got init={init!r}")
        self.init = init
        inputs, outputs = self._sizes()
        self.r = nn.Parameter(torch.empty(n, inputs, **dd))
        self.s = nn.Parameter(torch.empty(n, outputs, **dd))

    @property
    def n(self) -> int:
        """Number of members."""
        return self.r.shape[0]

    def reset_parameters(self) -> None:
        """Draw the weight as the plain layer would, each member's bias too, and r and s."""
        with torch.no_grad():
            reset_affine_(self.weight, None)
            if self.bias is not None:
                fan_in = self.weight[0].numel() if len(self.weight) else 0
                bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
                nn.init.uniform_(self.bias, -bound, bound)
        self.reset_fast_weights()

    def reset_fast_weights(self) -> None:
        """Draw r and s anew, as ``init`` says: random signs, N(1, 0.5), or ones."""
        with torch.no_grad():
            for fast in (self.r, self.s):
                if self.init == "random_sign":
                    fast.bernoulli_(0.5).mul_(2).sub_(1)
                elif self.init == "normal":
                    fast.normal_(1, 0.5)
                else:
                    fast.fill_(1)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # A plain layer has no r and s: the layer keeps its own. Its bias is every member's.
        if prefix + "weight" in state_dict:
            for name in ("r", "s"):
                state_dict.setdefault(prefix + name, getattr(self, name).detach())
        bias = state_dict.get(prefix + "bias")
        if self.bias is not None and bias is not None and bias.dim() == 1:
            state_dict[prefix + "bias"] = bias.repeat(self.n, 1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self._options_repr()}, bias={self.bias is not None}, n={self.n}"


class BatchEnsembleLinear(BatchEnsembleLayer):
    """nn.Linear for n members at once: member i has the weight ``W * (s_i r_i^T)`` and a bias.

    Args:
        in_features, out_features, bias, device, dtype: as for nn.Linear.
        n: number of members.
        init: how r and s start: ``"random_sign"``, ``"normal"`` (N(1, 0.5)) or ``"ones"``.

    Shape:
        - Input: ``[n * b, ..., in]``, member-major: rows i * b to (i + 1) * b go through member i
        - Output: ``[n * b, ..., out]``
        - weight: ``[out, in]``, r: ``[n, in]``, s: ``[n, out]``, bias: ``[n, out]``

    Raises:
        ValueError: n < 1, an unknown init; in the forward pass, a batch that does not divide by n.

    >>> layer = BatchEnsembleLinear(784, 256, n=4)
    >>> layer(torch.zeros(4 * 10, 784)).shape, layer.weight.shape
    (torch.Size([40, 256]), torch.Size([256, 784]))
    """

    plain_class = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        n: int,
        init: Literal["random_sign", "normal", "ones"] = "random_sign",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.in_features, self.out_features = in_features, out_features
        self._attach(n, init, dd)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **dd))
        biases = nn.Parameter(torch.empty(n, out_features, **dd)) if bias else None
        self.register_parameter("bias", biases)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_ensemble_linear(x, self.weight, self.r, self.s, self.bias)

    def _options_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _sizes(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    def _member_weight(self, i: int) -> Tensor:
        return self.weight * torch.outer(self.s[i], self.r[i])


class _BatchEnsembleConv(BatchEnsembleLayer, ConvOptions):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        n: int,
        init: Literal["random_sign", "normal", "ones"] = "random_sign",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        options = (stride, padding, dilation, groups, bias, padding_mode)
        plain = self._read_options(in_channels, out_channels, kernel_size, *options)
        self._attach(n, init, dd)
        self.weight = nn.Parameter(torch.empty(plain.weight.shape, **dd))
        biases = nn.Parameter(torch.empty(n, out_channels, **dd)) if bias else None
        self.register_parameter("bias", biases)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        # Padding copies or adds zeros, so that scaling after it is the same.
        x, options = self._padded(x)
        return functional.batch_ensemble_conv(x, self.weight, self.r, self.s, self.bias, **options)

    def _sizes(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels

    def _member_weight(self, i: int) -> Tensor:
        inputs = (
            self.r[i].view(self.groups, -1).repeat_interleave(self.out_channels // self.groups, 0)
        )
        ones = (1,) * (self.weight.dim() - 2)
        return self.weight * (self.s[i][:, None] * inputs).view(*inputs.shape, *ones)


_CONV_DOC = """nn.Conv{k}d for n members at once: r_i scales the input channels, s_i the outputs.

    Args:
        n: number of members.
        init: how r and s start: ``"random_sign"``, ``"normal"`` (N(1, 0.5)) or ``"ones"``.
        Others: as for nn.Conv{k}d, every option included.

    Shape:
        - Input: ``[n * b, in, *space]``, member-major
        - Output: ``[n * b, out, *space]``
        - weight: ``[out, in / groups, *kernel]``
        - r: ``[n, in]``, s and bias: ``[n, out]``

    Raises:
        ValueError: n < 1, an unknown init, or what nn.Conv{k}d does not take; in the forward pass,
            a batch that does not divide by n.

    >>> layer = BatchEnsembleConv{k}d(3, 20, 3, padding=1, n=4)
    >>> layer(torch.zeros(4 * 2, 3, {ones})).shape[:2]
    torch.Size([8, 20])
    """


class BatchEnsembleConv1d(_BatchEnsembleConv):
    __doc__ = _CONV_DOC.format(k=1, ones="8")
    plain_class = nn.Conv1d


class BatchEnsembleConv2d(_BatchEnsembleConv):
    __doc__ = _CONV_DOC.format(k=2, ones="8, 8")
    plain_class = nn.Conv2d


class BatchEnsembleConv3d(_BatchEnsembleConv):
    __doc__ = _CONV_DOC.format(k=3, ones="8, 8, 8")
    plain_class = nn.Conv3d


TYPED = {
    cls.plain_class: cls
    for cls in (BatchEnsembleLinear, BatchEnsembleConv1d, BatchEnsembleConv2d, BatchEnsembleConv3d)
}


class BatchEnsemble(PlainKeys):
    """A model of BatchEnsemble layers that folds its batch over the members by itself.

    Args:
        module: a model with BatchEnsemble layers, all of one n.
        n: that number of members, where it is to be checked.
        train: what each member sees in training. ``"split"``: the batch is divided, rows
            i * B / n to (i + 1) * B / n go through member i, and the outputs keep the order of the
            rows. ``"repeat"``: every member sees the whole batch.

    Shape:
        - Input: ``[B, ...]``: every tensor among the arguments whose first dimension is that of
          the first tensor's is folded
        - Output in training, split: ``[B, ...]``
        - Output in training, repeat, and in evaluation: ``[n, B, ...]``

    Keys of the state_dict are those of ``module``, without a prefix.

    Raises:
        ValueError: no BatchEnsemble layers, or of several n; in the forward pass, a batch that
            does not divide by n (split).

    >>> model = BatchEnsemble(nn.Sequential(BatchEnsembleLinear(8, 2, n=4)))
    >>> model(torch.zeros(12, 8)).shape, model.eval()(torch.zeros(12, 8)).shape
    (torch.Size([12, 2]), torch.Size([4, 12, 2]))
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        n: int | None = None,
        train: Literal["split", "repeat"] = "split",
    ) -> None:
        super().__init__(module)
        if train not in ("split", "repeat"):
            raise ValueError(f"expected train to be split or repeat, got train={train!r}")
        self.n = batch_ensemble_size(module)
        if n not in (None, self.n):
            raise ValueError(f"expected layers of n={n} members, got n={self.n}")
        self.train_fold = train

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or self.train_fold == "repeat":
            return repeat_forward(self.module, self.n, args, kwargs)
        rows = batch_rows(args, kwargs)
        if rows % self.n:
            raise ValueError(
                f"expected a batch that divides by n={self.n} members (train='split'), "
                f"got {rows} rows; drop the last batch, or use train='repeat'"
            )
        return self.module(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"n={self.n}, train={self.train_fold!r}"


def batch_ensemble_size(model: nn.Module) -> int:
    """The n of a model's BatchEnsemble layers.

    Raises:
        ValueError: the model has none, or of several n.
    """
    counts = sorted({m.n for m in model.modules() if isinstance(m, BatchEnsembleLayer)})
    if len(counts) != 1:
        found = f"layers with n={counts}" if counts else "none"
        raise ValueError(f"expected a model with BatchEnsemble layers of one n, got {found}")
    return counts[0]


def batch_rows(args: Any, kwargs: Any) -> int:
    """Size of the batch: the first dimension of the first tensor among the arguments."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise ValueError("expected a tensor with a batch dimension among the arguments, got none")


def repeat_forward(module: nn.Module, n: int, args: Any, kwargs: Any) -> Any:
    """Run the whole batch through every member: ``[B, ...]`` to ``[n, B, ...]``."""
    rows = batch_rows(args, kwargs)

    def fold(leaf: Any) -> Any:
        folds = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
        return leaf.repeat(n, *(1,) * (leaf.dim() - 1)) if folds else leaf

    def unfold(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            folds = leaf.dim() and leaf.shape[0] == n * rows
            return leaf.unflatten(0, (n, rows)) if folds else leaf
        if not isinstance(leaf, (int, float, str, type(None))):
            raise ValueError(
                f"expected outputs of tensors in tuples, lists and dicts, got {type(leaf).__name__}"
            )
        return leaf

    args, kwargs = pytree.tree_map(fold, (args, kwargs))
    return pytree.tree_map(unfold, module(*args, **kwargs))
