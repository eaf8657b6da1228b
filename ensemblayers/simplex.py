"""Uniform sampling on the probability simplex, and the point that a network's layers share."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ._module import check_module
from .ops.mix import mix, mix_all


def sample_simplex(
    n: int,
    *size: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw points uniformly from the simplex of n weights (normalised exponentials).

    Args:
        n: number of vertices, at least 1.
        *size: leading dimensions, none for a single point.

    Shape:
        - Output: ``[*size, n]``, non-negative, each row with sum 1.

    The draw stays on the device, without a synchronisation with the host.

    >>> sample_simplex(3, 5).shape
    torch.Size([5, 3])
    """
    check_n(n)
    # A uniform draw of exactly 0 would give 0 / 0 for n = 1.
    e = torch.empty(*size, n, device=device, dtype=dtype).exponential_(generator=generator)
    e = e.clamp_min(torch.finfo(dtype).tiny)
    return e / e.sum(-1, keepdim=True)


class Point:
    """The point of the simplex at which subspace layers mix their n weight sets.

    In training, each forward pass takes a new uniform draw; in evaluation, the point is the
    midpoint ``1 / n``. A point that was set (:func:`ensemblayers.set_point`) holds in both modes
    until it is released. A layer that has a point of its own draws in its own forward pass; under
    :func:`ensemblayers.share_point`, the model that owns the point draws once for all its layers,
    and its training mode decides.

    The draws come from torch's default generator, on the device of the owner's parameters: across
    processes, seed alike for one alpha on every rank, differently for one a rank. ``alpha`` is no
    part of the state_dict, and is float32 (float64 for float64 parameters) whatever the layers'
    dtype.

    Args:
        n: number of vertices, at least 1.

    >>> Point(4).alpha
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, n: int) -> None:
        check_n(n)
        self.n = n
        self.shared = False
        self.owner: nn.Module | None = None
        self.drawn: Tensor | None = None
        self.fixed: Tensor | None = None
        self.at_once = False
        self.mixes: dict[Tensor, Tensor] = {}  # In a forward pass, what was mixed at once.

    @property
    def alpha(self) -> Tensor:
        """The weights in force: ``[n]``, or ``[B, n]`` where they were set for each example."""
        like = None if self.owner is None else next(self.owner.parameters(), None)
        return self.current(like)

    def current(self, like: Tensor | None = None) -> Tensor:
        """The weights in force, on the device of ``like``."""
        alpha = self.fixed
        if alpha is None and self.owner is not None and self.owner.training:
            alpha = self.drawn
        if alpha is None:
            return self.midpoint(like)
        return alpha if like is None or alpha.device == like.device else alpha.to(like.device)

    def midpoint(self, like: Tensor | None = None) -> Tensor:
        """The weights ``1 / n``."""
        return torch.full((self.n,), 1 / self.n, **self._device_dtype(like))

    def vertex(self, i: int, like: Tensor | None = None) -> Tensor:
        """The weights of vertex i, from 0; negative counts from the end.

        Raises:
            ValueError: no such vertex.
        """
        alpha = torch.zeros(self.n, **self._device_dtype(like))
        alpha[check_member(i, self.n)] = 1
        return alpha

    def set(self, alpha: Tensor | list[float] | None, like: Tensor | None = None) -> None:
        """Fix the point, or release it with None.

        Args:
            alpha: ``[n]`` or ``[B, n]``; may require grad. The weights are taken as they are: a
                point outside the simplex extrapolates.
            like: gives the device and the precision.

        Raises:
            ValueError: another shape.
        """
        if alpha is not None:
            alpha = torch.as_tensor(alpha).to(**self._device_dtype(like))
            if alpha.dim() not in (1, 2) or alpha.shape[-1] != self.n:
                raise ValueError(
                    f"expected alpha of shape [{self.n}] or [B, {self.n}] for n={self.n} vertices, "
                    f"got {list(alpha.shape)}"
                )
        self.fixed, self.mixes = alpha, {}

    def begin(self, owner: nn.Module) -> None:
        """Begin a forward pass of the owner: draw, in training and where no point was set."""
        if self.owner is not owner:
            self.owner = owner
        if owner.training and self.fixed is None:
            # A new tensor, not an update in place: an earlier graph may still need the old one.
            like = next(owner.parameters(), None)
            self.drawn = sample_simplex(self.n, **self._device_dtype(like))

    def before_forward(self, module: nn.Module, args: tuple) -> None:
        """Forward pre-hook of the model that owns a shared point."""
        self.begin(module)
        if self.at_once:
            self._mix_all(module)

    def _mix_all(self, model: nn.Module) -> None:
        groups: dict[tuple, list[Tensor]] = {}
        for module in model.modules():
            if vars(module).get("subspace_point") is self and not module.mixes_itself:
                for p in module._parameters.values():
                    if p is not None:
                        groups.setdefault((p.device, p.dtype), []).append(p)
        for stacks in groups.values():
            alpha = self.current(stacks[0])
            if alpha.dim() == 1:
                for p, mixed in zip(stacks, mix_all(stacks, alpha), strict=True):
                    self.mixes[p] = mixed

    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Forward hook of a model whose weights are mixed at once."""
        self.mixes = {}

    def mixed(self, p: Tensor) -> Tensor:
        """A stacked parameter at the point in force, ``[n]``."""
        found = self.mixes.get(p) if self.mixes else None
        # One that was mixed without a graph is no use in a block that makes one.
        if found is not None and (found.requires_grad or not torch.is_grad_enabled()):
            return found
        return mix(p, self.current(p))

    @staticmethod
    def _device_dtype(like: Tensor | None) -> dict[str, Any]:
        if like is None:
            return {"dtype": torch.float32}
        double = like.dtype in (torch.float64, torch.complex128)
        dtype = torch.float64 if double else torch.float32
        return {"device": like.device, "dtype": dtype}

    def __getstate__(self) -> dict[str, Any]:
        # A copy finds its owner at its next forward pass, and holds no output of a graph.
        state = {**self.__dict__, "owner": None, "drawn": None, "mixes": {}}
        return {k: v.detach() if isinstance(v, Tensor) else v for k, v in state.items()}

    def __repr__(self) -> str:
        return f"Point(n={self.n}{', shared=True' if self.shared else ''})"


def check_n(n: int) -> None:
    """Raise a ValueError unless n is a whole number of members, at least 1."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"expected a number of members n >= 1, got n={n!r}")


def check_member(i: int, n: int) -> int:
    """Index of member i of n, counted from 0; raises a ValueError where there is none."""
    try:
        i = operator.index(i)
    except TypeError:
        raise ValueError(f"expected a member or vertex in 0..{n - 1}, got {i!r}") from None
    if i not in range(-n, n):
        raise ValueError(f"expected a member or vertex in 0..{n - 1}, got {i}")
    return i % n


def points(model: nn.Module) -> list[Point]:
    """The distinct points of a model's subspace layers.

    Raises:
        ValueError: the model has none.
    """
    check_module(model)
    found = [m.subspace_point for m in model.modules() if "subspace_point" in vars(m)]
    if not found:
        raise ValueError(f"expected a model with subspace layers, got {type(model).__name__}")
    return list({id(p): p for p in found}.values())


def vertex_count(model: nn.Module) -> int:
    """The number of vertices of a model's subspace layers.

    Raises:
        ValueError: the model has none, or of several n.
    """
    counts = sorted({p.n for p in points(model)})
    if len(counts) > 1:
        raise ValueError(f"expected one number of vertices in all layers, got n={counts}")
    return counts[0]


def share_point(model: nn.Module, point: Point | None = None, *, at_once: bool = False) -> Point:
    """Give all subspace layers of a model one point, drawn once before each forward of the model.

    Call the model itself, not its parts: a part that runs alone in training stays at the last draw.
    A part that is recomputed in the backward pass (activation checkpointing) reads the last draw
    too: do the backward pass before the next forward pass.

    Args:
        point: a point to share, by default a new one.
        at_once: mix the weights of all layers but the linear ones at the beginning of a forward
            pass, on CUDA in one launch. Worth it where launches cost more than what they do: many
            small layers. All gradients then come at once, at the end of the backward pass: one
            backward pass a forward pass. Activation checkpointing, which would mix anew, is not
            for such a model.

    Returns:
        The shared point.

    Raises:
        ValueError: no subspace layers, or their numbers of vertices differ.

    >>> from ensemblayers import SubspaceLinear
    >>> model = nn.Sequential(SubspaceLinear(2, 2, n=3), SubspaceLinear(2, 1, n=3))
    >>> share_point(model)
    Point(n=3, shared=True)
    """
    n = vertex_count(model)
    point = Point(n) if point is None else point
    if point.n != n:
        raise ValueError(f"expected a point of the layers' n={n} vertices, got n={point.n}")
    point.shared, point.owner, point.at_once = True, model, at_once
    for module in model.modules():
        drop_point_hooks(module)
        if "subspace_point" in vars(module):
            module.subspace_point = point
    # First, as other hooks may read parameters at the point (old-style weight_norm does).
    model.register_forward_pre_hook(point.before_forward, prepend=True)
    if at_once:
        model.register_forward_hook(point.after_forward, always_call=True)
    return point


def drop_point_hooks(module: nn.Module) -> None:
    """Remove the hooks by which a module draws its point."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        own = [k for k, hook in hooks.items() if isinstance(getattr(hook, "__self__", 0), Point)]
        for key in own:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def set_point(
    model: nn.Module, alpha: Tensor | list[float] | None = None, *, vertex: int | None = None
) -> None:
    """Fix the point of all subspace layers of a model, or release it with neither argument.

    Args:
        alpha: ``[n]``, or ``[B, n]`` for a point per example; may require grad. The weights are
            taken as they are: a point outside the simplex extrapolates.
        vertex: the index of one vertex, from 0; negative counts from the end.

    Raises:
        ValueError: no subspace layers, both arguments, another shape, or no such vertex.

    >>> from ensemblayers import SubspaceLinear
    >>> layer = SubspaceLinear(2, 2, n=3)
    >>> set_point(layer, vertex=1)
    >>> layer.point.alpha
    tensor([0., 1., 0.])
    """
    if alpha is not None and vertex is not None:
        raise ValueError(f"expected alpha or vertex, got alpha={alpha} and vertex={vertex}")
    found = points(model)
    like = next(model.parameters(), None)
    for point in found:
        point.set(alpha if vertex is None else point.vertex(vertex, like), like)


@contextlib.contextmanager
def at(
    model: nn.Module, alpha: Tensor | list[float] | None = None, *, vertex: int | None = None
) -> Iterator[None]:
    """Fix the point of a model as :func:`set_point` does, within a ``with`` block.

    The point is the model's: other threads that call it meanwhile are at that point too.

    >>> from ensemblayers import SubspaceLinear
    >>> layer = SubspaceLinear(2, 2, n=2).eval()
    >>> with at(layer, [0.9, 0.1]):
    ...     layer.point.alpha
    tensor([0.9000, 0.1000])
    >>> layer.point.alpha
    tensor([0.5000, 0.5000])
    """
    before = [(point, point.fixed) for point in points(model)]
    try:
        set_point(model, alpha, vertex=vertex)
        yield
    finally:
        for point, fixed in before:
            point.fixed, point.mixes = fixed, {}
