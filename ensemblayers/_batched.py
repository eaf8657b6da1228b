"""Stacked networks of linear and elementwise layers, each layer called once for all members.

On a CPU this is the fastest way to run them: one batched product in place of n, and a weight's
gradient is computed where it stays. Measured (benchmarks/results), vmap is slower than a loop.
"""

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from . import functional

_ELEMENTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU)
_ELEMENTWISE += (nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid)
_ELEMENTWISE += (nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.Dropout)


def batched_layers(model: nn.Module, x: Tensor) -> list[nn.Module] | None:
    """A stacked model's layers in their order, if all of them can take n batches at once.

    They can if the model is a linear layer, or nested ``nn.Sequential`` of linear and elementwise
    layers, dropout and a flattening of all but the batch, exactly of torch.nn's classes and
    without hooks, and x is what its first linear layer takes.
    """
    layers: list[nn.Module] = []
    if _has_any_global_hook() or not _collect(model, layers):
        return None
    for layer in layers:
        if type(layer) is nn.Linear:
            weight = _tensor(layer, "weight")
            return layers if weight.is_cpu and weight.dtype == x.dtype else None
        if getattr(layer, "inplace", False):
            return None
    return None


def _collect(module: nn.Module, layers: list[nn.Module]) -> bool:
    own = vars(module)
    if (
        "forward" in own
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    ):
        return False
    kind = type(module)
    if kind is nn.Sequential:
        for child in own["_modules"].values():
            if not _collect(child, layers):
                return False
        return True
    layers.append(module)
    if kind is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    return kind is nn.Linear or kind in _ELEMENTWISE


def _tensor(layer: nn.Linear, name: str) -> Tensor | None:
    found = layer._parameters.get(name)  # Faster than the attribute, which may be no parameter.
    return getattr(layer, name) if found is None else found


def run_batched(layers: list[nn.Module], x: Tensor, n: int, shared: bool) -> Tensor | None:
    """Outputs ``[n, B, ...]`` for x ``[B, ...]``, shared, or ``[n, B, ...]``.

    None where a linear layer gets what it does not take: a member has the error to show for it.
    """
    for layer in layers:
        if type(layer) is nn.Linear:
            weight, bias = _tensor(layer, "weight"), _tensor(layer, "bias")
            if x.dim() + shared < 2 or x.shape[-1] != weight.shape[-1]:
                return None
            x = functional.stacked_linear(x, weight, bias, shared=shared)
            shared = False
        elif type(layer) is nn.Flatten:
            x = x.flatten(1 if shared else 2)
        elif shared and type(layer) is nn.Dropout and layer.training:
            x, shared = layer(x.expand(n, *x.shape)), False
        else:
            x = layer(x)
    return x
