"""A short trial of a head on its target's own text: a head that loads but does not fit is named, with what would help.

Such a head never spoils an answer; its guesses are just wrong. So it is tried once per head and target, on the greedy
answer to a built-in prompt, and where few guesses are right other readings of its description are tried one by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.drafters.heads.causes import RARE, Ranks, Reading, below, clearly_better, readings, stated
from slipstream.drafters.heads.medusa import Medusa
from slipstream.drafters.heads.parts import TargetParts
from slipstream.drafters.heads.weights import eagle_weights, rope_of
from slipstream.kernels.head import make_eagle_head
from slipstream.kernels.passes import BLOCK, Pass
from slipstream.targets.base import RowInput

if TYPE_CHECKING:
    from slipstream.kernels.head_weights import HeadWeights
    from slipstream.models.heads.head import Head
    from slipstream.targets.base import Target

log = logging.getLogger(__name__)

PROMPT = "Explain in a few paragraphs how a rainbow forms. Then tell a short story about a child who sees one."
TOKENS, FEWEST = 160, 48
"""Guesses that are asked for, and those that must do where the target is slow."""
SECONDS = 15.0
"""How long the target may write once there are the fewest tokens, and again how long other readings may be tried."""
NEAR_ZERO = 0.05
"""A head below this on its target's own text does not fit; untrained ones are right about once in a thousand times."""
DOUBTFUL = 0.25
"""Below this other readings are tried; a head that is clearly below is weak at best."""
CHUNK = 256

Read = Callable[[Sequence[int], Sequence[int]], dict[int, NDArray[np.float32]]]
"""(layers, tokens) to the inputs [tokens, hidden] of each of these layers that the target has and can show."""


@dataclass(frozen=True, slots=True)
class Trial:
    """right: guesses of the next token that were, of count. tried: other readings of the head that were compared.

    remedy: what to change in its description, `better`: guesses that are right then.
    """

    right: int
    count: int
    tried: int = 0
    remedy: str = ""
    better: int = 0

    @property
    def rate(self) -> float:
        """Share of the guesses that were right."""
        return self.right / max(1, self.count)

    @property
    def useless(self) -> bool:
        """True when the head hardly guesses anything."""
        return self.count > 0 and self.rate < NEAR_ZERO

    @property
    def doubtful(self) -> bool:
        """True when the user should hear of the head: it does not fit, is weak, or would be better read otherwise."""
        return self.useless or bool(self.remedy) or (self.count > 0 and below(self.right, self.count, DOUBTFUL))

    def message(self, name: str) -> str:
        """What to tell the user of a doubtful head."""
        return f"{name}: {self.told()}"

    def told(self) -> str:
        """The outcome in words."""
        if not self.count:
            return "not tried: what it reads of the model cannot be shown on this runtime"
        text = f"of {self.count} guesses on the model's own text {self.rate:.0%} were right"
        if not self.doubtful:
            return text
        if self.remedy:
            share = self.better / self.count
            return f"{text}; it does not fit. With {self.remedy} {share:.0%} are right: correct its config.json"
        tried = f"None of {self.tried} other readings (norm flag, layer ids) helps: it" if self.tried else "It"
        if self.useless:
            return f"{text}; it does not fit. {tried} may belong to another model, or never have been trained"
        return f"{text}; it is weak, or does not fit. {tried} may have been trained too little, or on other text"


def own_text(target: Target, prompt: Sequence[int], count: int = TOKENS) -> list[int]:
    """The prompt and the target's plain greedy answer to it, shorter where that takes more than SECONDS."""
    tokens, slot, since = list(prompt), target.open(), time.monotonic()
    try:
        target.prefill(slot, tokens[:-1])
        while len(tokens) < min(len(prompt) + count, target.max_context - 1):
            if len(tokens) >= len(prompt) + FEWEST and time.monotonic() - since > SECONDS:
                break
            output = target.forward([RowInput(slot, tokens[-1])])
            tokens.append(int(np.argmax(np.asarray(output.logits[0])[0])))
            target.commit([[]])
    finally:
        target.close(slot)
    return tokens


def try_head(head: Head, parts: TargetParts, read: Read, tokens: Sequence[int], start: int, num_layers: int) -> Trial:
    """The head on a text whose answer begins at token `start`; other readings are tried when few guesses are right.

    num_layers: of the target. Where the head's features cannot be read nothing is tried: no guesses.
    """
    own, others = stated(head.config), list(readings(head.config, num_layers))
    features = read(own.layers, tokens)
    if not set(own.layers) <= set(features):
        return Trial(0, 0)
    ask = _Asking(head, parts, tokens, start)
    base = ask.ranks(own, features)
    right, count = int((base == 0).sum()), len(base)
    if not count or right >= DOUBTFUL * count:
        return Trial(right, count)
    features = read(sorted({layer for other in others for layer in other.layers}), tokens) if others else {}
    tried: list[tuple[Reading, Ranks]] = []
    until = time.monotonic() + SECONDS
    for other in others:
        if time.monotonic() > until:
            break
        if set(other.layers) <= set(features):
            tried.append((other, ask.ranks(other, features)))
    found = clearly_better(base, tried)
    if found is None:
        return Trial(right, count, len(tried))
    return Trial(right, count, len(tried), tried[found][0].remedy, int((tried[found][1] == 0).sum()))


class _Asking:
    """A head that is asked for all tokens of a text at once, packed once however it is read."""

    def __init__(self, head: Head, parts: TargetParts, tokens: Sequence[int], start: int) -> None:
        """start: where the answer begins, whose tokens are the guesses that count."""
        self._head, self._parts = head, parts
        self._tokens = np.asarray(tokens, np.int32)
        self._first = max(0, start - 2)
        came = self._tokens[2 + self._first :]
        places = {int(token): place for place, token in enumerate(head.ids)}
        self._came = np.asarray([places.get(int(token), -1) for token in came], np.int64)
        self._weights = None if head.config.kind == "medusa" else eagle_weights(head, parts)

    def ranks(self, reading: Reading, features: dict[int, NDArray[np.float32]]) -> Ranks:
        """How the first guesses rank the token that came: features of token i and token i + 1 give token i + 2."""
        joined = np.concatenate([features[layer][:-2] for layer in reading.layers], 1)
        if self._weights is None:
            drafter = Medusa(self._head, self._parts, self._head.config.vocab)
            logits = drafter.logits(0, drafter.normed(joined[self._first :]))
        else:
            logits = self._eagle(replace(self._weights, norm_before_residual=reading.before), joined)
        chosen = np.take_along_axis(logits, np.maximum(self._came, 0)[:, None], 1)
        likelier = (logits >= chosen).sum(1) - 1  # a tie is no right guess
        return np.where(self._came < 0, RARE, likelier).astype(np.int32)

    def _eagle(self, weights: HeadWeights, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits of the guesses that count; those before them are read, for attention to see them."""
        following, rope = self._tokens[1:-1], rope_of(self._head.config)
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
            wanted = every[max(0, self._first - begin) :]
            given = np.ascontiguousarray(features[begin : begin + CHUNK])
            found.append(runner.forward(rows, given, True, True, wanted).logits)
        return np.concatenate(found)


def reader_of(target: Target) -> Read:
    """What gives the inputs of any layers of a loaded target."""
    from slipstream.targets.native.model import NativeTarget

    def natively(layers: Sequence[int], tokens: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        assert isinstance(target, NativeTarget)
        there = [layer for layer in dict.fromkeys(layers) if 0 <= layer <= target.config.num_layers]
        if not there:
            return {}
        other = target.share(min(target.max_context, len(tokens) + 1), 1, there)
        found = other.prefill(other.open(), tokens)
        assert found is not None, "features were asked for"
        return dict(zip(there, np.split(found, len(there), axis=1), strict=True))

    def through_torch(layers: Sequence[int], tokens: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        import torch

        model: Any = getattr(target, "model")  # noqa: B009  only this runtime has one
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=model.device)
            states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        # What leaves the last layer is normed there.
        there = [layer for layer in dict.fromkeys(layers) if 0 <= layer < len(states) - 1]
        return {layer: states[layer][0].float().cpu().numpy() for layer in there}

    return natively if isinstance(target, NativeTarget) else through_torch
