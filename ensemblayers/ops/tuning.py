"""Which tile sizes a Triton kernel of the layers takes on a card.

A kernel offers configurations that fit into the card's shared memory, the one that should do best
first. A file of ``configs``, one a card and Triton version, says which was measured to be best for
a shape; for a card or a shape that isn't there, the first is taken. Nothing is tuned by itself:

>>> from ensemblayers.ops import tuning
>>> with tuning.tuned():  # What runs in here is tuned, unless it is being captured in a CUDA graph
...     pass

Batch sizes are rounded up to a power of two, so that a new one seldom means another kernel.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter

import torch
import triton

_FOLDER = Path(__file__).parent / "configs"
_ROWS = (16, 8192)

_tuning = False
_found: dict[tuple[str, str], "Config"] = {}


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes in features out, rows and features in; how a program runs."""

    outs: int
    rows: int
    ins: int
    warps: int = 4
    stages: int = 3
    split: int = 1  # programs that share the sum over the features in


def bucket(rows: int) -> int:
    """The power of two, from 16 to 8192, that stands for a number of rows."""
    least, most = _ROWS
    return min(max(triton.next_power_of_2(rows), least), most)


def choose(
    key: str,
    device: torch.device,
    candidates: Callable[[], Sequence[Config]],
    run: Callable[[Config], None],
) -> Config:
    """The configuration for a key: measured, or the first candidate.

    Args:
        key: kernel, dtypes and shape, the rows by :func:`bucket`.
        candidates: makes those that fit, the default first.
        run: launches the kernel with one.
    """
    card = card_name(device)
    found = _found.get((card, key)) or shipped(card).get(key)
    if found is None and _tuning and not _capturing(device):
        found = _found[card, key] = _fastest(candidates(), run)
    return found or candidates()[0]


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """Measure the candidates for each shape that is new in this block, and keep the fastest."""
    global _tuning
    before, _tuning = _tuning, True
    try:
        yield
    finally:
        _tuning = before


def entries() -> int:
    """Number of shapes tuned in this process."""
    return len(_found)


def save(device: torch.device, folder: Path = _FOLDER) -> Path:
    """Add what was tuned in this process to the card's file."""
    card = card_name(device)
    every = shipped(card) | {key: c for (where, key), c in _found.items() if where == card}
    path = folder / f"{card}.json"
    folder.mkdir(exist_ok=True)
    lines = (f" {json.dumps(k)}: {json.dumps(dataclasses.asdict(every[k]))}" for k in sorted(every))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


@functools.cache
def shipped(card: str) -> dict[str, Config]:
    """The configurations in a card's file, none where there is no file."""
    path = _FOLDER / f"{card}.json"
    if not path.exists():
        return {}
    return {key: Config(**fields) for key, fields in json.loads(path.read_text()).items()}


@functools.cache
def card_name(device: torch.device) -> str:
    """A card and the version of Triton, as in the names of the files."""
    version = ".".join(triton.__version__.split(".")[:2])
    if device.type != "cuda":
        return f"{device.type}-triton{version}"
    name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return f"{name}-triton{version}"


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 163 * 1024
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _fastest(candidates: Sequence[Config], run: Callable[[Config], None]) -> Config:
    times = {}
    for config in candidates:
        try:
            times[config] = _milliseconds(lambda config=config: run(config))
        except triton.runtime.errors.OutOfResources:
            continue  # More shared memory or registers than was reckoned with.
    return min(times, key=times.get, default=candidates[0])


def _milliseconds(call: Callable[[], None]) -> float:
    if torch.cuda.is_available():
        return triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median")
    start = perf_counter()  # The interpreter.
    call()
    return (perf_counter() - start) * 1e3
