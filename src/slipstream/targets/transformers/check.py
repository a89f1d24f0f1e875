"""A few passes at load that prove the target right: trees, commits and batches against the model's own forward."""

from __future__ import annotations

import logging
from typing import Any

import torch

from slipstream.core.errors import UnsupportedError
from slipstream.core.tree import Draft
from slipstream.targets.base import RowInput
from slipstream.targets.transformers import passes
from slipstream.targets.transformers.linears import on_core, pack_linears
from slipstream.targets.transformers.require import has_windows

log = logging.getLogger("slipstream")

TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-6}
"""Largest difference of logits relative to the largest logit; a wrong mask or position exceeds it by far."""
ROUGH = 0.2
"""The same for 16-bit types."""
TREE = Draft([5, 6, 7, 3], [-1, -1, 1, 2])
"""Two children of the anchor, the second with a child and a grandchild."""


def adopt(target: Any, pack: bool = True) -> None:
    """Choose the way passes are run, pack linears on the CPU, and prove both. Raises UnsupportedError.

    Our attention is preferred; a model that does not take it, or answers wrongly with it, gets 4-D masks, unless it
    has sliding windows, which a 4-D mask would switch off without a word. target: a TransformersTarget in the making.
    """
    prompt = [token % target.vocab_size for token in (11, 7, 2, 9, 4, 8)]
    model, before = target.model, target.model.config._attn_implementation
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # releases of transformers differ in whether sdpa caps scores
    expected = _reference(target, prompt)
    if pack and target.device.type == "cpu" and not hasattr(model, "hf_device_map"):
        target.packed, target.on_core = pack_linears(model), on_core(model)
    problem = "it does not take its attention from transformers' interface"
    if model._can_set_attn_implementation():
        passes.register()
        model.set_attn_implementation(passes.NAME)
        target.by_interface = True
        found = _difference(target, prompt, expected)
        if found is None:
            return
        problem, target.by_interface = found, False
        model.set_attn_implementation(before)
    if has_windows(model.config):
        kind = model.config.model_type
        raise UnsupportedError(
            f"the transformers target does not support model type {kind!r}: its sliding windows need our attention, "
            f"but {problem}"
        )
    log.debug("%s runs with 4-D masks: %s", target.name, problem)
    found = _difference(target, prompt, expected)
    if found is not None:
        kind = model.config.model_type
        raise UnsupportedError(f"the transformers target does not support model type {kind!r}: {found}")


def _reference(target: Any, prompt: list[int]) -> list[Any]:
    """Logits after the prompt and each node of the tree, from the untouched model without a cache."""
    rows = {}
    for leaf in (0, 3):
        tokens = [*prompt, *TREE.path_tokens(leaf)]
        with torch.inference_mode():
            ids = torch.tensor([tokens]).to(target.device)
            logits = target.model(input_ids=ids, use_cache=False).logits[0, :, : target.vocab_size].float().cpu()
        rows[-1] = logits[len(prompt) - 1]
        for depth, node in enumerate(TREE.path(leaf)):
            rows[node] = logits[len(prompt) + depth]
    return [rows[node] for node in range(-1, len(TREE))]


def _difference(target: Any, prompt: list[int], expected: list[Any]) -> str | None:
    """What the target does otherwise than the model alone; None when nothing."""
    slots = [target.open(), target.open()] if target.free_slots > 1 else [target.open()]
    try:
        for place, slot in enumerate(slots):
            target.prefill(slot, prompt[: len(prompt) - 1 - place])
        inputs = [
            RowInput(slots[0], prompt[-1], TREE),
            *(RowInput(slot, prompt[-2], Draft([prompt[-1]], [-1])) for slot in slots[1:]),
        ]
        trees = target.forward(inputs)
        if len(slots) > 1 and _differs(target, trees.logits[1][1], expected[0]):
            return "rows of a batch disturb each other"
        if any(_differs(target, row, right) for row, right in zip(trees.logits[0], expected, strict=True)):
            return "its passes over draft trees differ from its own forward"
        target.commit([[1, 2], *([0] for _ in slots[1:])])
        after = target.forward([RowInput(slots[0], TREE.tokens[3])])
        if _differs(target, after.logits[0][0], expected[4]):
            return "its cache rows after a commit differ from those of a fresh prompt"
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        return f"its forward fails with our cache ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    finally:
        for slot in slots:
            target.close(slot)
    return None


def _differs(target: Any, found: Any, right: Any) -> bool:
    padding = target.padding_ids
    ours = torch.as_tensor(found).clone()
    if padding is not None:
        ours[padding] = right[padding]
    bar = TOLERANCE.get(target.dtype, ROUGH)
    return not bool((ours - right).abs().max() <= bar * right.abs().max().clamp_min(1e-3))
