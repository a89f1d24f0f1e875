"""What the engine needs of a model, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slipstream.core.tree import Draft, chain
from slipstream.core.types import Drawn, Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class RowInput:
    """One row of a pass: the anchor and the draft below it. An empty draft is plain decoding."""

    slot: int
    anchor: int
    draft: Draft = field(default_factory=Draft)


@dataclass(slots=True)
class Read:
    """A part of a prompt: tokens to append to a slot's cache.

    last: tokens at its end whose features are wanted, None for all.
    """

    slot: int
    tokens: Sequence[int]
    last: int | None = None

    def part(self, begin: int, end: int) -> Read:
        """Some of the tokens; of their features those that are wanted of the whole."""
        last = None if self.last is None else max(0, min(end - begin, self.last - (len(self.tokens) - end)))
        return Read(self.slot, self.tokens[begin:end], last)


@dataclass(slots=True)
class PassOutput:
    """Result of one pass, per row: logits float32 [1 + nodes, vocab]; features [1 + nodes, width] when asked for.

    Row 0 belongs to the anchor, row i + 1 to node i. Ids that are padding have logit -inf. Logits and features may lie
    on a device; they then look like arrays and come to the host when read.
    draw: for such logits, the target's own token after every node of all rows, drawn there and brought over together;
    it returns None where a row's sampler cannot be followed. None when the logits are on the host.
    read: per part of a prompt, the features of it that were wanted.
    """

    logits: list[NDArray[np.float32]]
    features: list[NDArray[np.float32]] | None = None
    draw: Callable[[Sequence[Row], Sequence[Draft]], list[Drawn] | None] | None = None
    read: list[NDArray[np.float32] | None] = field(default_factory=list)


class Target(Protocol):
    """A causal language model with a KV cache of slots.

    The cache of a slot holds committed tokens only. `forward` may keep the rows of the last pass aside; `commit` keeps
    those of the anchor and of the accepted path (after it the length has grown by 1 + len(path)); everything else is
    dropped. Between steps: length(slot) = committed tokens of the row, the anchor not among them. Without memory for
    further rows `prefill` and `forward` raise CacheFullError and keep what was there; `commit` never does.
    """

    name: str
    vocab_size: int
    max_context: int
    row_invariant: bool
    """True when a row's logits are bitwise the same whatever else is in the pass."""
    reads_along: bool
    """True when `forward` reads parts of prompts in the very pass over the rows."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory of one position."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the weights (`weights`), of the cache in use (`kv_used`), and by which it may grow (`kv_free`)."""

    def wait(self) -> None:
        """Return when the device has done all it was given (for clocks)."""

    def share(self, max_context: int, slots: int) -> Target:
        """A second target over the same weights in memory, with a cache of its own, and without features.

        Passes of the two take turns. Raises InputError for a context longer than the model's.
        """

    def open(self) -> int:
        """A free slot of length 0. Raises InputError when all are taken."""

    def close(self, slot: int) -> None:
        """Give the slot and its memory back."""

    def length(self, slot: int) -> int:
        """Tokens in the slot's cache."""

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens."""

    def fork(self, slot: int, length: int) -> int:
        """A new slot that starts with the first `length` tokens of `slot`. Raises InputError when all are taken."""

    def prefill(self, slot: int, tokens: Sequence[int], last: int | None = None) -> NDArray[np.float32] | None:
        """Append tokens to the cache without logits.

        Returns their features [tokens, width], or those of the `last` ones, when features were asked for at load.
        """

    def forward(self, rows: Sequence[RowInput], reads: Sequence[Read] = ()) -> PassOutput:
        """One pass over the anchors and all nodes of all rows; each node attends to its prefix and its ancestors.

        reads: where `reads_along` says so, parts of prompts, of distinct slots, to append first, as `prefill` does; a
        row of the same slot follows its part.
        """

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, per row of the last pass, the anchor and the nodes of this path (in depth order)."""


def read_on(model: Target, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Append tokens to the cache of these slots in one pass; per slot the logits after the last one, [vocab]."""
    output = model.forward([RowInput(slot, ids[0], chain(ids[1:])) for slot, ids in zip(slots, tokens, strict=True)])
    model.commit([list(range(len(ids) - 1)) for ids in tokens])
    return [logits[-1] for logits in output.logits]
