"""Runs in parallel processes, which end with the command that started them."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .errors import UsageError

MOST_THREADS = 1024


def finished(calls: Iterable[Any], jobs: int, each: str = "generator_unordered") -> Iterator[Any]:
    """What joblib's calls return, as they finish.

    Args:
        calls: made by ``joblib.delayed``.
        jobs: processes, -1: one a CPU core.
        each: how joblib's backend gives the results.

    Raises:
        UsageError: a process was killed.
    """
    import joblib
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    try:
        yield from joblib.Parallel(n_jobs=jobs, return_as=each, batch_size=1)(calls)
    except TerminatedWorkerError:
        raise UsageError(
            "a process was killed in its run, maybe for want of memory: what is finished is "
            "kept; start again, with fewer --jobs"
        ) from None


def check_parallel(threads: int, jobs: int) -> None:
    """A UsageError for numbers that can't be."""
    if not 1 <= threads <= MOST_THREADS or jobs == 0:
        raise UsageError(
            f"expected --threads from 1 to {MOST_THREADS} and --jobs other than 0, got {threads} "
            f"and {jobs}"
        )


def ends_with(parent: int | None) -> Callable[[int, int], None]:
    """A run's progress that ends this process where the one that wanted the run is gone.

    Args:
        parent: that process, this one or the one that started this one; None: any.
    """

    def go_on(done: int, total: int) -> None:
        if parent not in (None, os.getpid(), os.getppid()):
            os._exit(1)  # An exception would let the process go on with the next run.

    return go_on
