"""Train continual-learning methods on a stream of tasks and compare them.

With no argument: naive SGD, MC-SGD, ensemble MC-SGD and Subspace-Connectivity on rotated-digits,
which needs no data beyond scikit-learn's. Each run leaves a JSON file in the output folder, beside
a figure of the accuracy on the tasks seen so far.
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import UsageError

if TYPE_CHECKING:
    import torch

    from .settings import Settings

DEFAULT_METHODS = ("naive", "mc-sgd", "ensemble-mc-sgd", "subspace-connectivity")


@dataclass
class Options:
    benchmark: str = "rotated-digits"
    """rotated-digits, rotated-mnist, permuted-mnist, split-cifar-100 or split-miniimagenet, of 20
    tasks each; rotated-mnist-5 or split-cifar-100-5, of 5 tasks."""
    method: tuple[str, ...] = DEFAULT_METHODS
    """One or more of: naive, ewc, a-gem, er-reservoir, stable-sgd, mc-sgd, ensemble-mc-sgd,
    ensemble-mc-sgd-bagging, subspace, subspace-er, subspace-connectivity, subspace-distillation,
    batch-ensemble, vanilla-ensemble, multitask."""
    n: int = 3
    """Number of members of the ensemble methods."""
    seed: int = 0
    """Sets the initial weights, the order of the examples, the permutations and the buffer."""
    device: str = "cpu"
    """cpu, cuda, or any other device of torch."""
    threads: int = 1
    """CPU threads. The networks are small: more is seldom faster."""
    data_root: Path = Path("data")
    """Folder that holds the data sets: MNIST/raw/*, cifar-100-python/*, miniimagenet/*.npz."""
    download: bool = False
    """Download a data set that is missing from the data root, or is not as published."""
    out: Path = Path("runs")
    """Folder for the results, by benchmark: one JSON file a run, and the figure. They replace those
    of the same method, members and seed."""
    tasks: int | None = None
    """Only the first tasks of the benchmark."""
    examples: int | None = None
    """Only so many training examples of each task; where tasks have classes of their own, as many
    of each class, at least one."""
    set: tuple[str, ...] = ()
    """Changes of the settings, as lr=0.05 or connect.steps=20: see examples/settings.py."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    return command_line("examples.train", __doc__, Options, compare, arguments)


def command_line(
    module: str,
    description: str,
    options: type,
    command: Callable[[Any], None],
    arguments: list[str] | None,
) -> int:
    """Parse arguments, run a command with them, and report what went wrong in one line.

    Returns:
        The exit status.
    """
    try:
        import tyro

        prog, config = f"python -m {module}", (tyro.conf.PositionalRequiredArgs,)
        about = {"prog": prog, "description": description, "config": config}
        command(tyro.cli(options, args=arguments, **about))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"error: no {error.name}: pip install 'ensemblayers[examples]'", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def script(main: Callable[[], int]) -> NoReturn:
    """Run a command line as a program, which a SIGTERM ends as Ctrl-C does: its workers too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())


def usable_device(name: str) -> "torch.device":
    """A device of torch; a UsageError where tensors can't be put on it."""
    import torch

    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"can't use --device {name}: {reason}") from None
    return device


def compare(options: Options) -> None:
    """Run the methods in turn, then print the table and draw the figure."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from . import report
    from .benchmarks import BENCHMARKS
    from .methods import METHODS
    from .run import check_writable, run, save
    from .workers import MOST_THREADS

    if not options.method:
        raise UsageError(f"--method needs at least one of {', '.join(METHODS)}")
    for name in options.method:
        if name not in METHODS:
            raise UsageError(f"unknown method {name!r}: choose from {', '.join(METHODS)}")
    if options.benchmark not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise UsageError(f"unknown benchmark {options.benchmark!r}: choose from {known}")
    for name in ("n", "tasks", "examples", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed must be from 0 to 2**63 - 1, got {options.seed}")
    if options.threads > MOST_THREADS:
        raise UsageError(f"--threads must be at most {MOST_THREADS}, got {options.threads}")
    device = usable_device(options.device)
    torch.set_num_threads(options.threads)
    folder = options.out / options.benchmark
    check_writable(folder)

    benchmark = BENCHMARKS[options.benchmark](options.seed, options.data_root, options.download)
    if (options.tasks or 0) > benchmark.num_tasks:
        raise UsageError(
            f"--tasks must be at most {benchmark.num_tasks} on {benchmark.name}, "
            f"got {options.tasks}"
        )
    benchmark = benchmark.shortened(options.tasks, options.examples).to(device)
    settings = {name: _settings(name, options) for name in options.method}
    console = Console()
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn())
    results = []
    with Progress(*columns, TextColumn("tasks"), TimeElapsedColumn(), console=console) as bars:
        lines = {name: bars.add_task(name, total=None) for name in settings}
        for name, line in lines.items():

            def progress(done: int, total: int, line: int = line) -> None:
                bars.update(line, completed=done, total=total)

            bars.reset(line)
            result = run(benchmark, name, settings[name], options.n, options.seed, device, progress)
            results.append(result)
            save(result, folder)
    console.print(report.table(results))
    drawing = folder / f"accuracy-seed{options.seed}.png"
    report.figure(results, drawing)
    console.print(f"Results and figure: {folder}", soft_wrap=True, markup=False, highlight=False)


def _settings(method: str, options: Options) -> "Settings":
    from .settings import changed, settings_for

    try:
        return changed(settings_for(options.benchmark, method, options.n), options.set)
    except UsageError as error:
        raise UsageError(f"{method}: {error}") from None


if __name__ == "__main__":
    script(main)
