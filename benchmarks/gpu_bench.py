"""What the sections of :mod:`.gpu` share: what is run, how candidates are compared, the report."""

import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from .clock import Clock, Time

LIMITS = {"bf16": 1e-2, "tf32": 2e-3, "float32": 1e-6}  # of the relative error: a few roundings


@dataclasses.dataclass
class Plan:
    """What is run, and for how long."""

    sizes: tuple[int, ...] = (1024, 4096)
    batches: tuple[int, ...] = (10, 128, 1024, 8192)
    members: tuple[int, ...] = (3, 5, 10)
    dtypes: tuple[str, ...] = ("bf16", "tf32")
    rounds: int = 15
    seconds: float = 8 * 60
    # Shares of the time: a section that meets its end stops, and the next one begins.
    ends: tuple[float, ...] = (0.03, 0.25, 0.47, 0.62, 0.77, 0.84, 1.0)
    copy: int = 2**28  # elements
    product: int = 8192
    mlp: tuple[int, int] = (784, 256)  # features in, hidden
    width: int = 20  # of the ResNet
    channels: tuple[int, ...] = (64, 256)  # of the convolutions

    @staticmethod
    def quick() -> "Plan":
        few = Plan(sizes=(4096,), batches=(10, 1024), members=(3,), dtypes=("bf16",), rounds=7)
        ends = (0.05, 0.45, 0.45, 0.6, 0.75, 0.85, 1.0)
        return dataclasses.replace(few, seconds=90, ends=ends)

    @staticmethod
    def toy() -> "Plan":
        few = Plan(sizes=(32,), batches=(4,), members=(2,), rounds=2, seconds=300)
        return dataclasses.replace(few, copy=2**10, product=32, mlp=(20, 8), width=1, channels=(2,))


class Report:
    """Rows of results, written after each."""

    def __init__(self, folder: Path, card: str) -> None:
        self.path = folder / card
        self.about = {
            "card": card,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "date": datetime.date.today().isoformat(),
        }
        self.sections: dict[str, list[dict[str, Any]]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, section: str, **row: Any) -> None:
        """Print and store a row."""
        self.sections.setdefault(section, []).append(row)
        print(f"{section}: " + ", ".join(f"{k} {_cell(v)}" for k, v in row.items()), flush=True)
        self.write()

    def write(self) -> None:
        data = {**self.about, "sections": self.sections}
        self.path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        about = ", ".join(f"{k} {v}" for k, v in self.about.items() if k != "card")
        lines = [f"# {self.about['card']}", "", about]
        for name, rows in self.sections.items():
            keys = list(dict.fromkeys(k for row in rows for k in row))
            lines += ["", f"## {name}", "", "| " + " | ".join(keys) + " |"]
            lines += ["| " + " | ".join("---" for _ in keys) + " |"]
            lines += ["| " + " | ".join(_cell(r.get(k, "")) for k in keys) + " |" for r in rows]
        self.path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class Bench:
    """What the sections share.

    Args:
        ends: when each section has to stop.
    """

    def __init__(self, plan: Plan, report: Report, device: torch.device) -> None:
        self.plan, self.report, self.device = plan, report, device
        self.clock = Clock(device, plan.rounds)
        self.began = time.monotonic()
        self.until = self.began
        self.bandwidth = float("nan")  # bytes a second, read and written
        self.rates: dict[str, float] = {}  # operations a second

    def left(self) -> bool:
        return time.monotonic() < self.until

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def floor(self, moved: float, operations: float, dtype: str) -> float:
        """The least milliseconds for so many bytes and operations, by this run's own ceilings."""
        return max(moved / self.bandwidth, operations / self.rates[dtype]) * 1e3

    def compare(
        self,
        section: str,
        candidates: dict[str, Callable[[], object]],
        check: Callable[[str], float],
        limit: float,
        floor: float | None = None,
        **about: Any,
    ) -> None:
        """Time the candidates that are right, and add their row: ratios to the first one."""
        wrong = {}
        for name in list(candidates):
            try:
                error = check(name)
            except Exception as e:
                wrong[name] = f"failed: {type(e).__name__}"
                print(f"{section} {about} {name}: {e}", file=sys.stderr)
            else:
                if not error <= limit:
                    wrong[name] = f"wrong by {error:.1e}"
            if name in wrong:
                del candidates[name]
        times = self.clock.race(candidates) if candidates else {}
        row: dict[str, Any] = dict(about)
        for k, (name, t) in enumerate(times.items()):
            row[f"{name} ms" if k == 0 else name] = t.ms if k == 0 else _ratio(t)
        if floor is not None and times:
            row["floor"] = floor / next(iter(times.values())).ms
        self.report.add(section, **row, **wrong)


def _ratio(t: Time) -> str:
    middle, low, high = t.ratio
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]" + ("" if t.graph else " (no graph)")


def error(found: Tensor, exact: Tensor) -> float:
    """Relative root mean square; NaN stays NaN."""
    return float((found.detach().double() - exact.double()).norm() / exact.double().norm())


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "bf16" else torch.float32


class precision:
    """float32 products in tf32, or exactly."""

    def __init__(self, dtype: str) -> None:
        self.wanted = "ieee" if dtype == "fp32" else "tf32"

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = self.wanted

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = self.before
