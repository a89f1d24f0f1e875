"""From a name to a loaded model: where it goes, in which type, and what is refused before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.core.errors import InputError, ModelError
from slipstream.models.home import typed
from slipstream.targets.transformers.require import require_supported

if TYPE_CHECKING:
    from slipstream.models.files import ModelFile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device settings that spread a model over all devices (with accelerate)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model goes.

    device: cpu, cuda, cuda:1, mps, or auto (and the other maps of accelerate) to spread it; None is the CPU. dtype:
    float32, bfloat16, float16 or their short names; None keeps that of the weights, but float16 becomes float32 on
    the CPU. pack: on the CPU, pack linear layers where that agrees. graphs: cuda to replay passes over one
    answer as CUDA graphs.
    """

    device: str | None = None
    dtype: str | None = None
    pack: bool = True
    graphs: str | None = None

    def torch_dtype(self) -> Any:
        """The type for transformers; "auto" for that of the weights. Raises InputError."""
        if self.dtype is None:
            return "auto"
        name = SHORT.get(self.dtype, self.dtype)
        if name not in DTYPES:
            raise InputError(f"dtype is {self.dtype!r}; choose one of: {', '.join(DTYPES)}")
        return DTYPES[name]

    def check(self) -> None:
        """Raise InputError for a device that this machine or this torch does not have."""
        if self.device is None or self.device in SPREAD:
            return
        try:
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"device {self.device!r} cannot be used ({reason}); choose cpu, cuda, mps or auto"
            ) from None


def load_model(model: str | Path | ModelFile, placement: Placement) -> tuple[Any, str, Sequence[int]]:
    """A loaded model in evaluation mode, its name, and the ids that are no tokens. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    placement.check()
    dtype = placement.torch_dtype()
    path, name, padding = _source(model)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    spread = {"device_map": placement.device} if placement.device in SPREAD else {}
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(**where)
        require_supported(config)
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, **spread)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"transformers cannot load {name}: {reason[:300]}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if not spread:
        if placement.dtype is None and placement.device in (None, "cpu") and loaded.dtype == torch.float16:
            loaded = loaded.float()
        loaded = loaded.to(placement.device or "cpu")
    return loaded.eval(), name, padding


def _source(model: str | Path | ModelFile) -> tuple[Path, str, Sequence[int]]:
    """Path, name and padding ids. What is no file here is left to transformers as the id of a hub."""
    if isinstance(model, (str, Path)):
        path = typed(model)
        return (path, path.name, ()) if path.exists() else (Path(model), str(model), ())
    return model.path, model.name, model.config.padding_ids
