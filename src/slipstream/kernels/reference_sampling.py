"""Numpy twin of the sampling kernels: noise, order, cuts and the draw, in the compiled core's order of operations.

Multiplications and additions are separate (no fused ones), so the compiled core, built without contraction, returns
the same bits. Scores are float64(logit) / temperature + G; order is score descending, then id ascending.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
MAX_NOISE = 36.8
"""No G is larger: -log(-log(1 - 2**-53)) = 36.74."""
LANES = 32
"""Sums over the whole vocabulary run in this many lanes (lane = id modulo LANES), then fold by halves."""

_LOG_BASE = 0x3FE6A09E << 32  # the bits of about sqrt(1/2): mantissas are taken from there to its double
_LOG_STEP = (0x3FF00000 - 0x3FE6A09E) << 32
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_INV_LN2 = 1.44269504088896338700e00
_LOG_EVEN = (3.999999999940941908e-01, 2.222219843214978396e-01, 1.531383769920937332e-01)
_LOG_ODD = (6.666666666666735130e-01, 2.857142874366239149e-01, 1.818357216161805012e-01, 1.479819860511658591e-01)
_EXP = tuple(
    1.0 / f for f in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1)
)  # Taylor, degree 12 first
_ROUND = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to a whole number
EXP_FLOOR = -700.0
"""Below this exp is taken as 0."""


class Rule(NamedTuple):
    """How logits become one draw. temperature 0.0 is greedy; min_p 0.0, top_k 0 and top_p 1.0 are off."""

    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def log(x: Floats) -> Floats:
    """Natural logarithm of positive normal numbers (the fdlibm method, one path for all), error below 1 ulp."""
    bits = x.view(np.uint64) + np.uint64(_LOG_STEP)
    exponent = (bits >> np.uint64(52)).astype(np.float64) - 1023.0
    mantissa = ((bits & np.uint64(0x000FFFFFFFFFFFFF)) + np.uint64(_LOG_BASE)).view(np.float64)
    f = mantissa - 1.0
    half_square = 0.5 * f * f
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (_LOG_EVEN[0] + w * (_LOG_EVEN[1] + w * _LOG_EVEN[2]))
    odd = z * (_LOG_ODD[0] + w * (_LOG_ODD[1] + w * (_LOG_ODD[2] + w * _LOG_ODD[3])))
    result: Floats = s * (half_square + (odd + even)) + exponent * _LN2_LOW - half_square + f + exponent * _LN2_HIGH
    return result


def exp(x: Floats) -> Floats:
    """exp of numbers <= 0, relative error below 1e-15; 0 below EXP_FLOOR."""
    inside = x >= EXP_FLOOR
    x = np.where(inside, x, 0.0)
    whole = (x * _INV_LN2 + _ROUND) - _ROUND
    rest = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    value = np.full_like(rest, _EXP[0])
    for factor in _EXP[1:]:
        value = value * rest + factor
    scale = ((whole.astype(np.int64) + 1023) << 52).view(np.float64)
    return np.where(inside, value * scale, 0.0)


def mix(h: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def mix_number(h: int) -> int:
    """`mix` of one Python integer."""
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
    return h ^ (h >> 31)


def key(seed: int, t: int, stream: int) -> int:
    """Key of position (or step) t of one stream, hashed in stages: seed + 1 does not get this seed's noise shifted."""
    inner = mix_number(((mix_number((seed + GOLDEN) & MASK) ^ stream) + GOLDEN) & MASK)
    return mix_number(((inner ^ t) + GOLDEN) & MASK)


def hashes(key: int, ids: Ids) -> NDArray[np.uint64]:
    """h of each id under a key (formulas.md, keyed noise)."""
    return mix(ids.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(key))


def uniforms(key: int, ids: Ids) -> Floats:
    """u of each id, strictly between 0 and 1: 52 bits and a half, so that it can never round to 1."""
    u: Floats = ((hashes(key, ids) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return u


def gumbel(key: int, ids: Ids) -> Floats:
    """G of each id: -log(-log(u)), from -3.61 to 36.74."""
    return -log(-log(uniforms(key, ids)))


def argmax(logits: NDArray[np.float32]) -> int:
    """The lowest id of the largest logit; -1 when one is NaN or +infinity, or none is finite."""
    best = int(np.argmax(logits))  # numpy's argmax stops at the first NaN
    return best if np.isfinite(logits[best]) else -1


def scores(logits: NDArray[np.float32], ids: Ids, values: Floats, temperature: float) -> Floats | None:
    """float64 scores before noise, [vocab]: logits with `values` in the places `ids`, divided by the temperature.

    None when a raw logit is NaN or +infinity, or nothing finite is left. Temperature 0.0 does not divide.
    """
    peak = logits.max() if len(logits) else np.nan
    if np.isnan(peak) or peak == np.inf:
        return None
    z = logits.astype(np.float64)
    z[ids] = values
    if temperature > 0.0:
        z /= temperature
    return z if np.isfinite(z.max()) else None


def lane_sum(values: Floats) -> float:
    """Sum over the vocabulary in the fixed lane order."""
    padded = np.zeros(-(-len(values) // LANES) * LANES)
    padded[: len(values)] = values
    lanes = np.add.reduce(padded.reshape(-1, LANES), axis=0)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def ordered(z: NDArray[np.floating], ids: Ids) -> Ids:
    """`ids` by score descending, then id ascending."""
    return ids[np.lexsort((ids, -z[ids]))]


def largest(z: NDArray[np.floating], ids: Ids, count: int) -> Ids:
    """The first `count` of `ids` in order, without sorting the rest; ties at the edge go to the lowest ids."""
    if count >= len(ids):
        return ordered(z, ids)
    if count <= 0:
        return ids[:0]
    values = z[ids]
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = ids[values > edge]
    tied = np.sort(ids[values == edge])[: count - len(above)]
    return np.concatenate((ordered(z, above), tied))


def kept(z: Floats, rule: Rule) -> Ids:
    """Ids that survive min_p, top_k and top_p; in order when top_k or top_p cut, else by id.

    top_p: running sum of exp in order, the shortest prefix reaching top_p x total. The total is the running sum over
    the k of top_k, or the lane sum over ids when top_k is off.
    """
    peak = float(z.max())
    floor = peak + float(log(np.array([rule.min_p]))[0]) if rule.min_p > 0.0 else -np.inf
    ids: Ids = np.flatnonzero((z >= floor) & (z > -np.inf))
    if 0 < rule.top_k < len(z):
        ids = largest(z, ids, rule.top_k)
        if rule.top_p < 1.0:
            running = np.cumsum(exp(z[ids] - peak))
            ids = ids[: _prefix(running, rule.top_p * float(running[-1]))]
    elif rule.top_p < 1.0:
        weights = np.where(z >= floor, exp(z - peak), 0.0)
        target = rule.top_p * lane_sum(weights)
        depth = 4.0
        while True:
            head = ordered(z, ids[z[ids] >= peak - depth])
            running = np.cumsum(weights[head])
            if running[-1] >= target or len(head) == len(ids):
                return head[: _prefix(running, target)]
            depth *= 2.0
    return ids


def _prefix(running: Floats, target: float) -> int:
    return min(int(np.searchsorted(running, target, side="left")) + 1, len(running))


def select(z: Floats, rule: Rule, key: int, count: int) -> tuple[list[int], list[float]]:
    """The best `count` tokens under score plus noise, best first, and these sums; fewer when fewer survive the cuts.

    Greedy (temperature 0.0): the best by score alone, no cuts. Noise is made only for tokens that can still win: G
    never exceeds -log(1 - u), and that not (1 - e) log 2 where 1 - u >= 2**(e - 1).
    """
    if count <= 0:
        return [], []
    if rule.temperature <= 0.0:
        best = largest(z, np.flatnonzero(z > -np.inf), count)
        return best.tolist(), z[best].tolist()
    ids = kept(z, rule)
    if len(ids) > 512:
        strong = ids[np.argpartition(z[ids], len(ids) - count)[-count:]] if count < len(ids) else ids
        bar = float((z[strong] + gumbel(key, strong)).min()) - 1e-6
        ids = ids[z[ids] >= bar - MAX_NOISE]
        _, exponents = np.frexp(1.0 - uniforms(key, ids))
        ids = ids[z[ids] + (1 - exponents) * 0.6931471805599454 >= bar]
    noisy = z[ids] + gumbel(key, ids)
    order = np.lexsort((ids, -noisy))[:count]
    return ids[order].tolist(), noisy[order].tolist()


def probabilities(z: Floats, rule: Rule) -> Floats:
    """The distribution [vocab] the draw follows; one-hot at the lowest best id when greedy."""
    p = np.zeros(len(z))
    if rule.temperature <= 0.0:
        p[int(np.argmax(z))] = 1.0
        return p
    ids = np.sort(kept(z, rule))
    p[ids] = exp(z[ids] - z.max())
    p /= lane_sum(p)
    return p


def logprobs(logits: NDArray[np.float32], token: int, count: int) -> tuple[float, list[int], list[float]] | None:
    """Log-softmax of raw logits: the token's, then the `count` likeliest ids and theirs; None when a logit is bad."""
    z = scores(logits, np.zeros(0, np.int64), np.zeros(0), 0.0)
    if z is None:
        return None
    peak = z.max()
    total = log(np.array([lane_sum(exp(z - peak))]))[0]
    best = largest(z, np.flatnonzero(z > -np.inf), count)
    return float(z[token] - peak - total), best.tolist(), (z[best] - peak - total).tolist()


def top(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and values, [rows, count], of the largest logits above -infinity of each row, in order; a NaN is passed over.

    Places that stay empty hold -1 and -infinity.
    """
    ids = np.full((len(logits), count), -1, np.int32)
    values = np.full((len(logits), count), -np.inf, np.float32)
    for row, x in enumerate(logits):
        best = largest(x, np.flatnonzero(x > -np.inf), count)
        ids[row, : len(best)], values[row, : len(best)] = best, x[best]
    return ids, values
