"""BatchNorm folded into the BatchEnsemble layers before it, for evaluation."""

import inspect

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._module import check_module, copy_module
from .batch_ensemble import (
    BatchEnsemble,
    BatchEnsembleLayer,
    BatchEnsembleLinear,
    batch_ensemble_size,
)
from .batch_ensemble_norm import BatchEnsembleNorm, scale_and_shift


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = isinstance(m, (BatchEnsembleLayer, BatchEnsembleNorm, _FoldedNorm1d))
        return own or super().is_leaf_module(m, module_qualified_name)


def fold_norms(model: nn.Module) -> nn.Module:
    """Fold each BatchNorm of a BatchEnsemble in evaluation into the layer whose output it takes.

    ``(y * s + bias - mean) / std * weight + bias'`` is one scale and one shift of y, a member's
    channel each: they become the layer's s and bias, and the norm an nn.Identity. The layers are
    found by torch.fx, which has to be able to trace the model. A norm stays where another module
    takes the layer's output too, where either is called more than once or has hooks, and without
    running statistics. In the place of a BatchNorm1d behind a linear layer stands a module that
    takes ``[rows, channels]`` alone: in ``[rows, C, L]`` the norm's channels are not the layer's.

    Args:
        model: a model with BatchEnsemble layers, in evaluation mode; it is not changed.

    Returns:
        A copy, for evaluation only: its batch statistics are constants.

    Raises:
        ValueError: a model without BatchEnsemble layers, in training mode, or that torch.fx can't
            trace.

    >>> from ensemblayers import to_batch_ensemble
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> fold_norms(to_batch_ensemble(net, n=4).eval()).module[1]
    Identity()
    """
    check_module(model)
    batch_ensemble_size(model)
    if any(m.training for m in model.modules()):
        raise ValueError("expected a model in evaluation mode, got one in training; call .eval()")
    folded = copy_module(model)
    inner = folded.module if isinstance(folded, BatchEnsemble) else folded
    for layer_name, norm_name in _pairs(inner):
        layer, norm = inner.get_submodule(layer_name), inner.get_submodule(norm_name)
        _fold(layer, norm)
        parent, _, name = norm_name.rpartition(".")
        linear = isinstance(layer, BatchEnsembleLinear)
        rest = _FoldedNorm1d() if linear else nn.Identity()
        setattr(inner.get_submodule(parent), name, rest.eval())
    return folded


class _FoldedNorm1d(nn.Identity):
    """What is left of a BatchNorm1d behind a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError(
                f"a BatchNorm1d was folded into the linear layer before it, which is right for "
                f"[rows, channels] alone, got {list(x.shape)}; use the model without fold_norms"
            )
        return x


def _pairs(model: nn.Module) -> list[tuple[str, str]]:
    """The names of the layers and norms that follow each other and nothing else.

    With optional arguments left out and with them given, as far as torch.fx can trace the two: it
    can't where a given one decides on a branch.
    """
    parameters = inspect.signature(model.forward).parameters
    left_out = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    found, error = [], None
    for concrete in (left_out, {}) if left_out else ({},):
        try:
            found.append(_pairs_of(model, _Tracer().trace(model, concrete_args=concrete)))
        except Exception as caught:  # As many kinds as there is code.
            error = caught
    if not found and error:
        kind = type(model).__name__
        raise ValueError(
            f"expected a model that torch.fx can trace, got {kind}: {error}"
        ) from error
    return [pair for pair in found[0] if all(pair in other for other in found)]


def _pairs_of(model: nn.Module, graph: fx.Graph) -> list[tuple[str, str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    calls: dict[int, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            called = id(modules[node.target])
            calls[called] = calls.get(called, 0) + 1
    found = []
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(modules[node.target], _BatchNorm):
            continue
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        layer, norm = modules[before.target], modules[node.target]
        once = calls[id(layer)] == calls[id(norm)] == 1
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (layer, norm))
        if once and not hooked and _folds(layer, norm):
            found.append((before.target, node.target))
    return found


def _folds(layer: nn.Module, norm: _BatchNorm) -> bool:
    """Whether a layer is a BatchEnsemble's, and its outputs are the norm's channels."""
    if not isinstance(layer, BatchEnsembleLayer) or norm.running_mean is None:
        return False
    if isinstance(layer, BatchEnsembleLinear) and not isinstance(norm, nn.BatchNorm1d):
        return False
    return norm.num_features == layer.s.shape[-1]


@torch.no_grad()
def _fold(layer: BatchEnsembleLayer, norm: _BatchNorm) -> None:
    scale, shift = (t.expand(layer.n, -1).to(layer.s.dtype) for t in scale_and_shift(norm))
    shift = shift if layer.bias is None else layer.bias * scale + shift
    of_pairs = scale if layer.rank == 1 else scale.unsqueeze(1)
    layer.s = _constant(layer.s * of_pairs)
    layer.bias = _constant(shift.clone())


def _constant(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
