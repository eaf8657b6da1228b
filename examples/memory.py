"""Replay buffers: a few examples of each task, or a sample of the whole stream."""

import torch
from torch import Tensor


class Memory:
    """Examples kept of the tasks so far, in the order of the tasks.

    Args:
        generator: draws the replayed examples.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.tasks: list[tuple[Tensor, Tensor]] = []

    def store(self, x: Tensor, y: Tensor) -> None:
        """Keep examples of the task that was just learned."""
        self.tasks.append((x, y))

    def past(self) -> tuple[Tensor, Tensor]:
        """All examples of the tasks before the last one."""
        x, y = zip(*self.tasks[:-1], strict=True)
        return torch.cat(x), torch.cat(y)

    def current(self) -> tuple[Tensor, Tensor]:
        """The examples of the last task."""
        return self.tasks[-1]

    def sample(self, size: int) -> tuple[Tensor, Tensor]:
        """Random examples of all tasks, without replacement, at most as many as there are."""
        x, y = (torch.cat(part) for part in zip(*self.tasks, strict=True))
        index = torch.randperm(len(x), generator=self.generator)[:size].to(x.device)
        return x[index], y[index]

    def __len__(self) -> int:
        return sum(len(y) for _, y in self.tasks)


class Reservoir:
    """A uniform sample of a stream of examples, of a fixed size (Vitter 1985, algorithm R).

    Args:
        capacity: number of examples that it holds.
        generator: draws which examples are kept, and which are replayed.
    """

    def __init__(self, capacity: int, generator: torch.Generator) -> None:
        self.capacity = capacity
        self.generator = generator
        self.seen = 0
        self.x: Tensor | None = None
        self.y: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Show it the next examples of the stream."""
        if self.x is None:
            self.x, self.y = (part.new_empty(self.capacity, *part.shape[1:]) for part in (x, y))
        # Example i of the stream, from 0, draws one of i + 1 places; those past the end are out.
        counts = torch.arange(self.seen, self.seen + len(x))
        drawn = torch.rand(len(x), dtype=torch.float64, generator=self.generator)
        places = torch.where(counts < self.capacity, counts, (drawn * (counts + 1)).long())
        for i, place in enumerate(places.tolist()):
            if place < self.capacity:
                self.x[place], self.y[place] = x[i], y[i]
        self.seen += len(x)

    def sample(self, size: int) -> tuple[Tensor, Tensor]:
        """Random examples, without replacement, at most as many as there are."""
        index = torch.randperm(len(self), generator=self.generator)[:size].to(self.y.device)
        return self.x[index], self.y[index]

    def __len__(self) -> int:
        return min(self.seen, self.capacity)
