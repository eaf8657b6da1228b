"""The C++ kernels for the CPU: compiled once, at first use, and loaded into torch.

The sources lie in ``csrc`` (in a wheel: inside this package) and use libtorch's stable ABI, so that
they need no compiler but a C++ one. Whatever goes wrong, plain PyTorch takes over with equal
results; the reason is logged once, at debug level.

``ENSEMBLAYERS_NATIVE=0`` turns the kernels off, ``=1`` makes a failed build an error.
``ENSEMBLAYERS_CACHE`` names the folder of the builds, else ``~/.cache/ensemblayers``.
"""

import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)
_PACKAGE = Path(__file__).resolve().parents[1]
_ABI = 0x020A000000000000  # torch 2.10, the first with all that the sources use
_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fPIC"]
_FLAGS += [f"-DTORCH_TARGET_VERSION={_ABI:#018x}"]


@functools.cache
def available() -> bool:
    """Whether the C++ kernels are loaded; the first call builds them where that was not done.

    Raises:
        RuntimeError: the build failed, and ``ENSEMBLAYERS_NATIVE=1`` asks for it.
    """
    wish = os.environ.get("ENSEMBLAYERS_NATIVE", "")
    if wish == "0":
        return False
    try:
        _load()
    except Exception as error:
        if wish == "1":
            raise RuntimeError(f"the C++ kernels can't be built: {error}") from error
        _LOG.debug("no C++ kernels, plain PyTorch instead: %s", error)
        return False
    return True


def _load() -> None:
    library = _library()
    try:
        torch.ops.load_library(str(library))
    except OSError:
        # Damaged, or of a machine that the cache folder was copied from.
        library.unlink()
        torch.ops.load_library(str(_library()))


def sources() -> list[Path]:
    """The C++ sources and their headers: of the checkout, or those that a wheel carries."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        found = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
        if found:
            return found
    raise FileNotFoundError("no C++ sources beside the package")


def _library() -> Path:
    """The compiled library for these sources, flags, compiler, processor and torch."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise FileNotFoundError("no C++ compiler: g++, clang++ or $CXX")
    compiler = shlex.split(found)
    root = Path(torch.__file__).parent
    key = hashlib.sha256()
    for part in (
        *compiler,
        _version(compiler),
        *_FLAGS,
        torch.__version__,
        str(root),
        _processor(),
    ):
        key.update(part.encode())
    for source in sources():
        key.update(source.read_bytes())
    default = Path.home() / ".cache" / "ensemblayers"
    cache = Path(os.environ.get("ENSEMBLAYERS_CACHE", default))
    library = cache / f"ensemblayers-{key.hexdigest()[:16]}.so"
    if not library.exists():
        _build(compiler, root, library)
    return library


def _build(compiler: list[str], root: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Built aside and renamed: processes that build at the same time don't see half a library.
    with tempfile.TemporaryDirectory(dir=library.parent) as aside:
        units = [source for source in sources() if source.suffix == ".cpp"]
        objects = [str(Path(aside) / f"{source.stem}.o") for source in units]
        compiled = [*compiler, *_FLAGS, f"-I{root / 'include'}", "-c"]
        with ThreadPoolExecutor() as pool:
            commands = zip(units, objects, strict=True)
            list(pool.map(_run, ([*compiled, str(unit), "-o", o] for unit, o in commands)))
        out = Path(aside) / library.name
        _run([*compiler, "-shared", *objects, f"-L{root / 'lib'}", "-ltorch_cpu", "-o", str(out)])
        os.replace(out, library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def _version(compiler: list[str]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout


def _processor() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        import platform

        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
