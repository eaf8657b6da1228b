"""Timing of a candidate against a baseline, in turn, and the table of their ratios.

    pytest benchmarks                              everything, under 6 minutes on 2 cores
    pytest benchmarks --benchmark-json=out.json    with all times; extra_info holds the ratios
    pytest benchmarks --threads 2 --seconds 3      torch's threads (default 1); time a case

In the table, ``time`` is the candidate's median, ``ratio`` the median of candidate / baseline with
the quartiles in brackets, over rounds in which one is timed just after the other, so that a change
of the machine's speed meets both. ``goal``, where there is one, is what the ratio should be at
most; ``memory`` is a step's peak, and its ratio to the baseline's. Nothing is asserted about time.
A case is timed only after its results were found right. pytest-benchmark's own table comes with
``--benchmark-verbose``.
"""

import gc
import math
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch

ROUND = 0.005  # Seconds that a round of the baseline takes at least.
ROWS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser):
    group = parser.getgroup("ratios")
    group.addoption("--threads", type=int, default=1, help="torch's threads (default 1)")
    group.addoption("--seconds", type=float, help="time for the rounds of a case")


def pytest_configure(config):
    config.stash[ROWS] = []
    config.option.benchmark_quiet = True


@pytest.fixture(autouse=True)
def one_seed(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("threads"))
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compare(benchmark, request):
    """Time ``candidate`` and ``baseline``, each a pair of a name and a function, in turn.

    ``check`` raises if one of them computes something wrong. A round is a multiple of ``cycle``
    calls, of which some take longer. Further keywords go to extra_info and,
    where the table has a column of that name, into the table.
    """

    def run(
        case: str,
        candidate: tuple[str, Callable[[], Any]],
        baseline: tuple[str, Callable[[], Any]],
        *,
        check: Callable[[], None],
        seconds: float = 0.5,
        cycle: int = 1,
        **info: Any,
    ) -> None:
        check()
        (name, new), (old_name, old) = candidate, baseline
        if benchmark.disabled:
            benchmark.pedantic(new)
            return
        budget = request.config.getoption("seconds") or seconds
        iterations, rounds = _plan(new, old, budget, cycle)
        old_times: list[float] = []

        def once():
            new()  # Without its result, which pytest-benchmark would keep during the next call.

        gc.collect()
        gc.disable()
        try:
            benchmark.pedantic(
                once,
                teardown=lambda: old_times.append(_round(old, iterations)),
                rounds=rounds,
                warmup_rounds=1,
                iterations=iterations,
            )
        finally:
            gc.enable()
        new_times = benchmark.stats.stats.data
        pairs = zip(new_times, old_times[-rounds:], strict=True)
        q1, median, q3 = statistics.quantiles([a / b for a, b in pairs], method="inclusive")
        row = {
            "case": case,
            "candidate": name,
            "baseline": old_name,
            "baseline_median": statistics.median(old_times[-rounds:]),
            "ratio": {"median": median, "q1": q1, "q3": q3},
            "threads": torch.get_num_threads(),
            **info,
        }
        benchmark.extra_info.update(row)
        row["time"] = statistics.median(new_times)
        request.config.stash[ROWS].append(row)

    return run


def _round(function: Callable[[], Any], iterations: int) -> float:
    """Seconds a call, over some calls."""
    start = perf_counter()
    for _ in range(iterations):
        function()
    return (perf_counter() - start) / iterations


def _plan(
    new: Callable[[], Any], old: Callable[[], Any], budget: float, cycle: int
) -> tuple[int, int]:
    """Warm both up, and choose the calls a round and the rounds."""
    slow, fast = (min(_round(f, cycle), _round(f, cycle)) for f in (new, old))
    iterations = cycle * max(1, math.ceil(ROUND / fast / cycle))
    return iterations, min(100, max(5, int(budget / (iterations * (fast + slow)))))


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[ROWS]
    if not rows:
        return
    cells = [("case", "candidate", "time", "ratio", "goal", "memory", "to")]
    cells += [_cells(row) for row in rows]
    used = [k for k in range(len(cells[0])) if any(line[k] for line in cells[1:])]
    widths = {k: max(len(line[k]) for line in cells) for k in used}
    terminalreporter.section("ratios of candidates to baselines")
    for line in cells:
        padded = (
            line[k].rjust(widths[k]) if 2 <= k < 6 else line[k].ljust(widths[k]) for k in used
        )
        terminalreporter.write_line("  ".join(padded).rstrip())


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio, memory = row["ratio"], row.get("memory")
    return (
        row["case"],
        row["candidate"],
        f"{row['time'] * 1e3:.3f} ms",
        f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]",
        f"{row['goal']:.2f}" if row.get("goal") else "",
        f"{memory['peak'] / 1e6:.1f} MB x{memory['ratio']:.2f}" if memory else "",
        row["baseline"],
    )
