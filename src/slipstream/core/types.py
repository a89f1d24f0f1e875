"""What the layers hand to each other: a row, what drafters offer, what verification decides, what a step showed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.core.params import SamplingParams
from slipstream.core.stats import Speculation, total
from slipstream.core.tree import Draft

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Sampler(Protocol):
    """Turns raw logits into decisions for one row: every processor, the noise, the draw. Implemented in `sampling/`.

    `path` is the tokens from the anchor (excluded) down to the node whose successor is decided; together with the
    committed tokens it is that node's history. Logits are float32 [vocab] and are never changed in place.
    """

    def draw(self, logits: NDArray[np.float32], path: Sequence[int]) -> int:
        """The target's own token after `path`: argmax of processed scores plus keyed noise, lowest id on ties."""

    def top(self, logits: NDArray[np.float32], path: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """The best `count` tokens under the same scores and noise, best first, and their scores (for drafters)."""

    def distribution(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Probabilities [vocab] after every processor; one-hot when greedy (for the classical verifiers)."""

    def near_tie(self, logits: NDArray[np.float32], path: Sequence[int]) -> bool:
        """True when the best two scores lie within 1e-3."""

    def forced(self) -> list[int]:
        """A guess of the tokens that the request's grammar leaves no choice about next; none without one."""

    def fitting(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a tree the request's grammar may accept, as far as is known cheaply; all without one."""

    def uniforms(self, purpose: str, step: int, count: int) -> NDArray[np.float64]:
        """`count` uniforms in (0, 1) of one purpose (draft, accept, residual, bonus) and step."""

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the committed history."""


@dataclass(slots=True, eq=False)
class Row:
    """One answer being generated: a request's choice. The engine owns it; drafters, controllers and verifiers read it.

    tokens: prompt and output so far; the last one is the anchor, whose KV row is not yet in the cache.
    Position of the next token drawn = len(tokens).
    """

    id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    sampler: Sampler
    slot: int = -1
    step: int = 0
    """Target passes of this row so far; salts the randomness of the classical verifiers."""
    speculate: bool = True
    drafters: frozenset[str] | None = None
    """The drafters that may be asked for this row; None for all."""
    max_nodes: int | None = None
    """Draft nodes per pass at most, below what the controller allows; None for no limit of its own."""

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]


@dataclass(slots=True)
class Limit:
    """How much drafters may offer for one row: nodes in all, depth of the tree, children per node.

    depths: a smaller depth for single drafters, by name; 0 means that this one is not asked at all.
    floor: drafters may stop where the probability of the whole path falls below it; floors: for single ones, by name.
    """

    nodes: int
    depth: int
    width: int = 1
    depths: dict[str, int] = field(default_factory=dict)
    floor: float = 0.0
    floors: dict[str, float] = field(default_factory=dict)

    def within(self, room: int) -> Limit:
        """The same limit for a row that can take no more than `room` drafted tokens on one path."""
        room = max(0, room)
        return replace(self, nodes=self.nodes if room else 0, depth=min(self.depth, room))

    def asks(self, source: str) -> bool:
        """Whether one drafter is to be asked."""
        return self.nodes > 0 and self.depths.get(source, self.depth) > 0

    def of(self, source: str) -> Limit:
        """What this limit leaves to one drafter; nodes = 0 when it is not to be asked."""
        depth = min(self.depth, self.depths.get(source, self.depth))
        floor = self.floors.get(source, self.floor)
        return Limit(self.nodes if depth > 0 else 0, max(0, depth), self.width, floor=floor)


@dataclass(slots=True)
class Offers:
    """Nodes one drafter offers for one row: a tree like Draft, with chances.

    probs: estimated probability that the node is accepted given that its parent was (0..1).
    q: as in Draft; present only when tokens were drawn at random from it (`drawn`).
    drawn: the tokens are random draws: classical verifiers then forbid dropping, re-ranking or merging them.
    features: per node, what the source knows about it (match length, noisy gap, ...), for calibration; may be empty.
    seconds: this row's share of the time that drafting took. looks_back: as the drafter says it.
    """

    source: str
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    q: dict[int, NDArray[np.float64]] | None = None
    drawn: bool = False
    features: list[float] = field(default_factory=list)
    seconds: float = 0.0
    looks_back: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Drawn:
    """The target's own token after the anchor (first) and after each node, already drawn where the logits lie.

    tokens: -1 where the logits are broken or nothing can be drawn. close: True where the best two scores lie within
    1e-3.
    """

    tokens: list[int]
    close: list[bool]


@dataclass(slots=True)
class Verdict:
    """What verification decided for one row.

    tokens: emitted tokens, the accepted ones and then the target's own (bonus or correction).
    path: indices of the accepted draft nodes, from the first level down; len(tokens) = len(path) + 1.
    near_ties: visited positions whose best two scores lie within 1e-3 (where a runtime is not row-invariant).
    error: set when a visited node had NaN or infinite logits; tokens then holds what was decided before it.
    """

    tokens: list[int]
    path: list[int]
    near_ties: int = 0
    error: str | None = None


@dataclass(slots=True)
class Observation:
    """What one step showed about one row; drafters and controllers learn from it.

    logits: float32 [1 + nodes, vocab], row 0 for the anchor, row i + 1 for node i of the draft.
    features: float32 [1 + nodes, features] when the target was asked for them. ended: the row leaves after this step.
    """

    row: Row
    draft: Draft
    verdict: Verdict
    logits: NDArray[np.float32]
    features: NDArray[np.float32] | None = None
    ended: bool = False


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the model's raw logits, and the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class CompletionOutput:
    """One answer of a request. token_ids holds the end id or the token that completed a stop; text does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    seed: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    sources: list[str] = field(default_factory=list)
    """Where each token came from: a drafter's name when it was drafted and accepted, '' for the target's own."""


@dataclass(slots=True)
class Timing:
    """Wall-clock seconds of one request: prompt, then answer; the split says where decoding time went.

    reused_tokens: prompt tokens that were still in the cache from an earlier answer and were not read again.
    """

    prefill_s: float = 0.0
    reused_tokens: int = 0
    decode_s: float = 0.0
    tokens_per_second: float = 0.0
    split: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt: `n` answers in order."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timing: Timing = field(default_factory=Timing)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts under the names OpenAI clients know."""
        made = sum(len(output.token_ids) for output in self.outputs)
        read = len(self.prompt_token_ids)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def speculation_of(results: Iterable[RequestOutput]) -> Speculation:
    """What speculation did for all answers of these prompts together."""
    outputs = [output for result in results for output in result.outputs]
    return total([output.speculation for output in outputs], [len(output.token_ids) for output in outputs])


@dataclass(slots=True)
class Piece:
    """What a stream yields: new text and tokens of one answer; finish_reason on its last piece.

    Unpacks as (index, text, token_ids, finish_reason); `sources` is beside, per token, as in CompletionOutput.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    sources: Sequence[str] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.index, self.text, self.token_ids, self.finish_reason))
