"""Test beds: drafters that follow a script, a tokenizer of a few bytes, engines over the targets of target_beds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from slipstream import build
from slipstream.control.fixed import Fixed
from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR
from slipstream.core.types import CompletionOutput, Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.small_model import SmallModel
from slipstream.drafters.suffix import Suffix
from slipstream.engine.engine import Engine
from slipstream.targets.base import Target
from slipstream.verify.coupled import Coupled
from target_beds import TableTarget, TableTransformer


class Pieces:
    """A tokenizer over a fixed list of byte strings; ids in `control` are control tokens and have no text."""

    def __init__(self, pieces: Sequence[bytes], end_ids: Sequence[int] = (), bos_id: int | None = None):
        self.pieces = list(pieces)
        self.end_ids = frozenset(end_ids)
        self.bos_id = bos_id
        self.control = set(end_ids) | ({bos_id} if bos_id is not None else set())
        self.vocab_size = len(self.pieces)
        self.special_texts = {self.pieces[i].decode(): i for i in sorted(self.control)}

    def fingerprint(self) -> str:
        return str(self.pieces)

    def token_text(self, token: int) -> str:
        return self.pieces[token].decode("utf-8", "replace")

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Control tokens are found in the stretches that say so."""
        ids: list[int] = []
        for text, parse in parts:
            found = "|".join(map(re.escape, self.special_texts)) if parse and self.special_texts else "(?!)"
            for stretch in re.split(f"({found})", text):
                ids += (
                    [self.special_texts[stretch]] if parse and stretch in self.special_texts else self.encode(stretch)
                )
        return ids

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Longest piece first; only texts made of the pieces can be encoded."""
        data, ids = text.encode(), []
        while data:
            fitting = [i for i, p in enumerate(self.pieces) if p and data.startswith(p) and i not in self.control]
            best = max(fitting, key=lambda i: len(self.pieces[i]))
            ids.append(best)
            data = data[len(self.pieces[best]) :]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def is_control(self, token: int) -> bool:
        return token in self.control

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids if i not in self.control).decode("utf-8", "replace")


class SmallFile:
    """What LLM needs of an opened model: printable ASCII, three control tokens, a chat template."""

    name, weights_bytes, weight_types, path = "small", 1234, "F32", "small.gguf"
    chat_template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}<a>"
    config = SimpleNamespace(architecture="table", max_context=400)
    template_tokens: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        pieces = [bytes([code]) for code in (10, *range(32, 127))]
        self._tokenizer = Pieces([*pieces, b"<s>", b"<a>", b"<e>"], end_ids=[98])
        self._tokenizer.control = {96, 97, 98}
        self._tokenizer.special_texts = {"<s>": 96, "<a>": 97, "<e>": 98}

    def tokenizer(self) -> Pieces:
        return self._tokenizer

    def target(self, seed: int = 1, **settings: object) -> TableTarget:
        """A table over the same vocabulary that never says a control token but, now and then, the end."""
        table = random_table(seed, 99, spread=3.0)
        table[:, 96:98] = -30.0
        table[:, 98] -= 2.0
        return TableTarget(table, **settings)


def small_models(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """From here on every model name is the small model, loaded by LLM; home: where the package keeps its files."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(home))
    monkeypatch.setattr(build, "open_named", lambda name: SmallFile())
    monkeypatch.setattr(
        build, "load_target", lambda file, context, slots, *_: file.target(max_context=context or 400, slots=slots)
    )


def letters(vocab_size: int, end_ids: Sequence[int] = (), bos_id: int | None = None) -> Pieces:
    """Token i is the letter a + i."""
    return Pieces([chr(97 + i).encode() for i in range(vocab_size)], end_ids, bos_id)


def random_table(seed: int, vocab_size: int, order: int = 1, spread: float = 2.0) -> np.ndarray:
    """Logits that float32 holds exactly, without ties of note."""
    rng = np.random.default_rng(seed)
    return rng.normal(scale=spread, size=(vocab_size,) * (order + 1)).astype(np.float32).astype(np.float64)


def cycle_table(tokens: Sequence[int], vocab_size: int, sharp: float = 8.0) -> np.ndarray:
    """A table whose greedy continuation walks `tokens` in a circle (each token at most once)."""
    table = random_table(1, vocab_size, spread=0.1)
    for here, then in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
        table[here, then] += sharp
    return table


def offer_chain(tokens: Sequence[int], source: str = "script", prob: float = 0.9) -> Offers:
    """A chain as drafters offer it."""
    return Offers(source, list(tokens), list(range(-1, len(tokens) - 1)), [prob] * len(tokens))


class Script(Drafter):
    """A drafter that offers what a function of (row, limit) returns: a chain of tokens or Offers."""

    def __init__(self, guess: Callable[[Row, Limit], Sequence[int] | Offers], name: str = "script"):
        self.name, self.guess = name, guess
        self.rows: set[int] = set()
        self.calls: list[str] = []
        self.proposed: list[Offers] = []

    def begin(self, row: Row) -> None:
        assert row.id not in self.rows
        self.calls.append("begin")
        self.rows.add(row.id)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[Offers]:
        self.calls.append("propose")
        offers = []
        for row, limit in zip(rows, limits, strict=True):
            assert row.id in self.rows
            made = self.guess(row, limit) if limit.nodes else []
            offers.append(made if isinstance(made, Offers) else offer_chain(made, self.name))
        self.proposed += offers
        return offers

    def observe(self, observations: Sequence[Observation]) -> None:
        self.calls.append("observe")
        for seen in observations:
            kept = seen.verdict.tokens
            assert not kept or seen.row.tokens[-len(kept) :] == kept

    def end(self, row: Row) -> None:
        self.calls.append("end")
        self.rows.discard(row.id)


def right(target: TableTarget) -> Script:
    """The target as its own drafter, under the row's own rule and noise: always right."""

    def guess(row: Row, limit: Limit) -> list[int]:
        path: list[int] = []
        while len(path) < min(limit.depth, limit.nodes):
            path.append(row.sampler.draw(target.after(row.tokens + path), path))
        return path

    return Script(guess, "right")


def right_for(target: TableTransformer) -> Script:
    """Always right for a transformer: every guess is a fresh prefill."""

    def guess(row: Row, limit: Limit) -> list[int]:
        path: list[int] = []
        while len(path) < min(limit.depth, limit.nodes):
            slot = target.open()
            target.prefill(slot, [*row.tokens, *path][:-1])
            state = target.node(slot, [[*row.tokens, *path][-1]])
            target.close(slot)
            path.append(row.sampler.draw(target.logits(state).astype(np.float32), path))
        return path

    return Script(guess, "right")


def wrong(target: TableTarget) -> Script:
    """Never right: always the token after the right one."""

    def guess(row: Row, limit: Limit) -> list[int]:
        first = row.sampler.draw(target.after(row.tokens), [])
        return [(first + 1 + i) % target.vocab_size for i in range(min(limit.depth, limit.nodes))]

    return Script(guess, "wrong")


def given(tokens: Sequence[int]) -> Script:
    """Always the same tokens."""
    return Script(lambda row, limit: list(tokens)[: min(limit.depth, limit.nodes)], "given")


def random_tree(vocab_size: int, seed: int = 0) -> Script:
    """Any tree of distinct siblings within the limit."""
    rng = np.random.default_rng(seed)

    def guess(row: Row, limit: Limit) -> Offers:
        offers, depths, taken = Offers("random"), [], set()
        for _ in range(int(rng.integers(0, limit.nodes + 1))):
            parents = [ANCHOR] + [node for node, depth in enumerate(depths) if depth < limit.depth]
            parent, token = int(rng.choice(parents)), int(rng.integers(vocab_size))
            siblings = offers.parents.count(parent)
            if (parent, token) in taken or siblings >= max(1, limit.width):
                continue
            taken.add((parent, token))
            offers.tokens.append(token)
            offers.parents.append(parent)
            offers.probs.append(float(rng.random()))
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
        return offers

    return Script(guess, "random")


def failing(after: int = 0) -> Script:
    """Raises from the `after`-th proposal on."""
    count = 0

    def guess(row: Row, limit: Limit) -> list[int]:
        nonlocal count
        count += 1
        if count > after:
            raise RuntimeError("this drafter is broken")
        return [0][: limit.nodes]

    return Script(guess, "failing")


def named(draft: str, target: Target, second: Target | None = None) -> list[Drafter]:
    """The drafters that a text names: lookup, suffix, model (`second`); what else it says is passed over."""
    makers = {"lookup": Lookup, "suffix": Suffix, "model": lambda: SmallModel(second, target.vocab_size)}
    return [make() for name, make in makers.items() if name in draft]


def engine(
    target: Target,
    drafters: Sequence[object] = (),
    nodes: int = 4,
    *,
    tokenizer: Pieces | None = None,
    shape: str = "chain",
    **settings: object,
) -> Engine:
    """An engine in debug mode around a bed, with the coupled verifier and a fixed controller unless told otherwise."""
    settings.setdefault("verifier", Coupled())
    settings.setdefault("controller", Fixed(nodes, shape))
    settings.setdefault("debug", True)
    return Engine(target, tokenizer or letters(target.vocab_size), drafters=drafters, **settings)


def answer(made: Engine, prompt: Sequence[int] | str, speculation: bool = True, **params: object) -> CompletionOutput:
    """The first answer to one prompt."""
    request = made.add(prompt, SamplingParams(**params), speculation=speculation)
    return made.run([request])[0].outputs[0]
