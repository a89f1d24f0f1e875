"""The transformers target: any causal language model of Hugging Face behind the target protocol."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.core.errors import InputError
from slipstream.core.tree import ANCHOR
from slipstream.kernels import native
from slipstream.targets.base import PassOutput, Read, RowInput
from slipstream.targets.transformers import passes
from slipstream.targets.transformers.cache import LayerShape, SlotCache
from slipstream.targets.transformers.check import adopt
from slipstream.targets.transformers.features import FeatureTap
from slipstream.targets.transformers.fixed import FixedPass, FixedRunner, width_of
from slipstream.targets.transformers.linears import PACKED, SMALL_WORK, one_thread
from slipstream.targets.transformers.loading import Placement, load_model
from slipstream.targets.transformers.logits import Drawer, OnDevice, Rows
from slipstream.targets.transformers.passes import Pass, PassRow
from slipstream.targets.transformers.require import longest_context

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.models.files import ModelFile

PREFILL_ROWS = 512
"""Rows per prefill pass."""


class TransformersTarget:
    """Implements `targets.base.Target`. One pass runs at a time; the object is not for use by several threads at once.

    model: a loaded transformers model for causal language modelling, from now on this object's own: its attention is
    replaced, and on the CPU its linear layers (`pack`). padding: ids that are no tokens. on_device: draw tokens where
    the logits lie (None: when that is not the CPU). graphs: cuda to replay passes over one slot as CUDA graphs.
    Raises UnsupportedError when the model's passes would not be exact.
    """

    row_invariant = False
    reads_along = False

    def __init__(
        self,
        model: Any,
        name: str = "",
        max_context: int | None = None,
        slots: int = 64,
        features: Sequence[int] = (),
        *,
        padding: Sequence[int] = (),
        pack: bool = True,
        on_device: bool | None = None,
        graphs: str | None = None,
    ) -> None:
        longest = longest_context(model.config)
        if max_context is not None and not 0 < max_context <= longest:
            raise InputError(f"max_context is {max_context}; the model allows 1 to {longest}")
        self.model, self.name = model, name or model.config.name_or_path or model.config.model_type
        self.max_context = max_context or longest
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.get_input_embeddings().weight.dtype
        self.by_interface = False
        self.packed = 0
        """Linear layers packed at load."""
        self.on_core = False
        """Whether packed ones run on the compiled core."""
        self._names = _argument_names(model)
        self._cache = SlotCache(slots, self.max_context)
        self._layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self.vocab_size = self._record()
        self._padding = torch.tensor(sorted(padding), dtype=torch.long) if padding else None
        self._tap = FeatureTap(model, features)
        # MPS has no float64, which the draw needs.
        self._on_device = self.device.type not in ("cpu", "mps") if on_device is None else on_device
        self._pending: list[PassRow] = []
        self._debug = os.environ.get("SLIPSTREAM_DEBUG") == "1"
        self._fixed: FixedRunner | None = None
        adopt(self, pack)
        if graphs is not None:
            self._fixed = FixedRunner(self._run_fixed, self._cache, self.device, graphs)

    @classmethod
    def load(
        cls,
        model: str | Path | ModelFile,
        max_context: int | None = None,
        slots: int = 64,
        features: Sequence[int] = (),
        placement: Placement | None = None,
    ) -> TransformersTarget:
        """Open a folder, a GGUF file, a hub id or an opened model file, load its weights and check a few passes.

        Raises UnsupportedError, naming the reason, before reading weights where the configuration shows it.
        """
        placement = placement or Placement()
        loaded, name, padding = load_model(model, placement)
        return cls(
            loaded, name, max_context, slots, features, padding=padding, pack=placement.pack, graphs=placement.graphs
        )

    def share(self, max_context: int, slots: int) -> TransformersTarget:
        """Another target over the same model, with a cache of its own and no features; passes of the two take turns."""
        if not 0 < max_context <= self.max_context:
            raise InputError(f"max_context is {max_context}; the model allows 1 to {self.max_context}")
        other = copy(self)
        other.max_context, other._pending = max_context, []
        other._cache = self._cache.alike(slots, max_context)
        other._tap = FeatureTap(self.model, ())
        if self._fixed is not None:
            other._fixed = FixedRunner(other._run_fixed, other._cache, self.device, self._fixed.mode)
        return other

    @property
    def weights_bytes(self) -> int:
        """Memory of the parameters, packed ones included."""
        own = {id(weight): weight.numel() * weight.element_size() for weight in self.model.parameters()}
        packed = sum(
            module.in_features * module.out_features * module.dtype.itemsize
            for module in self.model.modules()
            if isinstance(module, PACKED)
        )
        return sum(own.values()) + packed

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory of one position."""
        return self._cache.row_bytes

    @property
    def padding_ids(self) -> Any:
        """Ids that are no tokens, as a tensor; None when all are."""
        return self._padding

    @property
    def features_width(self) -> int:
        """Floats per row of the features; 0 when none were asked for."""
        return self._tap.width

    @property
    def free_slots(self) -> int:
        """Slots that can still be opened."""
        return self._cache.free

    def kernels(self) -> str:
        """What runs the passes, for people."""
        attention = "own attention" if self.by_interface else "4-D masks"
        packed = f", linears on {native.active() if self.on_core else 'oneDNN'}" if self.packed else ""
        return (
            f"torch {torch.__version__} on {self.device}, {str(self.dtype).removeprefix('torch.')}, {attention}{packed}"
        )

    def threads(self) -> int:
        """Threads of torch on the CPU."""
        return int(torch.get_num_threads())

    def wait(self) -> None:
        """Return when the device has done all it was given (for clocks)."""
        if self.device.type in ("cuda", "mps", "xpu"):
            getattr(torch, self.device.type).synchronize()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the weights, of the cache buffers that open slots hold, and of those they may still take."""
        used, row = self._cache.capacity, self._cache.row_bytes
        most = self._cache.slots * self.max_context
        return {"weights": self.weights_bytes, "kv_used": used * row, "kv_free": max(0, most - used) * row}

    def open(self) -> int:
        """A free slot of length 0. Raises InputError when all are taken."""
        return self._cache.open()

    def close(self, slot: int) -> None:
        """Give the slot and its memory back."""
        self._cache.close(slot)

    def length(self, slot: int) -> int:
        """Tokens in the slot's cache."""
        return self._cache.length(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self._cache.truncate(slot, length)

    def fork(self, slot: int, length: int) -> int:
        """A new slot that starts with a copy of the first `length` tokens of `slot`."""
        with torch.inference_mode():
            return self._cache.fork(slot, length)

    def prefill(self, slot: int, tokens: Sequence[int], last: int | None = None) -> NDArray[np.float32] | None:
        """Append tokens to the cache without logits.

        Returns their features [tokens, width], or those of the `last` ones, when features were asked for at load.
        """
        self._check_tokens(tokens)
        before = 0 if last is None else len(tokens) - last  # tokens whose features nobody wants
        made = []
        self._pending = []
        for start in range(0, len(tokens), PREFILL_ROWS):
            part = tokens[start : start + PREFILL_ROWS]
            row = PassRow(slot, 0, len(part), self._cache.length(slot))
            with torch.inference_mode():
                self._cache.reserve(slot, len(part), len(part))
                self._call(self.model.base_model, [row], part)
                self._cache.commit(slot, range(len(part)))
                made.append(self._tap.take(max(0, before - start)))
        if not self._tap.width:
            return None
        return np.concatenate([part.cpu().numpy() for part in made] or [np.empty((0, self._tap.width), np.float32)])

    def forward(self, rows: Sequence[RowInput], reads: Sequence[Read] = ()) -> PassOutput:
        """One pass over the anchors and all nodes of all rows; each node attends to its prefix and its ancestors.

        reads: parts of prompts to read before it.
        """
        read = [self.prefill(one.slot, one.tokens, one.last) for one in reads]
        tokens = [token for row in rows for token in (row.anchor, *row.draft.tokens)]
        self._check_tokens(tokens)
        slots = [row.slot for row in rows]
        if not slots or len(set(slots)) != len(slots):
            raise InputError(f"a pass needs rows of distinct slots, got slots {slots}")
        with torch.inference_mode():
            plan = self._plan(rows)
            logits = self._logits(plan, tokens)[:, : self.vocab_size].float()
            if self._padding is not None:
                logits[:, self._padding.to(logits.device)] = -torch.inf
            features = self._tap.take()
        self._pending = plan
        spans = [slice(row.start, row.stop) for row in plan]
        output = self._output(logits, features, spans)
        output.read = read
        return output

    def _plan(self, rows: Sequence[RowInput]) -> list[PassRow]:
        bounds = np.cumsum([0, *(1 + len(row.draft) for row in rows)]).tolist()
        plan = []
        for row, (start, stop) in zip(rows, pairwise(bounds), strict=True):
            room = stop - start if self._fixed is None else width_of(stop - start) or stop - start
            self._cache.reserve(row.slot, room, 1 + max(row.draft.depths(), default=0))
            plan.append(PassRow(row.slot, start, stop, self._cache.length(row.slot), row.draft))
        return plan

    def _output(self, logits: Any, features: Any, spans: Sequence[slice]) -> PassOutput:
        """On the CPU arrays that share the tensors' memory, elsewhere rows that come to the host when read."""
        if self._on_device:
            whole, seen = OnDevice(logits), None if features is None else OnDevice(features)
            lazy: list[Any] = [Rows(whole, span.start, span.stop) for span in spans]
            kept: list[Any] | None = None if seen is None else [Rows(seen, span.start, span.stop) for span in spans]
            return PassOutput(lazy, kept, Drawer(logits, spans))
        host = logits.cpu().numpy()
        given = None if features is None else features.cpu().numpy()
        return PassOutput([host[span] for span in spans], None if given is None else [given[span] for span in spans])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, per row of the last pass, the anchor and the nodes of this path (in depth order)."""
        if len(paths) != len(self._pending):
            raise InputError(f"commit got {len(paths)} paths for a pass over {len(self._pending)} rows")
        with torch.inference_mode():
            for path, row in zip(paths, self._pending, strict=True):
                if self._debug and row.draft is not None:
                    above = [row.draft.parents[node] for node in path]
                    assert above == [ANCHOR, *path][: len(path)], "a committed path skips a node"
                self._cache.commit(row.slot, [0, *(node + 1 for node in path)])
        self._pending = []

    def _logits(self, rows: Sequence[PassRow], tokens: Sequence[int]) -> Any:
        """Logits [rows of the pass, head]; one slot's in recorded form when that is on."""
        if self._fixed is not None and len(rows) == 1 and self.by_interface and not self._tap.width:
            made = self._fixed(tokens, rows[0])
            if made is not None:
                return made
        return self._call(self.model, rows, tokens).logits[0]

    def _run_fixed(self, plan: FixedPass) -> Any:
        return self._run(self.model, plan, plan.ids, None).logits

    def _call(self, model: Any, rows: Sequence[PassRow], tokens: Sequence[int]) -> Any:
        plan = Pass(rows, self._cache, self.device, self.by_interface)
        ids = torch.tensor([list(tokens)]).to(self.device, non_blocking=True)
        mask = None if self.by_interface else plan.block_mask(self.dtype)
        return self._run(model, plan, ids, mask)

    def _run(self, model: Any, plan: Pass | FixedPass, ids: Any, mask: Any) -> Any:
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": True, "return_dict": True}
        if "position_ids" in self._names:
            given["position_ids"] = plan.positions
        work = sum(row.count * (row.length + row.count) for row in plan.rows)
        with one_thread(self.on_core and work <= SMALL_WORK), passes.running(plan, self._layers) as cache:
            given["cache" if "cache" in self._names else "past_key_values"] = cache
            return model(**given)

    def _record(self) -> int:
        """Run two tokens to learn what the layers store; returns the width of the head."""
        shapes: dict[int, LayerShape] = {}
        with torch.inference_mode():
            plan = Pass([PassRow(0, 0, 2, 0)], self._cache, self.device, False, recorded=shapes)
            ids = torch.tensor([[0, 1]]).to(self.device)
            out = self._run(self.model, plan, ids, plan.block_mask(self.dtype))
        self._cache.describe(shapes)
        return int(out.logits.shape[-1])

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InputError(f"token id {wrong} is outside the vocabulary (0 to {self.vocab_size - 1})")


def _argument_names(model: Any) -> set[str]:
    """Names that the model's forward takes; transformers renames its cache argument between releases."""
    return set(inspect.signature(model.forward).parameters)
