"""A compiled core that was built from other sources is refused at import, with one line that names the remedy."""

import subprocess
import sys
import types

import pytest

from slipstream.core.errors import StaleBuildError
from slipstream.kernels import native

REMEDY = "run `make build`"
STALE = """
import sys, types
core = types.ModuleType("slipstream.kernels._core")
core.available_kernels = lambda: ["generic"]
{attribute}
sys.modules["slipstream.kernels._core"] = core
import importlib
real = importlib.import_module
importlib.import_module = lambda name, *rest: core if name == "slipstream.kernels._core" else real(name, *rest)
{use}
"""


def python(attribute, use, **env):
    return subprocess.run(
        [sys.executable, "-c", STALE.format(attribute=attribute, use=use)],
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(native.core is None, reason="there is no compiled core")
def test_the_core_in_use_was_built_for_this_code():
    assert native.core.interface == native.INTERFACE


@pytest.mark.parametrize("built", [None, native.INTERFACE - 1, native.INTERFACE + 1])
def test_planted_core_of_other_sources_is_refused_with_the_remedy(monkeypatch, built):
    core = types.SimpleNamespace(available_kernels=lambda: ["generic"])
    if built is not None:
        core.interface = built
    monkeypatch.delenv("SLIPSTREAM_KERNELS", raising=False)
    monkeypatch.setattr(native.importlib, "import_module", lambda name: core)
    with pytest.raises(StaleBuildError, match=f"interface {built}, this code needs {native.INTERFACE}.*{REMEDY}"):
        native._load()


def test_a_stale_core_ends_the_import_not_a_later_call():
    done = python("", "import slipstream.kernels")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("slipstream.core.errors.StaleBuildError: the compiled core has")
    assert REMEDY in done.stderr


def test_with_numpy_asked_for_the_compiled_core_is_left_alone():
    done = python("", "import slipstream.kernels as k; print(k.info()['kernels'])", SLIPSTREAM_KERNELS="numpy")
    assert done.stdout.split() == ["numpy"]
