"""How an operation of raw forward and backward kernels takes part in autograd and its transforms.

The kernels are registered with torch as opaque operations (for a CPU, for CUDA, and for tensors
without data), so that torch.compile and torch.export carry them along. Around them stands an
``autograd.Function``, and another one around its backward pass for the second derivative:
``torch.library.register_autograd`` would compose neither with that nor with ``torch.func``.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from .._transforms import transformed

LIBRARY = torch.library.Library("ensemblayers", "FRAGMENT")


def define(schema: str, *, plain: Callable, cuda: Callable, fake: Callable) -> Callable:
    """Register a raw operation and return it.

    Args:
        schema: torch's, from the name on.
        plain: the definition, in plain PyTorch; what runs on a CPU.
        cuda: what runs on CUDA.
        fake: shapes, strides and dtypes of the outputs.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, plain, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"ensemblayers::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.ensemblayers, name).default


def differentiable(
    forward: Callable, backward: Callable, plain: Callable, plain_backward: Callable
) -> Callable:
    """Make a differentiable function of the raw operations, ``f(*inputs) -> output``.

    Args:
        forward: ``(*inputs, keep) -> (output, *kept)``; kept is for the backward pass, where
            ``keep`` says that there may be one, and not differentiable.
        backward: ``(grad, *inputs, *kept, needs) -> gradients``, one an input, whatever where its
            flag in ``needs`` is False; inputs that can't have one, such as indices, come last and
            are left out.
        plain: forward, in plain PyTorch; takes its place where torch.vmap has to look inside.
        plain_backward: the same for backward, and what is differentiated for the second derivative.
    """

    def run_backward(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(backward(grad, *rest))

    def keep_inputs(ctx, arguments, output) -> None:
        *tensors, needs = arguments
        ctx.save_for_backward(*tensors)
        ctx.needs = needs

    def second_derivative(ctx, *grads: Tensor):
        tensors, needs = ctx.saved_tensors, ctx.needs
        # Neither no tensor (no bias) nor an index is an argument of a transform.
        present = [k for k, t in enumerate(tensors) if t is not None and t.is_floating_point()]

        def of_present(*some: Tensor):
            every = list(tensors)
            for k, t in zip(present, some, strict=True):
                every[k] = t
            return plain_backward(*every, needs)

        _, pull = torch.func.vjp(of_present, *(tensors[k] for k in present))
        found = dict(zip(present, pull(tuple(grads)), strict=True))
        return *(found.get(k) for k in range(len(tensors))), None

    class Backward(Function):
        forward = staticmethod(run_backward)
        setup_context = staticmethod(keep_inputs)
        backward = staticmethod(second_derivative)

        @staticmethod
        def vmap(info, in_dims, *arguments):
            return _vmap(plain_backward, info, in_dims, arguments)

    EagerBackward = _eager(Backward)

    def keep_for_backward(ctx, arguments, outputs) -> None:
        *inputs, _ = arguments
        ctx.save_for_backward(*inputs, *outputs[1:])
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.count = len(inputs)

    def derivative(ctx, grad: Tensor, *_: Any):
        needs = [bool(need) for need in ctx.needs_input_grad[: ctx.count]]
        if torch.compiler.is_compiling():  # Which knows no second derivative.
            found = backward(grad, *ctx.saved_tensors, needs)
        else:
            found = _twin(Backward, EagerBackward).apply(grad, *ctx.saved_tensors, needs)
        # An index needs none.
        wanted = itertools.zip_longest(found, needs)
        return *(g if need else None for g, need in wanted), None

    class Forward(Function):
        setup_context = staticmethod(keep_for_backward)
        backward = staticmethod(derivative)

        @staticmethod
        def forward(*arguments):
            return tuple(forward(*arguments))

        @staticmethod
        def vmap(info, in_dims, *arguments):
            return _vmap(plain, info, in_dims, arguments)

    EagerForward = _eager(Forward)

    def function(*inputs: Tensor | None) -> Tensor:
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if not (keep or transformed()):
            return forward(*inputs, False)[0]
        return _twin(Forward, EagerForward).apply(*inputs, keep)[0]

    return function


def _twin(function: type[Function], eager: type[Function]) -> type[Function]:
    """In plain eager mode the older form of a Function, which costs half as much a call."""
    return function if torch.compiler.is_compiling() or transformed() else eager


def _eager(function: type[Function]) -> type[Function]:
    class Eager(Function):
        @staticmethod
        def forward(ctx, *arguments):
            outputs = function.forward(*arguments)
            function.setup_context(ctx, arguments, outputs)
            return outputs

        backward = staticmethod(function.backward)

    return Eager


def _vmap(plain: Callable, info, in_dims, arguments):
    """Map the definition: the transform sees through it, as it can't through a kernel."""
    *tensors, flag = arguments
    dims = in_dims[: len(tensors)]

    def with_flag(*some: Tensor):
        return tuple(plain(*some, flag))

    outputs = torch.vmap(with_flag, dims, randomness=info.randomness)(*tensors)
    return outputs, (0,) * len(outputs)
