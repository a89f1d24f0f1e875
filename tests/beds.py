"""Test beds: small exact models, drafters that follow a script, a tokenizer of a few bytes.

TableTarget looks its logits up by the last one or two tokens, so every right answer is known exactly.
TableTransformer is a real transformer in float64 with a real KV cache, for faults of cache and rollback.
Both implement the whole target protocol and check what callers do with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from slipstream.control.fixed import Fixed
from slipstream.core.errors import CacheFullError, InputError
from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR
from slipstream.core.types import CompletionOutput, Limit, Observation, Offers, Row
from slipstream.drafters.base import Drafter
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.small_model import SmallModel
from slipstream.drafters.suffix import Suffix
from slipstream.engine.engine import Engine
from slipstream.targets.base import PassOutput, RowInput, Target
from slipstream.verify.coupled import Coupled


class SlotTarget:
    """Slots, the pass protocol and its checks; subclasses give logits. `passes` holds the token rows of each pass."""

    name = "bed"
    row_invariant = True
    kv_bytes_per_token = 1

    def __init__(self, vocab_size: int, max_context: int, slots: int):
        self.vocab_size, self.max_context = vocab_size, max_context
        self.free = list(range(slots))
        self.cache: dict[int, list[int]] = {}
        self.pending: list[RowInput] | None = None
        self.passes: list[int] = []
        self.prefilled = 0
        self.capacity = 10**9
        """Tokens that all slots together can hold, those of the last pass included."""

    def memory_bytes(self) -> dict[str, int]:
        used = sum(map(len, self.cache.values()))
        return {"weights": 0, "kv_used": used, "kv_free": self.capacity - used}

    def wait(self) -> None:
        """Nothing to wait for."""

    def open(self) -> int:
        if not self.free:
            raise InputError("all slots are taken")
        slot = self.free.pop(0)
        self.cache[slot] = []
        return slot

    def close(self, slot: int) -> None:
        del self.cache[slot]
        self.free.append(slot)

    def length(self, slot: int) -> int:
        return len(self.cache[slot])

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= len(self.cache[slot])
        del self.cache[slot][length:]

    def fork(self, slot: int, length: int) -> int:
        assert 0 <= length <= len(self.cache[slot])
        copy = self.open()
        self.cache[copy] = self.cache[slot][:length]
        return copy

    def prefill(self, slot: int, tokens: Sequence[int]) -> None:
        assert len(self.cache[slot]) + len(tokens) < self.max_context
        self.require(len(tokens))
        self.prefilled += len(tokens)
        for token in tokens:
            self.keep(slot, self.node(slot, [int(token)]))
            self.cache[slot].append(int(token))

    def require(self, more: int) -> None:
        if sum(map(len, self.cache.values())) + more > self.capacity:
            raise CacheFullError(f"the cache of {self.capacity} tokens is full")

    def forward(self, rows: Sequence[RowInput]) -> PassOutput:
        assert len({row.slot for row in rows}) == len(rows), "a slot appears twice in one pass"
        self.require(sum(1 + len(row.draft) for row in rows))
        self.passes.append(sum(1 + len(row.draft) for row in rows))
        self.pending, self.aside, logits = list(rows), [], []
        for row in rows:
            row.draft.check(self.vocab_size)
            length, depth = len(self.cache[row.slot]), max(row.draft.depths(), default=0)
            assert length + 1 + depth < self.max_context, "a node lies at or past the end of the context"
            states = [self.node(row.slot, [row.anchor])]
            for index in range(len(row.draft)):
                above = [states[0], *(states[node + 1] for node in row.draft.path(index)[:-1])]
                states.append(self.node(row.slot, [row.anchor, *row.draft.path_tokens(index)], above))
            self.aside.append(states)
            logits.append(np.stack([np.asarray(self.logits(state), np.float32) for state in states]))
        return PassOutput(logits)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        assert self.pending is not None, "commit without a pass"
        assert len(paths) == len(self.pending)
        for row, path, states in zip(self.pending, paths, self.aside, strict=True):
            assert not path or list(path) == row.draft.path(path[-1]), "not a path of the draft"
            self.cache[row.slot] += [row.anchor, *(row.draft.tokens[node] for node in path)]
            for state in [states[0], *(states[node + 1] for node in path)]:
                self.keep(row.slot, state)
        self.pending = None

    def node(self, slot: int, path: list[int], above: list = ()) -> object:
        """State of the last token of `path`, which starts at the anchor; `above` are its ancestors' states."""
        raise NotImplementedError

    def logits(self, state: object) -> np.ndarray:
        raise NotImplementedError

    def keep(self, slot: int, state: object) -> None:
        """The state joins the slot's cache."""


class TableTarget(SlotTarget):
    """Logits are `table[last]` or `table[one before, last]`; before the first token stands token 0.

    pause: seconds that every pass takes longer, so that speculation can pay.
    """

    name = "table"

    def __init__(self, table: np.ndarray, max_context: int = 512, slots: int = 8, pause: float = 0.0):
        self.table, self.pause = np.asarray(table, np.float64), pause
        self.order = self.table.ndim - 1
        super().__init__(self.table.shape[-1], max_context, slots)

    def node(self, slot: int, path: list[int], above: list = ()) -> tuple[int, ...]:
        return tuple([0, *self.cache[slot], *path][-self.order :])

    def logits(self, state: object) -> np.ndarray:
        return self.table[state]

    def forward(self, rows: Sequence[RowInput]) -> PassOutput:
        if self.pause:
            time.sleep(self.pause)
        return super().forward(rows)

    def after(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits that follow these tokens, without any cache."""
        return self.table[tuple([0, *tokens][-self.order :])].astype(np.float32)


class TableTransformer(SlotTarget):
    """Attention over a real cache, `keys` and `values` [layers, length, width] per slot, one token at a time."""

    name = "transformer"

    def __init__(self, seed: int = 0, vocab_size: int = 16, max_context: int = 512, slots: int = 8, layers: int = 2):
        super().__init__(vocab_size, max_context, slots)
        rng, width = np.random.default_rng(seed), 8
        self.embedding = rng.normal(size=(vocab_size, width))
        self.position = rng.normal(size=(max_context, width))
        self.weights = rng.normal(size=(layers, 4, width, width)) / width**0.5
        self.head = rng.normal(size=(width, vocab_size)) * 2
        self.kv: dict[int, list[np.ndarray]] = {}

    def open(self) -> int:
        slot = super().open()
        self.kv[slot] = []
        return slot

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        del self.kv[slot][length:]

    def fork(self, slot: int, length: int) -> int:
        copy = super().fork(slot, length)
        self.kv[copy] = self.kv[slot][:length]
        return copy

    def keep(self, slot: int, state: object) -> None:
        self.kv[slot].append(state[0])

    def rows(self, slot: int) -> np.ndarray:
        """The cache of a slot, [length, layers, 2, width]."""
        return np.array(self.kv[slot])

    def node(self, slot: int, path: list[int], above: list = ()) -> tuple[np.ndarray, np.ndarray]:
        past = self.kv[slot] + [state[0] for state in above]
        x = self.embedding[path[-1]] + self.position[len(past)]
        own = np.empty((len(self.weights), 2, len(x)))
        for layer, (query, key, value, mlp) in enumerate(self.weights):
            own[layer] = x @ key, x @ value
            keys = np.array([row[layer, 0] for row in past] + [own[layer, 0]])
            values = np.array([row[layer, 1] for row in past] + [own[layer, 1]])
            scores = keys @ (x @ query) / len(x) ** 0.5
            weight = np.exp(scores - scores.max())
            x = x + weight @ values / weight.sum()
            x = x + np.tanh(x @ mlp)
            x = x / np.sqrt(np.mean(x * x))
        return own, x @ self.head

    def logits(self, state: object) -> np.ndarray:
        return state[1]


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
