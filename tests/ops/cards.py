"""Kernels compiled for cards that need not be there, and what they take of them."""

import re
import subprocess
from pathlib import Path

import pytest

# (Backend, architecture, threads a warp), with the bytes of shared memory that a program may use.
CARDS = {
    ("cuda", 80, 32): 163 * 1024,
    ("cuda", 90, 32): 227 * 1024,
    ("hip", "gfx942", 64): 64 * 1024,
}


def compiled(kernel, card, signature, constants, **options):
    """Compile a kernel, its pointers aligned to 16 bytes, for a card; skip where Triton can't.

    Args:
        signature: types of the arguments that are no constants; an integer that divides by 16 is
            marked by a trailing ``:16``.
    """
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if {"cuda": "nvidia", "hip": "amd"}[card[0]] not in backends:
        pytest.skip(f"this Triton has no backend for {card[0]}")
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    types = {a: "constexpr" if a in constants else signature[a] for a in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, p in enumerate(kernel.params)
        if types[p.name].endswith(":16")
        or (types[p.name].startswith("*") and not p.do_not_specialize_on_alignment)
    }
    types = {k: v.removesuffix(":16") for k, v in types.items()}
    source = ASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=GPUTarget(*card), options=options)


def resources(kernel, card, folder):
    """Registers a thread and bytes spilled of a compiled kernel."""
    if card[0] == "cuda":
        return _nvidia(kernel.asm["cubin"], folder / "kernel.cubin")
    return _amd(kernel.asm["amdgcn"])


def _nvidia(code, path):
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("no cuobjdump in this Triton")
    path.write_bytes(code)
    command = [tool, "--dump-resource-usage", path]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", out).groups()
    return int(registers), int(stack) + int(local)


def _amd(assembly):
    def number(name):
        return int(re.search(rf"{name}:\s+(\d+)", assembly)[1])

    # Scalar registers may move to lanes of a vector register, which is no memory.
    return number(r"\.vgpr_count"), number(r"\.vgpr_spill_count") + number("ScratchSize")
