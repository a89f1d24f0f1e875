"""What measurements ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """The processor, its cores, the system and Python, as results keep them."""
    about = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    return {"cpu": cpu_name(), **about}


def cpu_name() -> str:
    """The processor, with family and model, because servers hide its full name, and the widest vectors it has."""
    known: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        key, _, value = line.partition(":")
        known.setdefault(key.strip(), value.strip())
    if "model name" not in known:
        return platform.processor() or platform.machine()
    flags = known.get("flags", "").split()
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    return f"{known['model name']} (family {known.get('cpu family')}, model {known.get('model')}, {vectors})"
