"""The NEON kernels, cross-compiled and run under qemu: equal to the generic ones, bit for bit."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
UNITS = ["check/equal_kernels", "dispatch", "pool", "pack", "linear"]
UNITS += [f"{part}_{name}" for part in ("isa", "linear") for name in ("neon", "generic")]


@pytest.mark.full
@pytest.mark.skipif(not (COMPILER and EMULATOR), reason="needs Debian's g++-aarch64-linux-gnu and qemu-user")
def test_neon_equals_generic(tmp_path):
    flags = ["-std=c++20", "-O2", "-static", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-DSLIPSTREAM_NEON=1"]
    sources = [str(CSRC / f"{unit}.cpp") for unit in UNITS]
    subprocess.run([COMPILER, *flags, *sources, "-o", tmp_path / "equal"], check=True, timeout=500)
    run = [EMULATOR, tmp_path / "equal"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["neon: equal", "generic: equal"]
    assert done.returncode == 0
    planted = subprocess.run([*run, "plant"], capture_output=True, text=True, timeout=300, check=False)
    assert planted.returncode == 1
    assert "neon: DIFFERENT" in planted.stdout
