"""Conversion of whole models: plain to ensemble, and back to plain networks."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from . import batch_ensemble, subspace
from ._assignment import Assigned
from ._init import check_sigma, vertices
from ._module import (
    check_module,
    check_no_ensemble,
    check_outermost,
    copy_module,
    forget_fast_path,
    own_parameters,
    restore_fast_path,
)
from .batch_ensemble import BatchEnsemble, BatchEnsembleLayer, Init, batch_ensemble_size
from .batch_ensemble_norm import TYPED_NORMS, BatchEnsembleNorm
from .functional import mix
from .simplex import (
    Point,
    check_member,
    check_n,
    drop_point_hooks,
    points,
    share_point,
    vertex_count,
)
from .stacked import StackedEnsemble
from .subspace import Subspace, SubspaceLayer

Where = Callable[[nn.Module, str], bool]


def to_subspace(
    model: nn.Module,
    *,
    n: int,
    sigma: float = 0.1,
    where: Where | None = None,
    opaque: tuple[type[nn.Module], ...] = (),
) -> nn.Module:
    """Turn a model into a subspace of n vertices; vertex 0 is the model itself.

    Linear layers and convolutions become the layers of this package, every other module that has
    parameters becomes a :class:`~ensemblayers.Subspace` of its class. All of them share one point,
    drawn before each forward pass of the model in training. Tied parameters stay tied, hooks stay
    in place, and a state_dict of the plain model loads with ``strict=True`` as vertex 0.

    Args:
        model: any module; it is not changed.
        n: number of vertices.
        sigma: vertex i > 0 starts as vertex 0 times N(1, sigma), elementwise; frozen parameters
            (requires_grad=False) are the same at all vertices.
        where: called with each module that has parameters and its name; False leaves it plain.
        opaque: classes whose forward reads its children's parameters instead of calling the
            children, as in ``F.linear(x, self.proj.weight)``. Below them, each module becomes a
            :class:`~ensemblayers.Subspace`, whose parameters read as their value at the point.

    Returns:
        A converted copy, of the model's own class (a subclass of it where the model itself has
        parameters).

    Raises:
        ValueError: n < 1, nothing to convert, a parameter tied across the filter, a StackedEnsemble
            inside, or modules that can't be converted, by name.

    >>> model = to_subspace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), n=3)
    >>> model[0].weight.shape
    torch.Size([3, 8, 4])
    """
    check_n(n)
    check_sigma(sigma)
    check_no_ensemble(model, StackedEnsemble)
    chosen = list(_chosen(model, where, SubspaceLayer))
    refused = {name or "the model": why for name, m in chosen if (why := subspace.why_not(m))}
    if refused:
        listed = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ValueError(f"can't convert {listed}. Leave them plain with where=")
    if not chosen:
        raise ValueError(
            f"expected a model with parameters to convert, got {type(model).__name__} with none "
            "(subspace layers and those that where= leaves out don't count)"
        )
    # A frozen parameter is the same at all vertices: nothing would train noise away.
    stacked = {
        p: nn.Parameter(
            vertices(p, n, sigma if p.requires_grad else 0.0), requires_grad=p.requires_grad
        )
        for p in dict.fromkeys(p for _, module in chosen for p in own_parameters(module).values())
    }
    _check_ties(model, {id(module) for _, module in chosen}, stacked)
    hidden = _below(model, opaque)
    converted = copy_module(model, stacked)
    for name, source in chosen:
        module = converted.get_submodule(name)
        typed = None if id(source) in hidden else _plain_layer(source, subspace.TYPED)
        module.__class__ = typed or subspace.class_for(source)
        module._attach(n, sigma)
    for module in converted.modules():
        forget_fast_path(module)
    share_point(converted)
    return converted


def to_batch_ensemble(
    model: nn.Module,
    *,
    n: int,
    rank: int = 1,
    init: Init = "random_sign",
    positive: float = 0.5,
    std: float = 0.5,
    train: Literal["split", "random", "repeat"] = "split",
    norms: Literal["shared", "member"] = "shared",
    where: Where | None = None,
    opaque: tuple[type[nn.Module], ...] = (),
) -> BatchEnsemble:
    """Turn a model into a BatchEnsemble of n members that share its weights.

    Linear layers and convolutions get fast weights and a bias per member; every other module is
    shared by the members. With ``r = s = 1`` (``init="ones"``) each member is the model itself:
    the start for a trained model, which random signs would undo. A state_dict of the plain model
    loads with ``strict=True`` and leaves r and s as they are. Frozen parameters
    (requires_grad=False) stay frozen, while r and s are trained always: freeze the model before
    the conversion to train the fast weights alone.

    Args:
        model: any module; it is not changed. Its tensors carry the batch in dimension 0.
        n: number of members.
        rank, init, positive, std: how many r and s a member has, and how they start: see
            :class:`~ensemblayers.BatchEnsembleLinear`.
        train: what each member sees in training: see :class:`~ensemblayers.BatchEnsemble`.
        norms: ``"member"`` gives each member its own BatchNorm, parameters and statistics; then
            ``members=`` is for evaluation alone.
        where: called with each layer and its name; False leaves it shared.
        opaque: classes whose forward reads its children's parameters instead of calling the
            children, as in ``F.linear(x, self.proj.weight)``; what is below them stays shared.

    Returns:
        A :class:`~ensemblayers.BatchEnsemble` of a converted copy.

    Raises:
        ValueError: n < 1, no layer to convert, a layer that takes the batch in dimension 1, a
            BatchEnsemble or StackedEnsemble inside, or norms of each member with
            ``train="random"``, which has no batch of a member.

    Warns:
        UserWarning: names the layers with weights that stay shared: subclasses of linear layers
            and convolutions, parametrized ones, attention and recurrent layers; with
            ``norms="member"`` also lazy and synchronised BatchNorm and subclasses of it.

    >>> import torch
    >>> model = to_batch_ensemble(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), n=4)
    >>> model.eval()(torch.zeros(10, 4)).shape
    torch.Size([4, 10, 2])
    """
    check_n(n)
    check_no_ensemble(model)
    if norms not in ("shared", "member"):
        raise ValueError(f"expected norms to be shared or member, got norms={norms!r}")
    if norms == "member" and train == "random":
        raise ValueError("expected train='split' or 'repeat' with norms='member', got 'random'")
    time_first = [name for name, m in model.named_modules() if _takes_time_first(m)]
    if time_first:
        raise ValueError(
            f"expected the batch in dimension 0, got batch_first=False in {', '.join(time_first)}"
        )
    hidden = _below(model, opaque)
    wanted = _HOLDS_MATRICES + ((_BatchNorm,) if norms == "member" else ())
    done = (BatchEnsembleLayer, BatchEnsembleNorm)
    layers, own_norms, shared = [], [], []
    for name, module in model.named_modules():
        if not isinstance(module, wanted) or isinstance(module, done):
            continue
        if where is not None and not where(module, name):
            continue
        if id(module) not in hidden and _plain_layer(module, batch_ensemble.TYPED):
            layers.append(name)
        elif id(module) not in hidden and _is_plain_norm(module):
            own_norms.append(name)
        else:
            shared.append(f"{name or 'the model'} ({type(module).__name__})")
    if not layers:
        raise ValueError(
            "expected a model with linear layers or convolutions to convert, got "
            + (f"only what stays shared: {', '.join(shared)}" if shared else "none")
        )
    if shared:
        warnings.warn(f"shared by all members as they are: {', '.join(shared)}", stacklevel=2)
    of_members = {
        tensor: nn.Parameter(tensor.detach().repeat(n, 1), requires_grad=tensor.requires_grad)
        for name in layers + own_norms
        for kind, tensor in own_parameters(model.get_submodule(name)).items()
        if kind == "bias" or name in own_norms
    }
    _check_ties(model, {id(model.get_submodule(name)) for name in layers + own_norms}, of_members)
    converted = copy_module(model, of_members)
    for norm in map(converted.get_submodule, own_norms):
        norm.__class__ = TYPED_NORMS[type(norm)]
        norm._attach(n)
    for layer in map(converted.get_submodule, layers):
        layer.__class__ = batch_ensemble.TYPED[type(layer)]
        dd = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        layer._attach(n, dd, rank=rank, init=init, positive=positive, std=std)
        layer.reset_fast_weights()
    for module in converted.modules():
        forget_fast_path(module)
        if isinstance(module, nn.TransformerEncoder) and "_plain_nested" not in vars(module):
            # A nested tensor, which a padding mask brings about, can't be shared out to members.
            module._plain_nested, module.use_nested_tensor = module.use_nested_tensor, False
    return BatchEnsemble(converted, train=train)


def to_stacked(model: nn.Module, *, n: int, reset: bool = False) -> StackedEnsemble:
    """Turn a model into a vanilla ensemble of n members.

    Args:
        model: any module; it is not changed.
        n: number of members.
        reset: False: each member is a copy of the model. True: member 0 is, the others are
            initialised anew by their modules' ``reset_parameters``.

    Raises:
        ValueError: n < 1; with ``reset``, parameters of modules without ``reset_parameters``.

    >>> import torch
    >>> to_stacked(nn.Linear(4, 2), n=5)(torch.zeros(10, 4)).shape
    torch.Size([5, 10, 2])
    """
    check_n(n)
    check_module(model)
    ensemble = StackedEnsemble([model] * n)
    if reset:
        ensemble.reset_parameters(range(1, n))
    return ensemble


def collapse(model: nn.Module) -> nn.Module:
    """The plain network at a subspace's point, of plain classes only.

    The point is the one that was set, else the midpoint, in training too: the network that
    predicts. The model is not changed.

    Raises:
        ValueError: no subspace layers, or a point per example.

    >>> layer = to_subspace(nn.Linear(4, 2), n=3)
    >>> type(collapse(layer))
    <class 'torch.nn.modules.linear.Linear'>
    """
    return _at_points(model, lambda p, like: p.midpoint(like) if p.fixed is None else p.fixed)


def member(model: nn.Module, i: int) -> nn.Module:
    """Member i of an ensemble of any kind, as a plain network of its own.

    Args:
        model: a subspace (the member is vertex i), a BatchEnsemble or a StackedEnsemble.
        i: from 0; negative counts from the end.

    Raises:
        ValueError: no ensemble, or no such member.

    >>> from ensemblayers import BatchEnsembleLinear
    >>> member(BatchEnsembleLinear(4, 2, n=3), 2)
    Linear(in_features=4, out_features=2, bias=True)
    """
    if isinstance(model, StackedEnsemble):
        return model.member(i)
    if isinstance(model, BatchEnsemble):
        model = model.module
    check_outermost(model)
    if any(isinstance(m, BatchEnsembleLayer) for m in model.modules()):
        return _batch_ensemble_member(model, i)
    if not any(isinstance(m, SubspaceLayer) for m in model.modules()):
        raise ValueError(
            "expected an ensemble (subspace or BatchEnsemble layers, or a StackedEnsemble), "
            f"got {type(model).__name__}"
        )
    vertex_count(model)
    return _at_points(model, lambda point, like: point.vertex(i, like))


def param_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    lr: float | None = None,
    fast_lr_multiplier: float = 1.0,
) -> list[dict[str, Any]]:
    """Share out a model's parameters to optimizer groups: with weight decay, and without.

    Without decay are BatchEnsemble's r and s, biases, the parameters of norms, and whatever has at
    most one dimension in one member. Each parameter is in exactly one group.

    Args:
        model: an ensemble of any kind, or a plain module.
        weight_decay: of the first group.
        lr: learning rate of the groups; None leaves it to the optimizer.
        fast_lr_multiplier: with another than 1, r and s are a third group, of the learning rate
            ``lr * fast_lr_multiplier``.

    Raises:
        ValueError: a multiplier without ``lr``.

    >>> from ensemblayers import BatchEnsembleLinear
    >>> [len(group["params"]) for group in param_groups(BatchEnsembleLinear(4, 2, n=3), 1e-4)]
    [1, 3]
    """
    check_module(model)
    if fast_lr_multiplier != 1 and lr is None:
        raise ValueError(f"expected lr with fast_lr_multiplier={fast_lr_multiplier}, got none")
    stacked = {
        id(p)
        for m in model.modules()
        if isinstance(m, SubspaceLayer)
        for p in m._parameters.values()
    }
    stacked |= {
        id(p) for m in model.modules() if isinstance(m, StackedEnsemble) for p in m.parameters()
    }
    decay: dict[Tensor, None] = {}
    spared: dict[Tensor, None] = {}
    fast: dict[Tensor, None] = {}
    for module in model.modules():
        for name, p in own_parameters(module).items():
            if isinstance(module, BatchEnsembleLayer) and name in ("r", "s"):
                fast[p] = None
                continue
            vector = p.dim() - (id(p) in stacked) <= 1
            spare = vector or "bias" in name or isinstance(module, _NORMS)
            (spared if spare else decay)[p] = None
    own_rate = fast_lr_multiplier != 1
    if not own_rate:
        spared |= fast
    rate = {} if lr is None else {"lr": lr}
    groups = [
        {"params": [p for p in decay if p not in spared], "weight_decay": weight_decay, **rate},
        {"params": list(spared), "weight_decay": 0.0, **rate},
    ]
    if own_rate:
        groups.append({"params": list(fast), "weight_decay": 0.0, "lr": lr * fast_lr_multiplier})
    return groups


_NORMS = subspace.CHANNEL_NORMS + subspace.TRAILING_NORMS
_HOLDS_MATRICES = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.RNNBase)
_HOLDS_MATRICES += (nn.RNNCellBase, nn.Bilinear)


def _chosen(
    model: nn.Module, where: Where | None, done: type[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters of their own that the filter lets through, less those done."""
    for name, module in model.named_modules():
        if isinstance(module, done) or not own_parameters(module):
            continue
        if where is None or where(module, name):
            yield name, module


# Known classes of this kind, by name: torchvision is optional.
_OPAQUE = {
    f"torchvision.models.{name}"
    for name in (
        "swin_transformer.ShiftedWindowAttention",
        "swin_transformer.ShiftedWindowAttentionV2",
        "video.swin_transformer.ShiftedWindowAttention3d",
    )
}


def _below(model: nn.Module, opaque: tuple[type[nn.Module], ...]) -> set[int]:
    """The ids of the modules below those whose forward reads its children's parameters."""
    return {
        id(child)
        for module in model.modules()
        if isinstance(module, opaque)
        or any(f"{c.__module__}.{c.__qualname__}" in _OPAQUE for c in type(module).__mro__)
        for child in module.modules()
        if child is not module
    }


def _plain_layer(
    module: nn.Module, typed: dict[type[nn.Module], type[nn.Module]]
) -> type[nn.Module] | None:
    """The ensemble layer for a module of exactly a class of torch.nn, with nothing added to it."""
    bare = set(module._parameters) == {"weight", "bias"} and not module._buffers
    bare = bare and "forward" not in vars(module)
    return typed.get(type(module)) if bare and not module._modules else None


def _is_plain_norm(module: nn.Module) -> bool:
    return type(module) in TYPED_NORMS and "forward" not in vars(module)


def _check_ties(model: nn.Module, chosen: set[int], stacked: dict[Tensor, nn.Parameter]) -> None:
    for name, module in model.named_modules():
        for own, p in own_parameters(module).items():
            if id(module) not in chosen and p in stacked:
                raise ValueError(
                    f"{name}.{own} is tied to a parameter that is converted, but is left out itself"
                )


def _takes_time_first(module: nn.Module) -> bool:
    kinds = (nn.MultiheadAttention, nn.RNNBase)
    return isinstance(module, kinds) and not module.batch_first


def _at_points(model: nn.Module, alpha_of: Callable[[Point, Tensor], Tensor]) -> nn.Module:
    """The plain copy of a subspace model with each layer at ``alpha_of(its point, a tensor)``."""
    points(model)
    plain = {}
    for module in model.modules():
        if isinstance(module, SubspaceLayer):
            for p in own_parameters(module).values():
                alpha = alpha_of(module.subspace_point, p)
                if alpha.dim() != 1:
                    raise ValueError(
                        f"expected one point for all examples, got alpha {list(alpha.shape)}"
                    )
                mixed = mix(p.detach(), alpha.detach())
                plain[p] = nn.Parameter(mixed, requires_grad=p.requires_grad)
    copied = copy_module(model, plain)
    for module in copied.modules():
        drop_point_hooks(module)
        restore_fast_path(module)
        if isinstance(module, SubspaceLayer):
            del module.subspace_point, module.subspace_sigma
            kind = module.subspace_kind if isinstance(module, Subspace) else module.plain_class
            module.__class__ = kind
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
    return copied


def _batch_ensemble_member(model: nn.Module, i: int) -> nn.Module:
    i = check_member(i, batch_ensemble_size(model))
    if any(isinstance(m, Assigned) and isinstance(m, SubspaceLayer) for m in model.modules()):
        model = collapse(model)  # A subspace of BatchEnsembles: the member at its point.
    copied = copy_module(model)
    for module in copied.modules():
        restore_fast_path(module)
        if "_plain_nested" in vars(module):
            module.use_nested_tensor = vars(module).pop("_plain_nested")
        if isinstance(module, BatchEnsembleLayer):
            weight, bias = module._member_weight(i).detach(), module.bias
            module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
            if bias is not None:
                module.bias = nn.Parameter(bias.detach()[i].clone(), bias.requires_grad)
            module._detach()
            module.__class__ = module.plain_class
        elif isinstance(module, BatchEnsembleNorm):
            module._detach(i)
            module.__class__ = module.plain_class
    return copied
