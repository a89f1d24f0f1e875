"""What is made small in training, by name. p is the target's law over the draft vocabulary, q the head's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.core.errors import InputError

Objective = Callable[[Tensor, Tensor], Tensor]
"""(log q, log p), both fp32 [positions, draft_vocab], to the loss of each position."""


def cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """-sum p log q"""
    return -(log_p.exp() * log_q).sum(-1)


def divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(p, q) = sum p (log p - log q); its gradient is the cross-entropy's."""
    p = log_p.exp()
    return (p * (log_p.clamp_min(-1e4) - log_q)).sum(-1)


def total_variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    """1 - sum min(p, q): the probability that a drawn token is not accepted."""
    return 1 - overlap(log_q, log_p)


def acceptance(log_q: Tensor, log_p: Tensor) -> Tensor:
    """-log sum min(p, q)"""
    return -overlap(log_q, log_p).clamp_min(1e-9).log()


def greedy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """-log q of the target's likeliest token"""
    return -log_q.gather(-1, log_p.argmax(-1, keepdim=True)).squeeze(-1)


def overlap(log_q: Tensor, log_p: Tensor) -> Tensor:
    """sum min(p, q): the probability that a token drawn from q is accepted under p"""
    return torch.minimum(log_q, log_p).exp().sum(-1)


OBJECTIVES: dict[str, Objective] = {
    "ce": cross_entropy,
    "kl": divergence,
    "tv": total_variation,
    "accept": acceptance,
    "greedy": greedy,
}


def objective(name: str) -> Objective:
    """The objective of this name; "ce+accept" is the mean of two. Raises InputError naming those there are."""
    parts = name.split("+")
    for part in parts:
        if part not in OBJECTIVES:
            raise InputError(f"unknown objective {part!r}; choose of {', '.join(OBJECTIVES)}, or several joined by +")
    chosen = [OBJECTIVES[part] for part in parts]
    if len(chosen) == 1:
        return chosen[0]
    return lambda log_q, log_p: torch.stack([each(log_q, log_p) for each in chosen]).mean(0)
