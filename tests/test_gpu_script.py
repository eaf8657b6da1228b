"""The script for a GPU, rehearsed on a CPU at toy sizes: the first run on a card must not fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SECTIONS = {"ceilings", "passes", "tests", "tuning", "forward", "step", "networks"}
SECTIONS |= {"BatchEnsemble forward", "BatchEnsemble step"}
SECTIONS |= {"BatchEnsemble conv forward", "BatchEnsemble conv step"}


def run(*arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "benchmarks.gpu", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )


def test_rehearsal(tmp_path):
    pytest.importorskip("triton", reason="Triton isn't installed")
    done = run("--toy", "--out", tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "toy.json").read_text())
    assert set(report["sections"]) == SECTIONS
    for name, rows in report["sections"].items():
        assert rows, name
        for row in rows:
            assert not any(str(v).startswith(("wrong", "failed")) for v in row.values()), row
    ours = [row["ours"] for row in report["sections"]["step"]]
    assert len(ours) == 2 and all(" [" in cell for cell in ours)
    for row in report["sections"]["BatchEnsemble step"]:
        assert {"nn.Linear ms", "ours", "fused", "scaled", "folded", "by index"} <= set(row)
    assert any("stacked n=10" in row for row in report["sections"]["networks"])
    assert "## step" in (tmp_path / "toy.md").read_text()
    assert not list((ROOT / "ensemblayers" / "ops").glob("configs/*toy*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    pytest.importorskip("triton", reason="Triton isn't installed")
    done = run()
    assert done.returncode == 2
    assert done.stderr.strip().endswith("no GPU; --toy rehearses on a CPU")
