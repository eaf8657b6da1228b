"""Whether an input is one batch for all members or one batch a member, by its first layer."""

import inspect
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

# What keeps an input's shape, or at least takes batches of one dimension more or less alike.
_KEEPING = (nn.Identity, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.BatchNorm1d)
_KEEPING += (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU, nn.Softmax, nn.LogSoftmax)
_KEEPING += (nn.ReLU, nn.ReLU6, nn.RReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU)
_KEEPING += (nn.SiLU, nn.Mish, nn.Tanh, nn.Tanhshrink, nn.Sigmoid, nn.LogSigmoid, nn.Softplus)
_KEEPING += (nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Hardtanh, nn.Hardswish)
_KEEPING += (nn.Hardsigmoid, nn.Threshold)
_KEEPING_FUNCTIONS = {F.dropout, F.relu, F.gelu, F.silu, torch.relu, torch.tanh, torch.sigmoid}
_KEEPING_METHODS = {"relu", "tanh", "sigmoid", "clone", "contiguous", "float", "double", "to"}

# What takes batches of k + 2 dimensions, space in the last k, and no others.
_NAMES = ("Conv", "ConvTranspose", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool")
_NAMES += ("LPPool", "InstanceNorm", "ReflectionPad", "ReplicationPad", "CircularPad")
_SPATIAL = {k: tuple(getattr(nn, f"{name}{k}d") for name in _NAMES) for k in (1, 2, 3)}
_SPATIAL[2] += (nn.BatchNorm2d,)
_SPATIAL[3] += (nn.BatchNorm3d,)

# What takes batches of sequences of vectors.
_SEQUENCES = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)
_SEQUENCES += (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_SEQUENCES += (nn.TransformerDecoder, nn.TransformerDecoderLayer)

_DIMS = {**{classes: k + 2 for k, classes in _SPATIAL.items()}, _SEQUENCES: 3}
_DECISIVE = (nn.Linear, *(c for classes in _DIMS for c in classes))


@dataclass(frozen=True)
class FirstLayer:
    """What the layer that a model's first argument reaches first tells about that argument.

    Args:
        argument: its name.
        dims: the dimensions of a batch, if the layer takes no others.
        features: in the last dimension, for a linear layer.
        flat: whether all dimensions but the batch's were flattened before.
    """

    argument: str
    dims: int | None = None
    features: int | None = None
    flat: bool = False

    def takes_own_batches(self, shape: torch.Size) -> bool | None:
        """Whether an input ``[n, ...]`` is one batch a member; None: it could be either."""
        if self.flat:
            return math.prod(shape[1:]) != self.features == math.prod(shape[2:])
        if self.dims is not None:
            return len(shape) == self.dims + 1
        return None if len(shape) == 3 and shape[-1] == self.features else False


def first_layer(model: nn.Module) -> FirstLayer | None:
    """The first layer that tells something, or None.

    It is found by torch.fx, which calls the model's forward with symbols in place of tensors; there
    is none if torch.fx can't trace that, or if other code or layers change the input before.
    """
    try:
        return _find(model)
    except Exception:  # Code that torch.fx can't trace fails in as many ways as there is code.
        return None


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _DECISIVE) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m, forward, args, kwargs):
        return super().call_module(m, m.forward, args, kwargs)  # Without the module's hooks.


def _find(model: nn.Module) -> FirstLayer | None:
    parameters = inspect.signature(model.forward).parameters
    tracer = _Tracer()
    if tracer.is_leaf_module(model, ""):
        layer = isinstance(model, _DECISIVE)
        return _told_by(model, next(iter(parameters)), flat=False) if layer else None
    defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    graph = tracer.trace(model, concrete_args=defaults)
    modules = dict(model.named_modules(remove_duplicate=False))
    argument = next(node for node in graph.nodes if node.op == "placeholder")
    reached = [(node, False) for node in argument.users]
    for node, flat in reached:
        layer = modules[node.target] if node.op == "call_module" else None
        if isinstance(layer, _DECISIVE):
            return _told_by(layer, argument.target, flat)
        if _flattens(node, layer):
            reached += [(user, True) for user in node.users]
        elif _keeps(node, layer):
            reached += [(user, flat) for user in node.users]
    return None


def _told_by(layer: nn.Module, argument: str, flat: bool) -> FirstLayer | None:
    if isinstance(layer, nn.Linear):
        return FirstLayer(argument, features=layer.in_features, flat=flat)
    dims = next((d for classes, d in _DIMS.items() if isinstance(layer, classes)), None)
    return None if flat else FirstLayer(argument, dims=dims)


def _keeps(node: fx.Node, layer: nn.Module | None) -> bool:
    if node.op == "call_method":
        return node.target in _KEEPING_METHODS
    return isinstance(layer, _KEEPING) or node.target in _KEEPING_FUNCTIONS


def _flattens(node: fx.Node, layer: nn.Module | None) -> bool:
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    flatten = node.target == ("flatten" if node.op == "call_method" else torch.flatten)
    return flatten and (node.args[1:] == (1,) or node.kwargs == {"start_dim": 1})
