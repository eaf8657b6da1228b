"""Seeds and generators that need no communication: every process draws the same."""

from typing import Any

import torch
import torch.distributed as dist


def common_seed(generator: torch.Generator | None) -> int:
    """A seed from the generator; where torch.distributed runs, that of rank 0."""
    device = "cpu" if generator is None else generator.device
    return everyones(int(torch.randint(2**62, (), generator=generator, device=device)))[0]


def processes() -> int:
    """The number of processes of torch.distributed; 0 where it does not run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def everyones(value: Any) -> list[Any]:
    """What each process passed, in the order of the ranks."""
    values = [value] * max(processes(), 1)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def counted_generator(seed: int, count: int) -> torch.Generator:
    """The CPU generator of draw ``count``; neighbouring counts have nothing in common."""
    mask = 2**64 - 1
    z = (seed + count * 0x9E3779B97F4A7C15) & mask  # splitmix64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return torch.Generator("cpu").manual_seed((z ^ (z >> 31)) >> 1)
