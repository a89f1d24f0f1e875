"""Which runtime runs a model, and why; nothing of torch is imported before it is chosen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.core.errors import InputError

if TYPE_CHECKING:
    from slipstream.models.files import ModelFile
    from slipstream.targets.base import Target

RUNTIMES = ("native", "transformers")


@dataclass(frozen=True, slots=True)
class Choice:
    """A runtime by name, the reason in words, and where and in which type it runs (for transformers)."""

    name: str
    reason: str
    device: str | None = None
    dtype: str | None = None


def choose(file: ModelFile, runtime: str | None = None, device: str | None = None, dtype: str | None = None) -> Choice:
    """Native where it can do what is asked for, else transformers. runtime: None lets this function decide.

    device: None or cpu, or what only transformers has (cuda, cuda:1, mps, auto). dtype: None keeps the weights as they
    are. Raises InputError for settings that contradict each other, UnsupportedError where native is insisted on.
    """
    from slipstream.targets.native.load import require_supported, unsupported

    if runtime is not None and runtime not in RUNTIMES:
        raise InputError(f"unknown runtime {runtime!r}; choose one of: {', '.join(RUNTIMES)}")
    wanted = [f"{name} {value}" for name, value in (("device", device), ("dtype", dtype)) if value not in (None, "cpu")]
    if runtime == "native" and wanted:
        raise InputError(f"the native runtime has no {wanted[0]}; it runs on the CPU in the file's own weight types")
    if runtime == "transformers":
        return Choice("transformers", "asked for", device, dtype)
    if wanted:
        return Choice("transformers", f"{' and '.join(wanted)} asked for", device, dtype)
    if runtime == "native":
        require_supported(file.config)
        return Choice("native", "asked for")
    missing = unsupported(file.config)
    if missing is not None:
        return Choice("transformers", f"native has no {missing}", device, dtype)
    return Choice("native", f"architecture {file.config.architecture} is of the Llama family, weights are readable")


def load(
    file: ModelFile,
    choice: Choice,
    max_context: int | None,
    slots: int,
    threads: int | None,
    features: Sequence[int] = (),
) -> Target:
    """The model in the chosen runtime. threads: for the whole process; None: by a short measurement.

    features: layers whose input hidden states passes return.

    Raises ModelError when the runtime is not installed.
    """
    from slipstream.kernels import measure, native

    if choice.name == "transformers":
        from slipstream.targets.transformers.require import require_torch

        require_torch()
    if threads is not None:
        native.set_threads(threads)
    elif choice.device in (None, "cpu"):
        measure.settle_threads()
    if choice.name == "native":
        from slipstream.targets.native.model import NativeTarget

        native.warn_if_slow()
        return NativeTarget.load(file, max_context, slots, features)
    import torch

    from slipstream.targets.transformers.loading import Placement
    from slipstream.targets.transformers.model import TransformersTarget

    if threads is not None:
        torch.set_num_threads(threads)
    placement = Placement(choice.device, choice.dtype, graphs=os.environ.get("SLIPSTREAM_GRAPHS") or None)
    return TransformersTarget.load(file, max_context, slots, features, placement)
