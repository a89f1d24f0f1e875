"""The NEON kernels, cross-compiled and run under qemu: equal to the generic ones, bit for bit."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
FLAGS = ["-std=c++20", "-O2", "-static", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-DSLIPSTREAM_NEON=1"]
UNITS = ["dispatch", "pool", "pack", "linear"]
UNITS += [f"{part}_{name}" for part in ("isa", "linear") for name in ("neon", "generic")]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.full
@pytest.mark.skipif(not (COMPILER and EMULATOR), reason="needs Debian's g++-aarch64-linux-gnu and qemu-user")
@pytest.mark.parametrize("check", ["equal_kernels", "equal_ops"])
def test_neon_equals_generic(check, tmp_path):
    """equal_kernels: matrix products; equal_ops: attention over trees, norms, rope, activations."""
    program = tmp_path / check
    sources = [CSRC / f"{unit}.cpp" for unit in (f"check/{check}", *UNITS)]
    subprocess.run([COMPILER, *FLAGS, *sources, "-o", program], check=True, timeout=500)
    done = run(EMULATOR, program)
    assert done.stdout.splitlines() == ["neon: equal", "generic: equal"]
    assert done.returncode == 0
    if check == "equal_kernels":
        planted = run(EMULATOR, program, "plant")
        assert planted.returncode == 1
        assert "neon: DIFFERENT" in planted.stdout
