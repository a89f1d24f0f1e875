"""Attention, norms, rope and activations on NEON (under qemu) against the generic kernels, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent / "csrc"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None, reason=f"needs {COMPILER} and {EMULATOR}"
)
def test_neon_ops_equal_generic_ones(tmp_path):
    parts = ["check/equal_ops", "dispatch", "pool", "pack", "linear"]
    parts += [f"{kind}_{name}" for kind in ("isa", "linear") for name in ("neon", "generic")]
    flags = ["-std=c++20", "-O2", "-static", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-DSLIPSTREAM_NEON=1"]
    program = tmp_path / "equal_ops"
    sources = [SOURCES / f"{part}.cpp" for part in parts]
    subprocess.run([COMPILER, *flags, *sources, "-o", program], check=True, capture_output=True)
    ran = subprocess.run([EMULATOR, program], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["neon: equal", "generic: equal"]
    assert ran.returncode == 0
