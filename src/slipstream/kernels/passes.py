"""What a decoder pass is made of: sizes, weights, rows. Shared by the compiled core's wrapper and its numpy twin."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.kernels.packed import Packed

BLOCK = 128
"""Positions per KV block."""
KEY_TILE = 64
"""Keys of a block that lie side by side."""
SEGMENT = 128
"""Keys that are scored at once; segments start at absolute positions 0, 128, 256, ..."""
STRETCH = 4
"""Segments of a stretch, which one thread goes through alone; the first STRETCH segments are stretches of their own."""
LANES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder. features: layers whose input hidden states a pass can return (`layers`: the last output)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    features: tuple[int, ...] = ()

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim

    @property
    def value_stride(self) -> int:
        """Floats from one value row to the next in a block: the head's size, filled up to whole vectors."""
        return -(-self.head_dim // LANES) * LANES

    @property
    def layer_floats(self) -> int:
        """One layer of a block: per head keys [BLOCK / KEY_TILE, head_dim, KEY_TILE], values [BLOCK, stride]."""
        return self.kv_heads * BLOCK * (self.head_dim + self.value_stride)

    @property
    def block_floats(self) -> int:
        """Floats of one KV block, all layers."""
        return self.layers * self.layer_floats


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer. Matrices of equal type are stacked: `qkv` holds 1 or 3 parts, `gate_up` 1 or 2.

    Norms and biases are float32; qkv_bias covers q, k and v in that order, gate_up_bias gate and up.
    """

    attention_norm: NDArray[np.float32]
    qkv: list[Packed]
    output: Packed
    mlp_norm: NDArray[np.float32]
    gate_up: list[Packed]
    down: Packed
    qkv_bias: NDArray[np.float32] | None = None
    q_norm: NDArray[np.float32] | None = None
    k_norm: NDArray[np.float32] | None = None
    output_bias: NDArray[np.float32] | None = None
    gate_up_bias: NDArray[np.float32] | None = None
    down_bias: NDArray[np.float32] | None = None


@dataclass(slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder. `head` is `embedding` itself when they are tied."""

    shape: DecoderShape
    embedding: Packed
    layers: list[LayerWeights]
    norm: NDArray[np.float32]
    head: Packed

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices and vectors; a tied head counts once."""
        parts: list[Any] = [self.embedding, self.norm] + ([] if self.head is self.embedding else [self.head])
        for layer in self.layers:
            for entry in fields(layer):
                value = getattr(layer, entry.name)
                parts += value if isinstance(value, list) else [] if value is None else [value]
        return sum(int(part.nbytes) for part in parts)


@dataclass(slots=True)
class Pass:
    """The rows of one pass, grouped by sequence; all arrays int32 and contiguous.

    tokens [m]. parents [m]: row of the parent within the pass, -1 for a row that follows the cache directly; parents
    come first. Drafting heads keep rows of earlier passes aside: `parents` then begins with theirs. first [n + 1]: rows
    of sequence i are first[i] .. first[i + 1] - 1. prefix [n]: positions in the cache. tables [n, blocks]: KV blocks of
    each sequence, enough for its prefix (and for its rows where they are stored).
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    first: NDArray[np.int32]
    prefix: NDArray[np.int32]
    tables: NDArray[np.int32]
    depths: NDArray[np.int32] = field(init=False)
    """Depth of each row: its position is prefix + depth; 0 for rows that follow the cache directly."""

    def __post_init__(self) -> None:
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        self.depths = np.asarray(depths[self.older :], np.int32)

    @property
    def older(self) -> int:
        """Rows of earlier passes that rows of this one may follow."""
        return len(self.parents) - len(self.tokens)

    @property
    def rows(self) -> int:
        """Rows in all."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """One more than the highest position of any row."""
        highest = self.prefix + np.maximum.reduceat(self.depths, self.first[:-1]) + 1
        return int(highest.max())

    def part(self, begin: int, end: int) -> Pass:
        """Some of the sequences as a pass of their own (without rows of earlier passes)."""
        start, stop = int(self.first[begin]), int(self.first[end])
        parents = self.parents[start:stop]
        return Pass(
            tokens=self.tokens[start:stop],
            parents=np.where(parents < 0, parents, parents - start).astype(np.int32),
            first=self.first[begin : end + 1] - np.int32(start),
            prefix=self.prefix[begin:end],
            tables=self.tables[begin:end],
        )

    def check(self, shape: DecoderShape) -> None:
        """Assert what the compiled core relies on (debug runs)."""
        assert self.first[0] == 0, "first row of the pass is not row 0"
        assert self.first[-1] == self.rows, "sequences do not cover the rows"
        assert (np.diff(self.first) > 0).all(), "a sequence without rows"
        assert ((self.tokens >= 0) & (self.tokens < shape.vocab)).all(), "token outside the vocabulary"
        sequence = np.repeat(np.arange(len(self.prefix)), np.diff(self.first))
        assert (self.parents < np.arange(self.rows)).all(), "a row comes before its parent"
        inside = (self.parents < 0) | (self.parents >= self.first[sequence])
        assert inside.all(), "a row's parent belongs to another sequence"
        assert (self.prefix <= self.tables.shape[1] * BLOCK).all(), "a prefix is longer than its block table"
