"""Layers whose weights are a point in the simplex of n weight sets, drawn anew at each step.

Source: Wortsman et al. 2021, "Learning Neural Network Subspaces",
https://arxiv.org/abs/2102.10472
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from . import functional
from ._conv import ConvOptions
from ._init import check_sigma, perturb_, reset_affine_, vertices
from ._module import copy_module
from .simplex import Point, check_n


class SubspaceLayer(nn.Module):
    """What the subspace layers have in common: stacked parameters and a point.

    Every parameter that a subspace layer holds itself is stacked, ``[n, *shape]``. The names are
    long because :class:`Subspace` adds them to modules of any class.
    """

    subspace_point: Point
    subspace_sigma: float
    mixes_itself = False  # Whether its operation mixes the weights on the way.

    def _attach(self, n: int, sigma: float) -> None:
        check_n(n)
        check_sigma(sigma)
        self.subspace_sigma = sigma
        self.subspace_point = Point(n)
        self.subspace_point.owner = self
        if isinstance(self, nn.RNNBase):
            self._flat_weights = [None] * len(self._flat_weights_names)

    def _alpha(self) -> Tensor:
        """The weights for one forward pass: a new draw where the point is the layer's own."""
        point = self.subspace_point
        if not point.shared:
            point.begin(self)
        return point.current(next(self.parameters(), None))

    def _apply(self, fn, recurse=True):
        # A stack of vertices has a dimension too many for fn to give it a memory format.
        def flat(t: Tensor) -> Tensor:
            return fn(t.flatten(1)).unflatten(1, t.shape[1:]) if t.dim() > 3 else fn(t)

        for module in self.children() if recurse else ():
            module._apply(fn)
        return super()._apply(flat, recurse=False)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # A plain layer's tensors become the first vertex, as in the conversion of that layer.
        for name, p in self._parameters.items():
            plain = state_dict.get(prefix + name)
            if p is not None and plain is not None and plain.dim() == p.dim() - 1:
                sigma = self.subspace_sigma if p.requires_grad else 0.0
                state_dict[prefix + name] = vertices(plain, len(p), sigma)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _reset_vertices(self) -> None:
        """Place the other vertices around the first."""
        with torch.no_grad():
            for p in self._parameters.values():
                if p is not None:
                    p[1:] = p[0]
                    perturb_(p[1:], self.subspace_sigma)


class _TypedLayer(SubspaceLayer):
    """A subspace layer with a class of its own, for one class of torch.nn."""

    plain_class: type[nn.Module]

    @property
    def n(self) -> int:
        """Number of vertices."""
        return self.subspace_point.n

    @property
    def point(self) -> Point:
        """The point at which the layer mixes its vertices."""
        return self.subspace_point

    @property
    def sigma(self) -> float:
        """Standard deviation of the vertices around the first, relative to it, at the start."""
        return self.subspace_sigma

    def reset_parameters(self) -> None:
        """Draw the first vertex as the plain layer would, the others around it."""
        with torch.no_grad():
            reset_affine_(self.weight[0], None if self.bias is None else self.bias[0])
        self._reset_vertices()

    def extra_repr(self) -> str:
        return f"{self._options_repr()}, bias={self.bias is not None}, n={self.n}"


class SubspaceLinear(_TypedLayer):
    """nn.Linear at a point of the simplex of n weight sets.

    Args:
        in_features, out_features, bias, device, dtype: as for nn.Linear.
        n: number of vertices.
        sigma: vertex i > 0 starts as vertex 0 times N(1, sigma), elementwise.

    Shape:
        - Input: ``[..., in]``
        - Output: ``[..., out]``
        - weight: ``[n, out, in]``, bias: ``[n, out]``

    Raises:
        ValueError: n < 1 or sigma < 0.

    >>> layer = SubspaceLinear(784, 256, n=3)
    >>> layer(torch.zeros(10, 784)).shape, layer.weight.shape
    (torch.Size([10, 256]), torch.Size([3, 256, 784]))
    """

    plain_class = nn.Linear
    mixes_itself = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        n: int,
        sigma: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.in_features, self.out_features = in_features, out_features
        self._attach(n, sigma)
        self.weight = nn.Parameter(torch.empty(n, out_features, in_features, **dd))
        biases = nn.Parameter(torch.empty(n, out_features, **dd)) if bias else None
        self.register_parameter("bias", biases)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return functional.subspace_linear(x, self.weight, self.bias, self._alpha())

    def _options_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class _SubspaceConv(_TypedLayer, ConvOptions):
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
        sigma: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        options = (stride, padding, dilation, groups, bias, padding_mode)
        plain = self._read_options(in_channels, out_channels, kernel_size, *options)
        self._attach(n, sigma)
        self.weight = nn.Parameter(torch.empty(n, *plain.weight.shape, **dd))
        biases = nn.Parameter(torch.empty(n, out_channels, **dd)) if bias else None
        self.register_parameter("bias", biases)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        alpha = self._alpha()
        x, options = self._padded(x)
        point = self.subspace_point
        if point.mixes and alpha.dim() == 1:
            bias = None if self.bias is None else point.mixed(self.bias)
            return functional.conv(x, point.mixed(self.weight), bias, **options)
        return functional.subspace_conv(x, self.weight, self.bias, alpha, **options)


_CONV_DOC = """nn.Conv{k}d at a point of the simplex of n weight sets.

    Args:
        n: number of vertices.
        sigma: vertex i > 0 starts as vertex 0 times N(1, sigma), elementwise.
        Others: as for nn.Conv{k}d, every option included.

    Shape:
        - Input: ``[B, in, *space]`` or ``[in, *space]``
        - Output: ``[B, out, *space]`` or ``[out, *space]``
        - weight: ``[n, out, in / groups, *kernel]``, bias: ``[n, out]``

    Raises:
        ValueError: n < 1, sigma < 0, or what nn.Conv{k}d does not take.

    >>> layer = SubspaceConv{k}d(3, 20, 3, padding=1, n=3)
    >>> layer(torch.zeros(2, 3, {ones})).shape[:2]
    torch.Size([2, 20])
    """


class SubspaceConv1d(_SubspaceConv):
    __doc__ = _CONV_DOC.format(k=1, ones="8")
    plain_class = nn.Conv1d


class SubspaceConv2d(_SubspaceConv):
    __doc__ = _CONV_DOC.format(k=2, ones="8, 8")
    plain_class = nn.Conv2d


class SubspaceConv3d(_SubspaceConv):
    __doc__ = _CONV_DOC.format(k=3, ones="8, 8, 8")
    plain_class = nn.Conv3d


TYPED = {
    cls.plain_class: cls for cls in (SubspaceLinear, SubspaceConv1d, SubspaceConv2d, SubspaceConv3d)
}


class Subspace(SubspaceLayer):
    """Any other module at a point of the simplex: norms, embeddings, attention, recurrent layers.

    The result is a copy of the module that stays an instance of its class. Its own parameters
    (not those of its children: see :func:`ensemblayers.to_subspace` for whole models) are stacked
    under their names; reading such a parameter as an attribute gives its value at the point, so
    whatever the class computes with it is computed at the point. Buffers are not stacked:
    BatchNorm's statistics belong to all vertices together.

    Args:
        module: an instance of any class of modules.
        n: number of vertices.
        sigma: vertex i > 0 starts as vertex 0 times N(1, sigma), elementwise.

    Shape:
        - as the module's; parameters in ``named_parameters()`` and the state_dict: ``[n, *shape]``

    Raises:
        ValueError: a module whose parameters can't be stacked: lazy, scripted, sparse gradients.
            In the forward pass: a point per example in a module other than a norm.

    >>> norm = Subspace(nn.LayerNorm(8), n=3)
    >>> norm.weight.shape, norm.state_dict()["weight"].shape
    (torch.Size([8]), torch.Size([3, 8]))
    """

    def __new__(cls, module: nn.Module | None = None, **kwargs: Any):
        # No module: a copy or an unpickling of an object of the final class.
        if module is not None:
            if reason := why_not(module):
                raise ValueError(f"can't take {type(module).__name__} as a subspace: {reason}")
            cls = class_for(module)
        return super().__new__(cls)

    def __init__(self, module: nn.Module, *, n: int, sigma: float = 0.1) -> None:
        check_n(n)
        self.__dict__.update(vars(copy_module(module)))
        for name, p in self._parameters.items():
            if p is not None:
                stacked = vertices(p, n, sigma)
                self._parameters[name] = nn.Parameter(stacked, requires_grad=p.requires_grad)
        self._attach(n, sigma)
        if self._forward_pre_hooks:
            # Draw before them: old-style weight_norm reads parameters in its hook.
            self.subspace_point.shared = True
            self.register_forward_pre_hook(self.subspace_point.before_forward, prepend=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        alpha = self._alpha()
        if alpha.dim() == 2 and self._is_plain_norm():
            return self._norm_per_example(alpha, *args, **kwargs)
        recurrent = isinstance(self, nn.RNNBase)
        return (self._recurrent if recurrent else super().forward)(*args, **kwargs)

    def _recurrent(self, *args: Any, **kwargs: Any) -> Any:
        # A recurrent layer reads its weights from a list, which holds them in this pass only.
        self._flat_weights = [getattr(self, name, None) for name in self._flat_weights_names]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._flat_weights = [None] * len(self._flat_weights_names)

    def _is_plain_norm(self) -> bool:
        """Whether scale and shift come last: a subclass may do more after them."""
        plain = self.subspace_kind.__module__.startswith("torch.nn.modules.")
        return plain and isinstance(self, CHANNEL_NORMS + TRAILING_NORMS)

    def _norm_per_example(self, alpha: Tensor, x: Tensor) -> Tensor:
        """Normalise once, then scale and shift each example at its own point."""
        functional.check_points(x, alpha)
        y = super().forward(x)  # The attributes weight and bias read None: see _at_point.
        for name in ("weight", "bias"):
            p = self._parameters.get(name)
            if p is None:
                continue
            rows = functional.mix(p, alpha)
            trailing = isinstance(self, TRAILING_NORMS)
            ones = (1,) * (x.dim() - rows.dim())
            shape = ones + rows.shape[1:] if trailing else rows.shape[1:] + ones
            rows = rows.reshape(len(rows), *shape).to(y.dtype)
            y = y * rows if name == "weight" else y + rows
        return y

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = self.subspace_kind
        return _blank, (kind, tuple(self._parameters)), kind.__getstate__(self)

    def extra_repr(self) -> str:
        inner = super().extra_repr()
        return f"{inner}{', ' if inner else ''}n={self.subspace_point.n}"


CHANNEL_NORMS = (nn.modules.batchnorm._BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)
CHANNEL_NORMS += (nn.InstanceNorm3d, nn.GroupNorm)
TRAILING_NORMS = (nn.LayerNorm, nn.RMSNorm)


def _at_point(name: str) -> property:
    """Attribute of a subspace class that reads a stacked parameter at the point."""

    def read(self: Subspace) -> Tensor | None:
        p = self._parameters[name]
        if p is None:
            return None
        if self.__dict__.get("_subspace_resetting"):
            return p.detach()[0]
        alpha = self.subspace_point.current(p)
        if alpha.dim() == 1:
            return self.subspace_point.mixed(p)
        if self._is_plain_norm():
            return None
        raise ValueError(
            f"a point per example (alpha {list(alpha.shape)}) is for linear layers, convolutions "
            f"and norms of torch.nn, not for {self.subspace_kind.__name__}"
        )

    return property(read)


def _reset_parameters(self: Subspace) -> None:
    """Draw the first vertex as the plain module would, the others around it."""
    self._subspace_resetting = True
    try:
        self.subspace_kind.reset_parameters(self)
    finally:
        del self._subspace_resetting
    self._reset_vertices()


@functools.cache
def _subspace_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[Subspace]:
    """Subclass of ``kind`` that reads the parameters ``names`` at its point."""
    body: dict[str, Any] = {name: _at_point(name) for name in names}
    body["subspace_kind"] = kind
    if hasattr(kind, "reset_parameters"):
        body["reset_parameters"] = _reset_parameters
    if issubclass(kind, nn.RNNBase):
        # Their list of weights is made anew in each forward pass.
        for stale in ("flatten_parameters", "_init_flat_weights", "_update_flat_weights"):
            body[stale] = lambda self: None
    return type(f"Subspace{kind.__name__}", (Subspace, kind), body)


def class_for(module: nn.Module) -> type[Subspace]:
    """The subclass of a module's class that holds the module's own parameters stacked."""
    return _subspace_class(type(module), tuple(module._parameters))


def _blank(kind: type[nn.Module], names: tuple[str, ...]) -> Subspace:
    cls = _subspace_class(kind, names)
    return cls.__new__(cls)


def why_not(module: nn.Module) -> str | None:
    """Say why a module's own parameters can't be stacked, or None."""
    if isinstance(module, SubspaceLayer):
        return "it is a subspace layer already"
    parameters = [p for p in module._parameters.values() if p is not None]
    if not parameters:
        return "it has no parameters of its own"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    if any(nn.parameter.is_lazy(p) for p in parameters):
        return "its parameters are lazy; run it once first"
    exact = [p.dtype for p in parameters if not (p.is_floating_point() or p.is_complex())]
    if exact:
        return f"a parameter of {exact[0]} has no points in between"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        return "sparse gradients can't be shared out to n vertices; use sparse=False"
    return None
