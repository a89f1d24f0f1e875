"""Torch twin of the draw: the target's own tokens after many nodes, computed where the logits lie. Needs [torch].

Operation for operation the numpy twin (`kernels/reference_sampling.py`): the same hash in wrapping int64, the same
logarithm and exponential, the same order. Only sums over many tokens (top_p) may differ in their last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.kernels import reference_sampling as reference
from slipstream.kernels.reference_sampling import Rule
from slipstream.sampling.question import Question
from slipstream.sampling.sampler import NEAR_TIE

_HALF = 1 << 63


def draw(logits: Any, rule: Rule, questions: Sequence[Question]) -> Any:
    """int64 [nodes, 2]: the token after each node, -1 where none can be drawn, and 1 where the best two are close.

    logits: float32 [nodes, vocab] on any device with float64. One row's rule, one question per node.
    """
    z, broken = _scores(logits, rule, questions)
    if rule.temperature > 0.0:
        z = z / rule.temperature
        peak = z.amax(1, keepdim=True)
        broken = broken | ~torch.isfinite(peak[:, 0])
        z = torch.where(_kept(z, peak, rule), z, -torch.inf)
        keys = torch.tensor([[_signed(question.key)] for question in questions]).to(z.device, non_blocking=True)
        z = z + gumbel(keys, torch.arange(z.shape[1], device=z.device))
    else:
        broken = broken | ~torch.isfinite(z.amax(1))
    token = z.argmax(1)
    close = torch.zeros_like(broken)
    if z.shape[1] > 1:
        best = z.topk(2, 1).values.double()
        close = best[:, 0] - best[:, 1] < NEAR_TIE
    return torch.stack((torch.where(broken, -1, token), close.long()), 1)


def _scores(logits: Any, rule: Rule, questions: Sequence[Question]) -> tuple[Any, Any]:
    """Processed logits before temperature (float64 unless nothing is left to compute), and which rows are broken."""
    peak = logits.amax(1)
    broken = torch.isnan(peak) | (peak == torch.inf)
    untouched = all(q.touched is None and q.banned is None and q.allowed is None for q in questions)
    if untouched and rule.temperature <= 0.0:
        return logits, broken
    z = logits.double()
    if untouched:
        return z, broken
    z = z.clone()
    for node, question in enumerate(questions):
        if question.allowed is not None:
            z[node] = torch.where(_on(question.allowed, z), z[node], -torch.inf)
        if question.touched is not None:
            ids = _on(question.touched.ids, z)
            z[node, ids] = _penalised(z[node, ids], question)
        if question.banned is not None:
            z[node, _on(question.banned, z)] = -torch.inf
    return z, broken


def _penalised(values: Any, question: Question) -> Any:
    """Bias and penalties of `Processors`, in their order."""
    touched = question.touched
    assert touched is not None
    values = values + _on(touched.bias, values)
    if question.repetition != 1.0:
        penalised = torch.where(values > 0.0, values / question.repetition, values * question.repetition)
        values = torch.where(_on(touched.seen, values), penalised, values)
    if question.counts:
        count = _on(touched.count, values)
        values = values - question.frequency * count
        values = values - question.presence * (count > 0.0).double()
    return values


def _on(array: Any, like: Any) -> Any:
    return torch.from_numpy(array).to(like.device, non_blocking=True)


def _kept(z: Any, peak: Any, rule: Rule) -> Any:
    """bool [nodes, vocab]: what survives min_p, top_k and top_p."""
    keep = z > -torch.inf
    if rule.min_p > 0.0:
        floor = peak + log(torch.tensor([[rule.min_p]], dtype=torch.float64)).to(z.device, non_blocking=True)
        keep = keep & (z >= floor)
    if rule.top_k <= 0 and rule.top_p >= 1.0:
        return keep
    # A stable descending sort leaves the lower id first among equals; what min_p cut goes last.
    order = torch.where(keep, z, -torch.inf).sort(stable=True, dim=1, descending=True).indices
    alive = keep.gather(1, order)
    if rule.top_k > 0:
        alive = alive & (torch.arange(z.shape[1], device=z.device) < rule.top_k)
    if rule.top_p < 1.0:
        weights = torch.where(alive, exp(z.gather(1, order) - peak), 0.0)
        running = weights.cumsum(1)
        # The shortest prefix that reaches the mass: a token stays while the sum before it is short of it.
        before = torch.nn.functional.pad(running[:, :-1], (1, 0))
        alive = alive & (before < rule.top_p * running[:, -1:])
    return torch.zeros_like(keep).scatter(1, order, alive)


def gumbel(keys: Any, ids: Any) -> Any:
    """float64 [nodes, ids]: G under each key (int64 [nodes, 1], the bits of the unsigned key)."""
    hashed = mix(ids * _signed(reference.GOLDEN) + keys)
    u = (_shift(hashed, 12).double() + 0.5) * 2.0**-52
    return -log(-log(u))


def mix(h: Any) -> Any:
    """The splitmix64 finaliser on int64 bits."""
    h = (h ^ _shift(h, 30)) * _signed(0xBF58476D1CE4E5B9)
    h = (h ^ _shift(h, 27)) * _signed(0x94D049BB133111EB)
    return h ^ _shift(h, 31)


def log(x: Any) -> Any:
    """Twin of the reference's logarithm."""
    bits = x.view(torch.int64) + reference._LOG_STEP
    exponent = (bits >> 52).double() - 1023.0
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) + reference._LOG_BASE).view(torch.float64)
    f = mantissa - 1.0
    half_square = 0.5 * f * f
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even, odd = reference._LOG_EVEN, reference._LOG_ODD
    low = w * (even[0] + w * (even[1] + w * even[2]))
    high = z * (odd[0] + w * (odd[1] + w * (odd[2] + w * odd[3])))
    return (
        s * (half_square + (high + low))
        + exponent * reference._LN2_LOW
        - half_square
        + f
        + exponent * reference._LN2_HIGH
    )


def exp(x: Any) -> Any:
    """Twin of the reference's exponential of numbers <= 0."""
    inside = x >= reference.EXP_FLOOR
    x = torch.where(inside, x, 0.0)
    whole = (x * reference._INV_LN2 + reference._ROUND) - reference._ROUND
    rest = (x - whole * reference._LN2_HIGH) - whole * reference._LN2_LOW
    value = torch.full_like(rest, reference._EXP[0])
    for factor in reference._EXP[1:]:
        value = value * rest + factor
    scale = ((whole.long() + 1023) << 52).view(torch.float64)
    return torch.where(inside, value * scale, 0.0)


def _shift(x: Any, bits: int) -> Any:
    """Logical right shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2 * _HALF if value >= _HALF else value
