"""Forward and backward pass on CUDA as a graph: for networks this small, launches are the cost."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

WARM_UP = 3  # Calls before the capture: libraries set themselves up in them.


class GraphedBackward:
    """Gradients of a loss of batches, by a CUDA graph for each shape of batch that comes back.

    The parameters must stay where they are in memory, and so must the model's mode; their values
    may change. Each call gives the parameters' ``grad`` anew.

    Args:
        loss: the loss of a batch, ``(x, y)`` to a scalar, with nothing in it that waits for the
            device.
        parameters: those that the loss has gradients for.
    """

    def __init__(
        self, loss: Callable[[Tensor, Tensor], Tensor], parameters: Iterable[nn.Parameter]
    ) -> None:
        self.loss = loss
        self.parameters = list(parameters)
        self.calls: dict[tuple, int] = {}
        self.graphs: dict[tuple, tuple] = {}

    def __call__(self, x: Tensor, y: Tensor) -> None:
        shape = (x.shape, x.dtype, y.shape)
        self.calls[shape] = self.calls.get(shape, 0) + 1
        if self.calls[shape] <= WARM_UP:
            _aside(lambda: self._backward(x, y))
            return
        if shape not in self.graphs:
            static = (x.clone(), y.clone())
            replay = _captured(lambda: self._backward(*static))
            self.graphs[shape] = (*static, replay, [p.grad for p in self.parameters])
        x_static, y_static, replay, grads = self.graphs[shape]
        x_static.copy_(x)
        y_static.copy_(y)
        replay()
        for p, g in zip(self.parameters, grads, strict=True):
            p.grad = g

    def _backward(self, x: Tensor, y: Tensor) -> None:
        # New gradients each time: in a capture they become memory of the graph.
        for p in self.parameters:
            p.grad = None
        self.loss(x, y).backward()


def _aside(call: Callable[[], None]) -> None:
    """Run on another stream than the default one, which a capture can't follow."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """Capture a call as a CUDA graph; return what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
