"""Layers whose members share one weight and differ by a rank-1 factor.

Source: Wen, Tran, Ba 2020, "BatchEnsemble: An Alternative Approach to Efficient Ensemble and
Lifelong Learning", https://arxiv.org/abs/2002.06715
"""

import math
from collections import OrderedDict
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import functional
from ._assignment import Assigned, Assignment
from ._conv import ConvOptions
from ._gradients import is_eager
from ._init import reset_affine_
from ._module import PlainKeys, check_no_ensemble
from .simplex import check_n

INITS = ("random_sign", "normal", "ones")
Init = Literal["random_sign", "normal", "ones"]

# Arguments of torch's attention and transformers that all examples share, where 2-dimensional.
_MASKS = ("attn_mask", "mask", "src_mask", "tgt_mask", "memory_mask")


class BatchEnsembleLayer(Assigned):
    """What the BatchEnsemble layers have in common: one weight, n sets of fast weights."""

    _version = 2  # In the metadata of a state_dict; a plain layer's is 1.
    plain_class: type[nn.Module]
    weight: nn.Parameter
    r: nn.Parameter
    s: nn.Parameter
    bias: nn.Parameter | None

    def _attach(
        self,
        n: int,
        dd: dict[str, Any],
        *,
        rank: int = 1,
        init: str = "random_sign",
        positive: float = 0.5,
        std: float = 0.5,
    ) -> None:
        check_n(n)
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"expected rank to be a whole number from 1, got rank={rank!r}")
        if init not in INITS:
            raise ValueError(f"expected init to be one of {', '.join(INITS)}, got init={init!r}")
        if not 0 <= positive <= 1:
            raise ValueError(f"expected a probability, got positive={positive!r}")
        if not std >= 0:
            raise ValueError(f"expected a standard deviation, got std={std!r}")
        self.init, self.positive, self.std = init, positive, std
        pairs = (n,) if rank == 1 else (n, rank)
        inputs, outputs = self._sizes()
        self.r = nn.Parameter(torch.empty(*pairs, inputs, **dd))
        self.s = nn.Parameter(torch.empty(*pairs, outputs, **dd))

    def _detach(self) -> None:
        """Remove what ``_attach`` and a wrapper added, all but the weight and the biases."""
        del self.r, self.s, self.init, self.positive, self.std
        vars(self).pop("assignment", None)

    @property
    def n(self) -> int:
        """Number of members."""
        return self.r.shape[0]

    @property
    def rank(self) -> int:
        """Number of pairs of fast weights that a member has."""
        return 1 if self.r.dim() == 2 else self.r.shape[1]

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
        """Draw r and s anew, as ``init`` says.

        ``"random_sign"``: 1 with the probability ``positive``, else -1. ``"normal"``:
        N(1, ``std``). ``"ones"``. Of several pairs of a member, the others than the first start
        without effect: s is 0, r random signs.
        """
        with torch.no_grad():
            for fast in (self.r, self.s):
                first = fast if self.rank == 1 else fast[:, 0]
                if self.init == "random_sign":
                    _random_signs_(first, self.positive)
                elif self.init == "normal":
                    first.normal_(1, self.std)
                else:
                    first.fill_(1)
            if self.rank > 1:
                _random_signs_(self.r[:, 1:], 0.5)
                self.s[:, 1:] = 0

    def _pairs(self, i: int) -> list[tuple[Tensor, Tensor]]:
        """Member i's pairs of r and s."""
        r, s = self.r[i], self.s[i]
        return list(zip(r.view(-1, r.shape[-1]), s.view(-1, s.shape[-1]), strict=True))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args, **kwargs):
        # A plain layer has no r and s: the layer keeps its own. Its bias is every member's. What
        # is missing in the state_dict of a layer of this class is torch's to report.
        fast = {prefix + name: getattr(self, name).detach() for name in ("r", "s")}
        own = local_metadata.get("version", 1) >= self._version or fast.keys() & state_dict.keys()
        if prefix + "weight" in state_dict and not own:
            state_dict.update(fast)
        bias = state_dict.get(prefix + "bias")
        if self.bias is not None and bias is not None and bias.dim() == 1:
            state_dict[prefix + "bias"] = bias.repeat(self.n, 1)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def extra_repr(self) -> str:
        rank = "" if self.rank == 1 else f", rank={self.rank}"
        return f"{self._options_repr()}, bias={self.bias is not None}, n={self.n}{rank}"


def _random_signs_(fast: Tensor, positive: float) -> None:
    fast.bernoulli_(positive).mul_(2).sub_(1)


class BatchEnsembleLinear(BatchEnsembleLayer):
    """nn.Linear for n members at once: member i has the weight ``W * (s_i r_i^T)`` and a bias.

    Args:
        in_features, out_features, bias, device, dtype: as for nn.Linear.
        n: number of members.
        rank: pairs of r and s a member, ``W * sum_j s_ij r_ij^T``; k pairs cost k times one.
        init: how r and s start: ``"random_sign"``, ``"normal"`` or ``"ones"``.
        positive: probability of 1, not -1, for random signs.
        std: of the normal N(1, std).

    Shape:
        - Input: ``[n * b, ..., in]``, member-major: rows i * b to (i + 1) * b go through member i
        - Output: ``[n * b, ..., out]``
        - weight: ``[out, in]``, r: ``[n, in]``, s: ``[n, out]``, bias: ``[n, out]``; with a rank
          above 1, r: ``[n, rank, in]``, s: ``[n, rank, out]``

    Raises:
        ValueError: n or rank < 1, an unknown init; in the forward pass, a batch that does not
            divide by n.

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
        rank: int = 1,
        init: Init = "random_sign",
        positive: float = 0.5,
        std: float = 0.5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.in_features, self.out_features = in_features, out_features
        self._attach(n, dd, rank=rank, init=init, positive=positive, std=std)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **dd))
        biases = nn.Parameter(torch.empty(n, out_features, **dd)) if bias else None
        self.register_parameter("bias", biases)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_ensemble_linear(
            x, self.weight, self.r, self.s, self.bias, members=self.members
        )

    def _options_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _sizes(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    def _member_weight(self, i: int) -> Tensor:
        return self.weight * sum(torch.outer(s, r) for r, s in self._pairs(i))


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
        rank: int = 1,
        init: Init = "random_sign",
        positive: float = 0.5,
        std: float = 0.5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        options = (stride, padding, dilation, groups, bias, padding_mode)
        plain = self._read_options(in_channels, out_channels, kernel_size, *options)
        self._attach(n, dd, rank=rank, init=init, positive=positive, std=std)
        self.weight = nn.Parameter(torch.empty(plain.weight.shape, **dd))
        biases = nn.Parameter(torch.empty(n, out_channels, **dd)) if bias else None
        self.register_parameter("bias", biases)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        # Padding copies or adds zeros, so that scaling after it is the same.
        x, options = self._padded(x)
        return functional.batch_ensemble_conv(
            x, self.weight, self.r, self.s, self.bias, members=self.members, **options
        )

    def _sizes(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels

    def _member_weight(self, i: int) -> Tensor:
        each = self.out_channels // self.groups
        factors = sum(
            s[:, None] * r.view(self.groups, -1).repeat_interleave(each, 0)
            for r, s in self._pairs(i)
        )
        ones = (1,) * (self.weight.dim() - 2)
        return self.weight * factors.view(*factors.shape, *ones)


_CONV_DOC = """nn.Conv{k}d for n members at once: r_i scales the input channels, s_i the outputs.

    Args:
        n: number of members.
        rank, init, positive, std: as for :class:`BatchEnsembleLinear`.
        Others: as for nn.Conv{k}d, every option included.

    Shape:
        - Input: ``[n * b, in, *space]``, member-major
        - Output: ``[n * b, out, *space]``
        - weight: ``[out, in / groups, *kernel]``
        - r: ``[n, in]`` or ``[n, rank, in]``, s: ``[n, out]`` or ``[n, rank, out]``,
          bias: ``[n, out]``

    Raises:
        ValueError: n or rank < 1, an unknown init, or what nn.Conv{k}d does not take; in the
            forward pass, a batch that does not divide by n.

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
            rows. ``"random"``: each row goes through a member drawn for it, by torch's generator.
            ``"repeat"``: every member sees the whole batch.

    The call takes ``members``, an index ``[B]``, too: row j goes through member ``members[j]``, in
    training and in evaluation.

    That index holds for the call, and in the backward pass for the parts of the call that
    activation checkpointing runs again. A layer or ``module`` called directly is member-major. One
    thread at a time may call a model with ``members``.

    Shape:
        - Input: ``[B, ...]``: every tensor among the arguments whose first dimension is that of
          the first tensor's is folded, but for two-dimensional ``attn_mask``, ``src_mask``,
          ``tgt_mask`` and ``memory_mask`` and a square ``mask``, passed by keyword: as in torch's
          attention, all examples share them. A batch elsewhere (a recurrent layer's first state,
          ``[layers, B, H]``) is not folded.
        - Output in training, split and random, and with ``members``: ``[B, ...]``
        - Output in training, repeat, and in evaluation: ``[n, B, ...]``; that of a tensor with
          the batch in dimension 1, ``[layers, B, H]``: ``[n, layers, B, H]``. Where neither
          dimension 0 nor 1 is that of the folded batch, tensors come as they are.

    Keys of the state_dict are those of ``module``, without a prefix.

    Raises:
        ValueError: no BatchEnsemble layers, or of several n, or a whole BatchEnsemble or
            StackedEnsemble inside; in the forward pass, a batch that does not divide by n
            (split), ``members`` that are no tensor of integers or for another number of rows, or
            an output that is rows or a recurrent layer's state, and the shape does not say which.
        IndexError: ``members`` without a layer's member, on a CPU.

    >>> model = BatchEnsemble(nn.Sequential(BatchEnsembleLinear(8, 2, n=4)))
    >>> model(torch.zeros(12, 8)).shape, model.eval()(torch.zeros(12, 8)).shape
    (torch.Size([12, 2]), torch.Size([4, 12, 2]))
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        n: int | None = None,
        train: Literal["split", "random", "repeat"] = "split",
    ) -> None:
        check_no_ensemble(module)
        super().__init__(module)
        if train not in ("split", "random", "repeat"):
            raise ValueError(f"expected train to be split, random or repeat, got train={train!r}")
        self.n = batch_ensemble_size(module)
        if n not in (None, self.n):
            raise ValueError(f"expected layers of n={n} members, got n={self.n}")
        self.train_fold = train
        # One for all wrappers of a module, so that each of them tells its layers.
        found = (m.assignment for m in self._assigned() if m.assignment is not None)
        self.assignment = next(found, None) or Assignment()
        self._assign()

    def forward(self, *args: Any, members: Tensor | None = None, **kwargs: Any) -> Any:
        if members is None and (not self.training or self.train_fold == "repeat"):
            return self.every_member(args, kwargs)
        first = first_tensor(args, kwargs)
        rows = first.shape[0]
        if members is not None:
            self._check_members(members, rows)
        elif self.train_fold == "random":
            members = torch.randint(self.n, (rows,), device=first.device)
        elif rows % self.n:
            raise ValueError(
                f"expected a batch that divides by n={self.n} members (train='split'), "
                f"got {rows} rows; drop the last batch, or use train='repeat'"
            )
        if members is not None and not torch.compiler.is_compiling():
            self._assign()  # Layers may have been put in since.
        return self.assignment.run(members, self.module, *args, **kwargs)

    def every_member(self, args: Any, kwargs: Any) -> Any:
        """The whole batch through every member: ``[B, ...]`` to ``[n, B, ...]``."""
        return self.assignment.run(None, repeat_forward, self.module, self.n, args, kwargs)

    def _assigned(self) -> list[Assigned]:
        return [m for m in self.module.modules() if isinstance(m, Assigned)]

    def _assign(self) -> None:
        for layer in self._assigned():
            layer.assignment = self.assignment

    def _check_members(self, members: Tensor, rows: int) -> None:
        functional.check_index(members)
        if members.shape != (rows,):
            raise ValueError(
                f"expected members [{rows}], a member for each row, got {list(members.shape)}"
            )
        # Elsewhere than on a CPU, to look would wait for the device.
        if rows and members.device.type == "cpu" and is_eager(members):
            low, high = (int(bound) for bound in members.aminmax())
            if low < 0 or high >= self.n:
                raise IndexError(
                    f"expected members in 0..{self.n - 1}, got {low if low < 0 else high}"
                )

    def load_state_dict(self, state_dict, strict=True, assign=False):
        layers = self._layers("")
        if not hasattr(state_dict, "_metadata") and any(self._fast(state_dict, layers).values()):
            # As safetensors loads it. The layers are to know that it is not a plain model's.
            version = {"version": BatchEnsembleLayer._version}
            state_dict = OrderedDict(state_dict)
            state_dict._metadata = {layer.rstrip("."): version for layer in layers}
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, *args):
        # As a part of another module, whose metadata has other names for the layers. One that has
        # r or s only reports the other itself.
        found = self._fast(state_dict, self._layers(prefix))
        if any(found.values()):
            for layer in (layer for layer, own in found.items() if not own):
                inner = f"{prefix}module.{layer.removeprefix(prefix)}"
                missing += [inner + "r", inner + "s"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *args)

    def _layers(self, prefix: str) -> list[str]:
        """The prefixes of the layers' keys in a state_dict."""
        named = self.module.named_modules()
        names = [name for name, m in named if isinstance(m, BatchEnsembleLayer)]
        return [f"{prefix}{name}." if name else prefix for name in names]

    @staticmethod
    def _fast(state_dict, layers: list[str]) -> dict[str, list[str]]:
        """The fast weights that a state_dict has of each layer."""
        return {p: [k for k in (p + "r", p + "s") if k in state_dict] for p in layers}

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


def first_tensor(args: Any, kwargs: Any) -> Tensor:
    """The first tensor among the arguments, which has the batch in its first dimension."""
    if args and isinstance(args[0], Tensor) and args[0].dim():
        return args[0]
    kwargs = {name: value for name, value in kwargs.items() if not _is_shared(name, value)}
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf
    raise ValueError("expected a tensor with a batch dimension among the arguments, got none")


def _is_shared(name: str, value: Any) -> bool:
    """Whether a keyword argument is an attention mask that all examples share."""
    if name not in _MASKS or not isinstance(value, Tensor) or value.dim() != 2:
        return False
    # Models often call ``[B, length]`` a mask too: torch's own of that name are square.
    return name != "mask" or value.shape[0] == value.shape[1]


def repeat_forward(module: nn.Module, n: int, args: Any, kwargs: Any) -> Any:
    """Run the whole batch through every member: ``[B, ...]`` to ``[n, B, ...]``."""
    rows = first_tensor(args, kwargs).shape[0]

    def fold(leaf: Any) -> Any:
        folds = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
        # Not repeat, which takes images with channels last out of that order.
        return torch.cat([leaf] * n) if folds else leaf

    def unfold(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _unfold(leaf, n, rows, states)
        if not isinstance(leaf, (int, float, str, type(None))):
            raise ValueError(
                f"expected outputs of tensors in tuples, lists and dicts, got {type(leaf).__name__}"
            )
        return leaf

    rnns = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    states = [m.num_layers * (1 + m.bidirectional) for m in rnns]
    args = pytree.tree_map(fold, args)
    kwargs = {k: v if _is_shared(k, v) else pytree.tree_map(fold, v) for k, v in kwargs.items()}
    return pytree.tree_map(unfold, module(*args, **kwargs))


def _unfold(y: Tensor, n: int, rows: int, states: list[int]) -> Tensor:
    """``[n * B, ...]`` as ``[n, B, ...]``, ``[k, n * B, ...]`` as ``[n, k, B, ...]``.

    Args:
        states: the first dimensions of the states of the model's recurrent layers.
    """
    batch = n * rows
    if y.dim() and y.shape[0] == batch:
        # The order spares models without states a comparison of sizes that may be dynamic.
        if y.dim() == 3 and batch in states and y.shape[1] == batch:
            raise ValueError(
                f"expected rows or a recurrent layer's state, but an output {list(y.shape)} may be "
                f"either, as there are {batch} layers and n * B = {batch}; use another batch size"
            )
        return y.unflatten(0, (n, rows))
    if y.dim() > 1 and y.shape[1] == batch:
        return y.unflatten(1, (n, rows)).movedim(1, 0)
    return y
