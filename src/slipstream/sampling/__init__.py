"""The one place that turns logits into a distribution: processors, keyed noise, the draw, log-probabilities."""

from __future__ import annotations

from slipstream.sampling.grammar import Grammars
from slipstream.sampling.logprobs import token_logprob
from slipstream.sampling.noise import choice_seed, fresh_seed
from slipstream.sampling.processors import Grammar
from slipstream.sampling.sampler import NEAR_TIE, RowSampler

__all__ = ["NEAR_TIE", "Grammar", "Grammars", "RowSampler", "choice_seed", "fresh_seed", "token_logprob"]
