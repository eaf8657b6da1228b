"""The member of each row of a batch that is not member-major: what a call tells its layers."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_engine = torch.autograd.Variable._execution_engine


class Assignment:
    """The index ``[B]`` of a call's members, which all layers of a model read.

    It is in force while the call runs, and again in the backward pass, where activation
    checkpointing runs layers anew: from the moment when that reaches the call's outputs. In eager
    mode a layer also looks up in which call the node was made that is at work, by its number:
    between the calls of several forward passes, and where a loss does not come from the outputs.

    ``members`` is a plain attribute so that what torch.compile made of a layer can guard on it:
    within a checkpoint that is not compiled itself, such a layer goes by the outputs alone.
    """

    def __init__(self) -> None:
        self.members: Tensor | None = None
        self._running = False
        self._last: _Call | None = None
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()  # As long as their graphs.
        self._task = -1  # The backward pass that reached a call, and this call.
        self._reached: _Call | None = None

    def __reduce__(self) -> tuple[type, tuple]:
        return Assignment, ()  # A copy has had no calls.

    def run(self, members: Tensor | None, function: Callable[..., Any], *args, **kwargs) -> Any:
        """Call a function whose layers are to read ``members``."""
        traced = torch.compiler.is_compiling()
        if not (traced or self._running) and _backward_pass() == -1:
            self._release()  # A backward pass that failed did not.
        call = None if traced else _Call(self, members)
        before = self.members, self._running
        self.members, self._running = members, True
        try:
            outputs = function(*args, **kwargs)
        finally:
            self.members, self._running = before
        if call is not None and torch.is_grad_enabled() and (members is not None or self._last):
            self._keep(call, outputs)
        return outputs

    def current(self) -> Tensor | None:
        """The index in force, for a layer that runs now.

        Raises:
            RuntimeError: in a backward pass, a part of a call whose index is not known any more.
        """
        if torch.compiler.is_compiling() or self._running:
            return self.members
        if self._last is None and self._reached is None:
            return None
        task = _backward_pass()
        if task == -1:
            self._release()
        elif self._task in (-1, task):
            self._reach(self._find())
        # Else it is a backward pass within one, for a part with checkpoints that was run again.
        return self.members

    def _keep(self, call: "_Call", outputs: Any) -> None:
        call.end = torch.autograd._get_sequence_nr()
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(call)
        if _backward_pass() == -1:  # Another thread's nodes have numbers of their own.
            self._last = call
            self._calls.add(call)

    def _find(self) -> "_Call | None":
        """The call that made the node at work; None for layers that were called directly."""
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        for call in self._known():
            if call.begin <= number < call.end:
                return call
        if self._last is not None and 0 <= number < self._last.begin:
            raise RuntimeError(
                "expected the backward pass of a checkpointed model before its next call with "
                "members: the member of each row of the earlier call is not known any more"
            )
        return None

    def _known(self) -> Iterator["_Call"]:
        yield from filter(None, (self._reached, self._last))
        yield from self._calls

    def _reach(self, call: "_Call | None") -> None:
        """Put a call's index in force.

        Raises:
            RuntimeError: the index was changed since.
        """
        if call is not None and call.version != call._version():
            raise RuntimeError(
                "expected members as they were in the forward pass, got them changed in place; "
                "pass a copy"
            )
        task = _backward_pass()
        if self._task != task:
            self._task = task
            _engine.queue_callback(self._release)
        self._reached = call
        self.members = None if call is None else call.members

    def _release(self) -> None:
        self.members, self._reached, self._task = None, None, -1


class _Call:
    """A call's index and the numbers of the nodes that it made, from ``begin`` to ``end``."""

    def __init__(self, assignment: Assignment, members: Tensor | None) -> None:
        self.assignment, self.members = assignment, members
        self.begin = self.end = torch.autograd._get_sequence_nr()
        self.version = self._version()

    def _version(self) -> int | None:
        tracked = self.members is not None and not self.members.is_inference()
        return self.members._version if tracked else None

    def __call__(self, grads: tuple) -> None:
        """Hook of the outputs' nodes, before they run in the backward pass."""
        self.assignment._reach(self)


def _backward_pass() -> int:
    """The number of the backward pass that this thread runs, or -1."""
    return torch._C._current_graph_task_id()


class Assigned(nn.Module):
    """A layer that has to know the member of each example."""

    assignment: Assignment | None = None

    @property
    def members(self) -> Tensor | None:
        """The member of each example, where the batch is not member-major."""
        return None if self.assignment is None else self.assignment.current()
