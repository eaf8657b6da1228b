"""A run that was stopped goes on after the last task that it finished."""

import pickle
from pathlib import Path
from typing import Any

import torch

from .benchmarks import Benchmark
from .errors import UsageError
from .files import whole_file
from .graphs import GraphedBackward


class Checkpoint:
    """The file that a run leaves after each task.

    Loading it may run whatever code it names, as any pickle: it is read where this class wrote it.

    Args:
        path: the file.
        benchmark: the run's; its data are not written.
        identity: what the run is: a file of another one is of no use.
    """

    def __init__(self, path: Path, benchmark: Benchmark, identity: dict[str, Any]) -> None:
        self.path = path
        self.benchmark = benchmark
        self.identity = {**identity, "torch": torch.__version__}

    def save(self, state: Any) -> None:
        """Write a run's state, and that of torch's generators."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        with whole_file(self.path) as file:
            pickler = _Pickler(file, self.benchmark)
            pickler.dump(self.identity)
            pickler.dump((state, torch.get_rng_state(), cuda))

    def load(self) -> Any:
        """The state that was saved, with torch's generators put back; None where there is none.

        Raises:
            UsageError: a file that is damaged, or of another version's code.
        """
        try:
            with self.path.open("rb") as file:
                unpickler = _Unpickler(file, self.benchmark)
                if unpickler.load() != self.identity:
                    return None
                state, cpu, cuda = unpickler.load()
        except FileNotFoundError:
            return None
        except OSError:
            raise
        except Exception as error:  # Damage may raise any.
            raise UsageError(
                f"can't go on from {self.path} ({type(error).__name__}: {error}): move it away to "
                "begin the run anew"
            ) from None
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        return state


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, benchmark: Benchmark) -> None:
        super().__init__(file)
        self.benchmark = benchmark

    def persistent_id(self, obj: Any) -> str | None:
        return "benchmark" if obj is self.benchmark else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, GraphedBackward):
            return _none, ()  # Captured anew.
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, benchmark: Benchmark) -> None:
        super().__init__(file)
        self.benchmark = benchmark

    def persistent_load(self, name: str) -> Benchmark:
        return self.benchmark


def _none() -> None:
    return None
