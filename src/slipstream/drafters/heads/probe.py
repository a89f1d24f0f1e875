"""A short trial of a head on its target's own text: a head that loads but does not fit is named, with what would help.

Such a head never spoils an answer; its guesses are just wrong. So it is tried once per head and target, on the greedy
answer to a built-in prompt, and where hardly a guess is right the likely causes are tried one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.drafters.heads.medusa import Medusa
from slipstream.drafters.heads.parts import TargetParts
from slipstream.drafters.heads.weights import eagle_weights, rope_of
from slipstream.kernels.head import make_eagle_head
from slipstream.kernels.passes import BLOCK, Pass
from slipstream.models.heads.head import Head
from slipstream.targets.base import RowInput

if TYPE_CHECKING:
    from slipstream.targets.base import Target

log = logging.getLogger(__name__)

PROMPT = "Explain in a few paragraphs how a rainbow forms. Then tell a short story about a child who sees one."
TOKENS = 160
NEAR_ZERO = 0.05
"""A head below this on its target's own text does not fit; untrained ones are right about once in a thousand times."""
DOUBTFUL = 0.25
"""Below this the likely causes are tried too: a head that is read wrongly may still be right now and then."""
BETTER = 1.5
"""A change that makes so many times more guesses right is what is wrong."""
CHUNK = 256

Read = Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]
"""(layers, tokens) to features [tokens, width]."""


@dataclass(frozen=True, slots=True)
class Trial:
    """rate: share of guesses of the next token that were right; count: guesses. remedy: what would make it `better`."""

    rate: float
    count: int
    remedy: str = ""
    better: float = 0.0

    @property
    def useless(self) -> bool:
        """True when the head does not fit, or would be much better read otherwise."""
        return self.count > 0 and (self.rate < NEAR_ZERO or bool(self.remedy))

    def message(self, name: str) -> str:
        """What to tell the user of a useless head."""
        text = f"{name}: of {self.count} guesses on the model's own text {self.rate:.0%} were right; it does not fit"
        if self.remedy:
            return f"{text}. With {self.remedy} {self.better:.0%} are right: correct its config.json"
        return (
            f"{text}. The other norm flag and shifted layer ids do not help: "
            "it may belong to another model, or never have been trained"
        )


def own_text(target: Target, prompt: Sequence[int], count: int = TOKENS) -> list[int]:
    """The prompt and the target's plain greedy answer to it."""
    tokens, slot = list(prompt), target.open()
    try:
        target.prefill(slot, tokens[:-1])
        while len(tokens) < min(len(prompt) + count, target.max_context - 1):
            output = target.forward([RowInput(slot, tokens[-1])])
            tokens.append(int(np.argmax(np.asarray(output.logits[0])[0])))
            target.commit([[]])
    finally:
        target.close(slot)
    return tokens


def try_head(head: Head, parts: TargetParts, read: Read, tokens: Sequence[int], start: int) -> Trial:
    """The head on a text whose answer begins at token `start`; the likely causes are tried when it is useless."""
    trial = _rate(head, parts, read, tokens, start)
    if not trial.count or trial.rate >= DOUBTFUL:
        return trial
    best, remedy = trial, ""
    for description, other in variants(head):
        found = _rate(other, parts, read, tokens, start)
        if found.rate > best.rate:
            best, remedy = found, description
    if best.rate < max(NEAR_ZERO, BETTER * trial.rate):
        return trial
    return Trial(trial.rate, trial.count, remedy, best.rate)


def variants(head: Head) -> Iterator[tuple[str, Head]]:
    """The head with what files are most often wrong about changed, and what was changed."""
    config = head.config
    if config.kind != "eagle3":
        return
    for shift in (0, 1, -1):
        layers = tuple(layer + shift for layer in config.feature_layers)
        for flag in (config.norm_before_residual, not config.norm_before_residual):
            said = [f"norm_before_residual {str(flag).lower()}"] if flag != config.norm_before_residual else []
            said += [f"layer ids {list(layers)}"] if shift else []
            if said and min(layers) >= 0:
                changed = replace(config, feature_layers=layers, norm_before_residual=flag)
                yield " and ".join(said), Head(changed, head.tensors, head.ids)


def _rate(head: Head, parts: TargetParts, read: Read, tokens: Sequence[int], start: int) -> Trial:
    """How often the head's first guess is the token that came: features of token i and token i + 1 give token i + 2."""
    try:
        features = read(head.config.feature_layers, tokens)
    except ValueError:  # no such layer
        return Trial(0.0, 0)
    guesses = head.ids[_guesses(head, parts, features[:-2], np.asarray(tokens[1:-1], np.int32))]
    asked = slice(max(0, start - 2), None)
    right = guesses[asked] == np.asarray(tokens[2:], np.int32)[asked]
    return Trial(float(right.mean()) if len(right) else 0.0, len(right))


def _guesses(
    head: Head, parts: TargetParts, features: NDArray[np.float32], following: NDArray[np.int32]
) -> NDArray[np.intp]:
    """The most likely drafted id of every position."""
    if head.config.kind == "medusa":
        drafter = Medusa(head, parts, head.config.vocab)
        best: NDArray[np.intp] = np.argmax(drafter.logits(0, drafter.normed(features)), axis=1)
        return best
    weights, rope = eagle_weights(head, parts), rope_of(head.config)
    blocks = -(-len(features) // BLOCK)
    runner = make_eagle_head(weights, np.zeros((blocks, weights.shape.block_floats), np.float32))
    rope.ensure(len(features))
    runner.rope(rope.cos, rope.sin)
    found = []
    for begin in range(0, len(features), CHUNK):
        part = following[begin : begin + CHUNK]
        every = np.arange(len(part), dtype=np.int32)
        rows = Pass(
            tokens=part,
            parents=every - 1,
            first=np.asarray([0, len(part)], np.int32),
            prefix=np.asarray([begin], np.int32),
            tables=np.arange(blocks, dtype=np.int32)[None],
        )
        made = runner.forward(rows, np.ascontiguousarray(features[begin : begin + CHUNK]), True, True, every)
        found.append(made.logits.argmax(1))
    return np.concatenate(found)


def reader_of(target: Target) -> Read:
    """What gives features of any layers of a loaded target."""
    from slipstream.targets.native.model import NativeTarget

    def natively(layers: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        assert isinstance(target, NativeTarget)
        other = target.share(min(target.max_context, len(tokens) + 1), 1, layers)
        found = other.prefill(other.open(), tokens)
        assert found is not None, "features were asked for"
        return found

    def through_torch(layers: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        import torch

        model: Any = getattr(target, "model")  # noqa: B009  only this runtime has one
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=model.device)
            states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        if max(layers) >= len(states) - 1:
            raise ValueError("what leaves the last layer is normed there")
        joined: NDArray[np.float32] = torch.cat([states[layer][0].float() for layer in layers], 1).cpu().numpy()
        return joined

    return natively if isinstance(target, NativeTarget) else through_torch
