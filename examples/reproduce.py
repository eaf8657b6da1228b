"""Reproduce tables of "Continual Learning Beyond a Single Model" (Doan et al. 2023).

Makes the runs that are missing for the tables, in parallel processes, then prints each table, ours
beside the paper's, and the paper's orderings. Each run leaves a JSON file when it is finished, and
one that was stopped goes on after its last task: stop the command when you like, and start it
again. RESULTS.md (all tables, from all that is stored) and a CSV file a table are written anew.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from .store import Key
    from .targets import Row

TABLES = (
    *("results_cnn", "varying_n", "parameters", "main_results", "image_results"),
    *("beyond", "ablation"),
)
SEEDS = (0, 1, 2, 3, 4)
WIDTH = 110  # of the tables in the terminal


@dataclass
class Options:
    table: tuple[str, ...]
    """One or more of: results_cnn (Table 2), varying_n (4), parameters (5), main_results (6),
    image_results (7), beyond (the paper), and ablation (five tasks, figures 3 and 4)."""
    benchmark: tuple[str, ...] = ()
    """Only these benchmarks of the tables."""
    method: tuple[str, ...] = ()
    """Train only these methods; the tables show all."""
    n: tuple[int, ...] = ()
    """Train only these numbers of members; the tables show all."""
    seeds: tuple[int, ...] = SEEDS
    """Train only these seeds; the tables show all five."""
    train: bool = True
    """Make the runs that are missing; --no-train: only print what is stored."""
    jobs: int = -1
    """Runs at a time, -1: one a CPU core."""
    backend: str = "loky"
    """Joblib's backend: loky (processes on this machine), or dask or ray for a cluster whose
    machines see this folder."""
    cluster: str | None = None
    """Address of the Dask scheduler or of the Ray cluster; without it, a local one is started."""
    device: str = "cpu"
    """cpu, cuda, or any other device of torch."""
    threads: int = 1
    """CPU threads a run."""
    data_root: Path = Path("data")
    """Folder that holds the data sets: MNIST/raw/*, cifar-100-python/*, miniimagenet/*.npz."""
    download: bool = False
    """Download a data set that is missing from the data root, or is not as published."""
    out: Path = Path(__file__).parent
    """Folder for RESULTS.md and, in results/, one JSON file a run and the CSV files."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    from .train import command_line

    return command_line("examples.reproduce", __doc__, Options, reproduce, arguments)


def reproduce(options: Options) -> None:
    """Make the missing runs, then print and write the tables."""
    from rich.console import Console

    from . import tables
    from .orderings import orderings, verdict
    from .run import check_writable
    from .targets import rows

    _check(options)
    folder = options.out / "results"
    check_writable(folder)
    console = Console()
    if console.width < WIDTH:
        console.width = WIDTH  # Wrapped by the terminal, but whole.
    shown = {name: _columns(rows(name), options.benchmark) for name in options.table}
    wanted = [row for own in shown.values() for row in own if _is_chosen(row, options)]
    if not wanted or not options.seeds:
        raise UsageError(
            "nothing in these tables is of a chosen --benchmark, --method, --n and --seeds"
        )
    if options.train:
        _train(wanted, folder, options, console)
    if not any(folder.glob("*/*.json")):
        console.print(f"No results in {folder}: all rows are empty.", soft_wrap=True, markup=False)
    for name, own in shown.items():
        for table in tables.rich_tables(name, tables.read(own, folder, SEEDS)):
            console.print(table)
    console.print(tables.LEGEND)
    for ordering in orderings({row.benchmark: None for own in shown.values() for row in own}):
        console.print(verdict(ordering, folder, SEEDS), soft_wrap=True, highlight=False)
    write_report(options.out)
    console.print(f"Written: {options.out / 'RESULTS.md'}", soft_wrap=True, markup=False)


def write_report(out: Path) -> None:
    """Write RESULTS.md and the CSV files: all tables, from whatever is stored."""
    from . import tables
    from .orderings import orderings, verdict
    from .targets import rows

    folder = out / "results"
    parts = [
        "# Results\n\nWritten by `python -m examples.reproduce`; raw results: `results/`.\n",
        f"{tables.LEGEND}\n",
    ]
    benchmarks: dict[str, None] = {}
    for name in TABLES:
        own = _columns(rows(name), ())
        benchmarks |= {row.benchmark: None for row in own}
        lines = tables.read(own, folder, SEEDS)
        parts.append(tables.markdown(name, lines))
        (folder / f"{name}.csv").write_text(tables.comma_separated(name, lines), "utf-8")
    verdicts = [f"- {verdict(o, folder, SEEDS)}\n" for o in orderings(benchmarks)]
    parts.append("## The paper's orderings\n\n" + "".join(verdicts))
    (out / "RESULTS.md").write_text("\n".join(parts), "utf-8")


def _check(options: Options) -> None:
    from .benchmarks import BENCHMARKS
    from .methods import METHODS
    from .workers import check_parallel

    choices = {"table": TABLES, "benchmark": tuple(BENCHMARKS), "method": tuple(METHODS)}
    for name, known in choices.items():
        for value in getattr(options, name):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}: choose from {', '.join(known)}")
    if not options.table:
        raise UsageError(f"which table? One or more of {', '.join(TABLES)}")
    if options.backend not in ("loky", "dask", "ray"):
        raise UsageError(f"unknown backend {options.backend!r}: choose from loky, dask, ray")
    package = {"dask": "distributed", "ray": "ray"}.get(options.backend)
    if package and not importlib.util.find_spec(package):
        raise UsageError(f"--backend {options.backend}: pip install {package}")
    check_parallel(options.threads, options.jobs)
    if not set(options.seeds) <= set(SEEDS):
        raise UsageError(f"expected --seeds from {SEEDS}, got {options.seeds}")


def _columns(rows: Sequence["Row"], benchmarks: Sequence[str]) -> list["Row"]:
    """The rows on benchmarks that the examples have, and of those only the chosen ones."""
    from .benchmarks import BENCHMARKS

    chosen = benchmarks or tuple(BENCHMARKS)
    return [row for row in rows if row.benchmark in chosen and row.benchmark in BENCHMARKS]


def _is_chosen(row: "Row", options: Options) -> bool:
    return row.method in (options.method or (row.method,)) and row.n in (options.n or (row.n,))


def _train(rows: Sequence["Row"], folder: Path, options: Options, console: Any) -> None:
    """Make the runs that are missing, with a bar of their progress."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from .benchmarks import BENCHMARKS
    from .store import load
    from .tables import keys
    from .train import usable_device

    usable_device(options.device)
    # Seed by seed: all cells fill at the same pace. A run that several tables share is made once.
    wanted = [key for seed in options.seeds for row in rows for key in keys(row, [seed])]
    missing = [key for key in dict.fromkeys(wanted) if load(folder, key) is None]
    for name in dict.fromkeys(key.benchmark for key in missing):
        # Here, so that what is wrong with the data is reported once; and downloaded once.
        try:
            BENCHMARKS[name](0, options.data_root, options.download)
        except UsageError as error:
            raise UsageError(f"{error} (or name the others by --benchmark)") from None
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn())
    times = (TextColumn("runs"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console) as bars:
        line = bars.add_task("", total=len(missing))
        for key in _finished(missing, folder, options):
            bars.update(line, advance=1, description=key.file.stem)


def _finished(missing: Sequence["Key"], folder: Path, options: Options) -> Iterator["Key"]:
    """Make the runs in parallel; yield the key of each as it is finished."""
    import joblib

    from .store import execute
    from .workers import finished

    where = (options.device, options.threads, options.data_root.resolve())
    parent = os.getpid() if options.backend == "loky" else None
    calls = [joblib.delayed(execute)(key, folder.resolve(), *where, parent) for key in missing]
    with _backend(options):
        # Ray's backend can't give the results one by one.
        each = "list" if options.backend == "ray" else "generator_unordered"
        yield from finished(calls, options.jobs, each)


@contextlib.contextmanager
def _backend(options: Options) -> Iterator[None]:
    """Joblib's backend in force, a cluster connected to where it needs one."""
    import joblib

    if options.backend == "dask":
        from distributed import Client, LocalCluster

        # A process a run, as loky has it: a thread could not have its own seeds.
        local = None if options.cluster else LocalCluster(threads_per_worker=1)
        with Client(options.cluster or local), joblib.parallel_config("dask"):
            yield
        if local:
            local.close()
        return
    if options.backend == "ray":
        import ray
        from ray.util.joblib import register_ray

        ray.init(address=options.cluster)
        register_ray()
    with joblib.parallel_config(options.backend):
        yield


if __name__ == "__main__":
    from .train import script

    script(main)
