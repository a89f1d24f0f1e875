"""Building without a compiler still gives a package that works, on numpy, and says so once."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USE = """
import numpy as np
from slipstream import kernels
rng = np.random.default_rng(0)
packed = [kernels.pack("F32", rng.standard_normal((5, 16)).astype(np.float32).view(np.uint8), 16) for _ in range(2)]
print(kernels.info()["kernels"], kernels.linear(np.ones((2, 16), np.float32), packed[1]).tobytes().hex())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The package as installed where no compiler works."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("csrc", "src"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environment = {"PATH": "/usr/bin:/bin", "CXX": "/bin/false", "HOME": str(source)}
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", wheels]
    done = subprocess.run([*command, source], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(site)
    return site


def use(site, **env):
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(site)!r}, *{sys.path!r}]\n{USE}"],
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_compiler_the_package_runs_on_numpy_and_says_so_once(site):
    done = use(site)
    kind, values = done.stdout.split()
    assert kind == "numpy"
    assert done.stderr.count("runs on numpy, hundreds of times slower; install g++") == 1
    quiet = use(site, SLIPSTREAM_KERNELS="numpy")
    assert quiet.stdout.split() == ["numpy", values]
    assert quiet.stderr == ""


def test_without_a_compiler_compiled_kernels_are_refused(site):
    done = use(site, SLIPSTREAM_KERNELS="avx2")
    assert "SLIPSTREAM_KERNELS='avx2' cannot run here; use one of auto, numpy" in done.stderr
