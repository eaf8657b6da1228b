"""Where a test of Triton kernels runs: on a GPU, or on a CPU by Triton's interpreter.

The interpreter is asked for by a variable that has to be set before Triton is imported, so a file's
tests run once more in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

runs = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="no GPU: runs under test_in_the_interpreter"
)
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
starts_interpreter = pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="runs for itself")


def run_interpreted(file: str) -> None:
    """Run a file's tests in the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", file]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    for name in [name for name in env if name.startswith("PYTEST_")]:
        del env[name]  # Of a parallel run of the suite.
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d\d passed", done.stdout), done.stdout[-2000:]
