"""The compiled core: loaded once, chosen by SLIPSTREAM_KERNELS, its threads set by SLIPSTREAM_THREADS.

`core` is None where the package was built without a compiler, or with SLIPSTREAM_KERNELS=numpy; then the numpy twins
serve, with the same bits and hundreds of times slower.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

from slipstream.core.errors import InputError, StaleBuildError

MAX_THREADS = 256
INTERFACE = 6
"""Version of the compiled core's functions and of the memory both sides share; raise it whenever either changes.

CMake reads this line and compiles the number in, so that a core older or newer than this code is refused at import.
"""


def _load() -> Any:
    """The compiled module, set up as the environment says, or None. Raises InputError for a bad setting."""
    choice = os.environ.get("SLIPSTREAM_KERNELS", "").strip().lower() or "auto"
    if choice == "numpy":
        return None
    try:
        module = importlib.import_module("slipstream.kernels._core")
    except ImportError:
        module = None
    names = ["auto", *(module.available_kernels() if module else ()), "numpy"]
    if choice not in names:
        raise InputError(f"SLIPSTREAM_KERNELS={choice!r} cannot run here; use one of {', '.join(names)}")
    if module is not None:
        _check_interface(module)
        module.select_kernels(choice)
        wanted = os.environ.get("SLIPSTREAM_THREADS", "").strip()
        if wanted:
            module.set_threads(_thread_count(wanted, "SLIPSTREAM_THREADS"))
    return module


def _check_interface(module: Any) -> None:
    """Raise StaleBuildError unless the compiled core was built for this code."""
    built = getattr(module, "interface", None)
    if built != INTERFACE:
        raise StaleBuildError(
            f"the compiled core has interface {built}, this code needs {INTERFACE}: it was built from other sources; "
            "run `make build` (or `pip install --force-reinstall` slipstream)"
        )


def _thread_count(value: int | str, name: str) -> int:
    """`value` as a number of threads. Raises InputError naming the setting."""
    try:
        count = int(value)
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_THREADS:
        raise InputError(f"{name}={value!r} is not a number of threads; use 1 to {MAX_THREADS}")
    return count


core: Any = _load()
threads_settled = bool(os.environ.get("SLIPSTREAM_THREADS", "").strip())
"""True once the number of threads has been named by somebody, or measured."""
_warned = False


def warn_if_slow() -> None:
    """Say once that the numpy kernels serve because there is no compiled core (silent when they were asked for)."""
    global _warned
    if core is None and not _warned and os.environ.get("SLIPSTREAM_KERNELS", "").strip().lower() != "numpy":
        _warned = True
        warnings.warn(
            "slipstream was installed without its compiled kernels and runs on numpy, hundreds of times slower; "
            "install g++ or clang++ and reinstall it",
            RuntimeWarning,
            stacklevel=3,
        )


def active() -> str:
    """Name of the kernels in use: avx512, avx2, neon, generic or numpy."""
    return "numpy" if core is None else str(core.active_kernels())


def threads() -> int:
    """Threads a kernel runs on."""
    return 1 if core is None else int(core.threads())


def set_threads(count: int) -> None:
    """Run kernels on `count` threads (1 to 256) from now on, in the whole process. Raises InputError."""
    global threads_settled
    count = _thread_count(count, "threads")
    threads_settled = True
    if core is not None:
        core.set_threads(count)


def info() -> dict[str, Any]:
    """Kernels in use, those this CPU can run, threads, whether compiled, version of the core and of the tile layout."""
    return {
        "kernels": active(),
        "available": [*(core.available_kernels() if core is not None else ()), "numpy"],
        "compiled": core is not None,
        "threads": threads(),
        "version": str(core.version) if core is not None else "",
        "layout_version": int(core.layout_version) if core is not None else 0,
    }
