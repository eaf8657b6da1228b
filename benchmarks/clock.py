"""Times of functions on a GPU, taken in turn, each from a CUDA graph and with a cold cache."""

import dataclasses
import statistics
from collections.abc import Callable
from time import perf_counter

import torch


@dataclasses.dataclass
class Time:
    """A function's median in milliseconds, and its ratio to the first function's."""

    ms: float
    ratio: tuple[float, float, float]  # median, quartiles
    graph: bool  # Whether it was replayed from a CUDA graph.


@dataclasses.dataclass
class Prepared:
    """A function, and what has to come before each replay of its graph, outside of the time."""

    call: Callable[[], object]
    before: Callable[[], object]

    def __call__(self) -> object:
        return self.call()


class Clock:
    """Times functions on a device.

    Args:
        device: a CUDA device, or a CPU for a rehearsal.
        rounds: how often each function is timed.
    """

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.cuda = device.type == "cuda"
        if self.cuda:
            size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
            self.cache = torch.empty(size, dtype=torch.int8, device=device)

    def race(self, functions: dict[str, Callable[[], object]]) -> dict[str, Time]:
        """Time functions in turn, round by round; the first is what the others compare with."""
        ready = {name: self._capture(f) for name, f in functions.items()}
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(self.rounds):
            for name, (call, graph) in ready.items():
                if graph and isinstance(functions[name], Prepared):
                    functions[name].before()
                times[name].append(self._once(call))
        first = next(iter(times.values()))
        found = {}
        for name, some in times.items():
            ratios = [a / b for a, b in zip(some, first, strict=True)]
            q1, q2, q3 = statistics.quantiles(ratios, method="inclusive")
            found[name] = Time(statistics.median(some), (q2, q1, q3), ready[name][1])
        return found

    def _capture(self, function: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        """A replay of the function from a CUDA graph, where it can be captured."""
        if not self.cuda:
            function()
            return function, False
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                function()
        except RuntimeError:
            torch.cuda.synchronize()
            return function, False
        return graph.replay, True

    def _once(self, call: Callable[[], object]) -> float:
        if not self.cuda:
            start = perf_counter()
            call()
            return (perf_counter() - start) * 1e3
        self.cache.zero_()  # What the last call left in the L2 cache goes.
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)
