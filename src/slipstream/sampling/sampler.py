"""The sampler of one row: the one place that turns raw logits into a decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import NonFiniteError
from slipstream.core.params import SamplingParams
from slipstream.kernels import sampling as kernels
from slipstream.sampling import noise
from slipstream.sampling.processors import Grammar, Processors
from slipstream.sampling.question import Question

NEAR_TIE = 1e-3
"""Two best scores closer than this are a near-tie (counted by runtimes that are not row-invariant)."""


class RowSampler:
    """Implements the `Sampler` protocol for one choice of one request.

    seed: the choice's own seed (`noise.choice_seed`). end_ids: the model's end-of-sequence ids. Raises InputError when
    the parameters name tokens outside the vocabulary. `draw`, `top`, `near_tie` and `distribution` raise
    NonFiniteError when the logits hold NaN or +infinity or leave no token to draw; -infinity (padding) is fine.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        prompt_tokens: Sequence[int],
        end_ids: Iterable[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.seed = seed
        self.greedy = params.greedy
        self._grammar = grammar
        self._processors = Processors(params, vocab_size, prompt_tokens, end_ids)
        self._length = len(prompt_tokens)
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        cuts = kernels.Rule(params.temperature, params.min_p, top_k, params.top_p)
        self.rule = kernels.Rule() if params.greedy else cuts
        """Temperature and cuts; all of them off when greedy."""

    def draw(self, logits: NDArray[np.float32], path: Sequence[int]) -> int:
        """The target's own token after `path`: argmax of processed scores plus keyed noise, lowest id on ties."""
        logits, ids, values = self._processed(logits, path)
        if self.greedy and not len(ids):
            token = kernels.argmax(logits)
            if token < 0:
                raise self._broken(logits, path)
            return token
        return self._select(logits, (ids, values), path, 1)[0][0]

    def top(self, logits: NDArray[np.float32], path: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """The best `count` tokens under the same scores and noise, best first, and their scores.

        Fewer when top_k, top_p or min_p leave fewer. Greedy: by processed logit alone.
        """
        logits, ids, values = self._processed(logits, path)
        return self._select(logits, (ids, values), path, count)

    def distribution(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float64]:
        """Probabilities [vocab] after every processor; one-hot when greedy."""
        logits, ids, values = self._processed(logits, path)
        probabilities = kernels.distribution(logits, ids, values, self.rule)
        if probabilities is None:
            raise self._broken(logits, path)
        return probabilities

    def near_tie(self, logits: NDArray[np.float32], path: Sequence[int]) -> bool:
        """True when the best two scores lie within 1e-3."""
        _, scores = self.top(logits, path, 2)
        return len(scores) > 1 and scores[0] - scores[1] < NEAR_TIE

    def forced(self) -> list[int]:
        """A guess of the tokens that the grammar leaves no choice about next; none without one."""
        return [] if self._grammar is None else self._grammar.forced()

    def fitting(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a tree the grammar may accept, as far as is known cheaply; all of them without one."""
        return [True] * len(tokens) if self._grammar is None else self._grammar.fitting(tokens, parents)

    def question(self, path: Sequence[int]) -> Question:
        """What decides the token after `path` but for the logits (`draw`'s twin on a device asks)."""
        question = self._processors.question(self._key(path), path)
        if self._grammar is not None:
            question.allowed = self._grammar.allowed(path)
        return question

    def _key(self, path: Sequence[int]) -> int:
        return 0 if self.greedy else noise.key(self.seed, self._length + len(path))

    def uniforms(self, purpose: str, step: int, count: int) -> NDArray[np.float64]:
        """`count` uniforms in (0, 1) of one purpose (draft, accept, residual, bonus) and step."""
        return noise.uniforms(self.seed, purpose, step, count)

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the committed history."""
        self._length += len(tokens)
        self._processors.append(tokens)
        if self._grammar is not None:
            self._grammar.append(tokens)

    def _processed(
        self, logits: NDArray[np.float32], path: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
        """Logits (masked by the grammar), and the sparse changes of all other processors."""
        if self._grammar is not None:
            if not self._finite(logits):
                raise self._broken(logits, path)
            logits = np.where(self._grammar.allowed(path), logits, np.float32(-np.inf))
        ids, values = self._processors(logits, path)
        return logits, ids, values

    def _select(
        self,
        logits: NDArray[np.float32],
        changes: tuple[NDArray[np.int64], NDArray[np.float64]],
        path: Sequence[int],
        count: int,
    ) -> tuple[list[int], list[float]]:
        tokens, scores = kernels.select(logits, *changes, self.rule, self._key(path), count)
        if not tokens:
            raise self._broken(logits, path)
        return tokens, scores

    @staticmethod
    def _finite(logits: NDArray[np.float32]) -> bool:
        return kernels.argmax(logits) >= 0

    def _broken(self, logits: NDArray[np.float32], path: Sequence[int]) -> NonFiniteError:
        position = self._length + len(path)
        if self._grammar is not None and self._grammar.error:
            return NonFiniteError(f"the grammar cannot go on at position {position}: {self._grammar.error}")
        if self._finite(logits) or (self._grammar is not None and logits.max() == -np.inf):
            remedy = "loosen logit_bias, min_tokens or structured_outputs"
            return NonFiniteError(f"every token is banned at position {position}; {remedy}")
        return NonFiniteError(f"the model's logits at position {position} are NaN or infinite; the request ends here")
