"""Draw the figures of "Continual Learning Beyond a Single Model" (Doan et al. 2023).

Accuracies come from stored results, which `python -m examples.reproduce` makes. What looks into
networks needs the weights after each task: the runs for those are made here, where they are
missing, and kept in a folder of their own. Each figure leaves a PNG, its data as CSV, and as text
what the paper says of it: met, not met, or not measured yet.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from .drawing import Figure, Sources


@dataclass
class Options:
    name: tuple[str, ...]
    """One or more figures, by name (4-metrics-against-n) or by number (4), or all."""
    benchmark: tuple[str, ...] = ()
    """Make runs only on these benchmarks; the figures show all that is there."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the runs whose weights are looked into. The first is drawn, box plots show all; the
    means over all go into a file of their own."""
    train: bool = True
    """Make the runs that are missing; --no-train: only draw what is there."""
    jobs: int = 1
    """Runs at a time, -1: one a CPU core."""
    device: str = "cpu"
    """cpu, cuda, or any other device of torch: where the runs are made."""
    threads: int = 1
    """CPU threads a run."""
    data_root: Path = Path("data")
    """Folder that holds the data sets: MNIST/raw/*, cifar-100-python/*."""
    download: bool = False
    """Download a data set that is missing from the data root, or is not as published."""
    results: Path = Path(__file__).parent / "results"
    """Folder of the stored results; whole runs that are made for their weights go there too."""
    weights: Path = Path("runs/figures")
    """Folder for the weights of runs, some 10 to 200 MB a run."""
    out: Path = Path(__file__).parent / "figures"
    """Folder for the figures and their data."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    from .train import command_line

    return command_line("examples.figures", __doc__, Options, draw, arguments)


def draw(options: Options) -> None:
    """Make the missing runs, then draw the figures and print what they show."""
    from rich.console import Console

    from .drawing import Sources
    from .run import check_writable

    figures = _chosen(options)
    check_writable(options.out)
    console = Console()
    if options.train:
        _train(figures, options, console)
    sources = Sources(options.results, options.weights, options.data_root, options.seeds)
    for figure in figures:
        console.print(f"{figure.name}:", highlight=False, markup=False)
        for line in drawn(figure, sources, options.out):
            console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)


def drawn(figure: "Figure", sources: "Sources", folder: Path) -> list[str]:
    """Draw a figure, as far as there is data for it; return what is to be said of it."""
    from .drawing.rows import comma_separated, mean_over_seeds

    rows = figure.rows(sources)
    lines = [str(claim) for claim in figure.claims(rows)] or ["the paper states nothing of it"]
    if not rows:
        missing = "its runs are missing, which are made without --no-train"
        if figure.table:
            missing = f"python -m examples.reproduce {figure.table} makes its runs"
        return [*lines, f"not drawn: {missing}"]
    lines.append(f"seeds: {', '.join(map(str, sorted({row['seed'] for row in rows})))}")
    (folder / f"{figure.name}.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    (folder / f"{figure.name}.csv").write_text(comma_separated(rows), "utf-8")
    shown = rows
    if figure.values:
        shown = [row for row in rows if row["seed"] == rows[0]["seed"]]
        if len(shown) < len(rows):
            means = comma_separated(mean_over_seeds(rows, figure.values))
            (folder / f"{figure.name}-mean.csv").write_text(means, "utf-8")
    figure.draw(shown).savefig(folder / f"{figure.name}.png", dpi=150)
    return lines


def _chosen(options: Options) -> list["Figure"]:
    from .benchmarks import BENCHMARKS
    from .drawing import FIGURES
    from .workers import check_parallel

    if not options.name:
        raise UsageError(f"which figure? all, or one or more of {', '.join(FIGURES)}")
    for benchmark in options.benchmark:
        if benchmark not in BENCHMARKS:
            known = ", ".join(BENCHMARKS)
            raise UsageError(f"unknown benchmark {benchmark!r}: choose from {known}")
    check_parallel(options.threads, options.jobs)
    if not options.seeds or not all(0 <= seed < 2**63 for seed in options.seeds):
        raise UsageError(f"expected --seeds from 0 to 2**63 - 1, got {options.seeds}")
    found = []
    for wanted in options.name:
        own = [f for name, f in FIGURES.items() if wanted in (name, name.split("-")[0], "all")]
        if not own:
            raise UsageError(f"unknown figure {wanted!r}: all, or one of {', '.join(FIGURES)}")
        found += own
    return list({figure.name: figure for figure in found}.values())


def _train(figures: list["Figure"], options: Options, console: Any) -> None:
    """Make the runs whose weights are missing."""
    import joblib

    from .benchmarks import BENCHMARKS
    from .drawing.weights import is_stored, make
    from .run import check_writable
    from .train import usable_device
    from .workers import finished

    usable_device(options.device)
    check_writable(options.weights, "--weights")
    check_writable(options.results, "--results")
    runs = dict.fromkeys(run for figure in figures for run in figure.runs)
    missing = [
        (run, seed)
        for seed in options.seeds
        for run in runs
        if run.benchmark in (options.benchmark or BENCHMARKS)
        and not is_stored(run, seed, options.weights)
    ]
    for name in dict.fromkeys(run.benchmark for run, _ in missing):
        # Here, so that what is wrong with the data is reported once; and downloaded once.
        BENCHMARKS[name](0, options.data_root, options.download)
    folders = (options.weights, options.results, options.data_root)
    where = (*(folder.resolve() for folder in folders), options.device)
    calls = [joblib.delayed(make)(*key, *where, options.threads, os.getpid()) for key in missing]
    for count, (run, seed) in enumerate(finished(calls, options.jobs), start=1):
        text = f"run {count} of {len(missing)}: {run.file(Path(), seed).with_suffix('')}"
        console.print(text, soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    from .train import script

    script(main)
