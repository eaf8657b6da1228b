"""The replay buffer: a few examples of each task."""

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
