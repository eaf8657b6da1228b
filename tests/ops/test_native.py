import os
import shutil
import subprocess
import sys

import pytest

from ensemblayers.ops import native

CODE = """
import torch
from ensemblayers.ops import native
from ensemblayers.optim import SubspaceSGD
print("available", native.available())
net = torch.nn.Linear(3, 2)
opt = SubspaceSGD(net.parameters(), lr=0.1, n=2)
net(torch.ones(1, 3)).sum().backward()
opt.step()
print("stepped")
"""


def run(tmp_path, **environment):
    environment = {**os.environ, "ENSEMBLAYERS_CACHE": str(tmp_path / "cache"), **environment}
    return subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "environment",
    [{"CXX": "/nonexistent/g++"}, {"CXX": "/bin/false"}, {"ENSEMBLAYERS_NATIVE": "0"}],
    ids=["no compiler", "a failing compiler", "turned off"],
)
def test_without_the_kernels_plain_pytorch_works_in_silence(tmp_path, environment):
    done = run(tmp_path, **environment)
    assert done.stdout.split() == ["available", "False", "stepped"]
    assert done.returncode == 0 and "ensemblayers" not in done.stderr


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "cache").write_text("")
    assert "stepped" in run(tmp_path).stdout


def test_a_demanded_build_that_fails_is_an_error(tmp_path):
    done = run(tmp_path, CXX="/bin/false", ENSEMBLAYERS_NATIVE="1")
    assert done.returncode and "the C++ kernels can't be built" in done.stderr


def test_one_build_serves_later_processes(tmp_path):
    if not native.available():
        pytest.skip("no C++ compiler")
    assert "True" in run(tmp_path).stdout
    (library,) = (tmp_path / "cache").iterdir()
    built = library.stat().st_mtime_ns
    assert "True" in run(tmp_path).stdout
    assert [p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()] == [built]


def test_a_damaged_build_is_replaced(tmp_path):
    if not native.available():
        pytest.skip("no C++ compiler")
    run(tmp_path)
    (library,) = (tmp_path / "cache").iterdir()
    library.write_bytes(b"damaged")
    assert "True" in run(tmp_path).stdout


def test_importing_the_package_builds_nothing(tmp_path):
    environment = {**os.environ, "ENSEMBLAYERS_CACHE": str(tmp_path / "cache")}
    code = "import ensemblayers, sys; print('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False" and not (tmp_path / "cache").exists()


def test_a_build_is_of_one_compiler_with_its_arguments(monkeypatch, tmp_path):
    if not native.available():
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("ENSEMBLAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_build", lambda *_: None)
    found = set()
    for arguments in ("", " -O2", " -O2 -ffast-math"):
        monkeypatch.setenv("CXX", (shutil.which("g++") or shutil.which("clang++")) + arguments)
        found.add(native._library())
    assert len(found) == 3
