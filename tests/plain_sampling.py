"""The slow definition of sampling, written from the rules alone: full sorts, noise for every token, math's log."""

import math

import numpy as np

MASK = (1 << 64) - 1
G = 0x9E3779B97F4A7C15


def mix(h):
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
    return h ^ (h >> 31)


def noise(seed, t, token, stream=0):
    key = mix(((mix((mix((seed + G) & MASK) ^ stream) + G & MASK) ^ t) + G) & MASK)
    h = mix((key + token * G) & MASK)
    return -math.log(-math.log(((h >> 12) + 0.5) * 2.0**-52))


def processed(logits, params, prompt, output, end_ids=(), allowed=None):
    """Processed logits, a list of floats; history is all of prompt and output (drafted ancestors included)."""
    x = [float(value) for value in logits]
    for token in range(len(x)):
        if allowed is not None and not allowed[token]:
            x[token] = -math.inf
    if len(output) < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else end_ids)}:
            x[token] = -math.inf
    for token, value in params.logit_bias.items():
        x[token] += value
    penalty = params.repetition_penalty
    for token in {*prompt, *output}:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty
    return x


def survivors(x, params):
    """Tokens left by min_p, top_k, top_p with their scaled scores, in order."""
    z = [value / params.temperature for value in x]
    order = sorted((token for token in range(len(z)) if z[token] > -math.inf), key=lambda token: (-z[token], token))
    if params.min_p > 0:
        order = [token for token in order if z[token] >= z[order[0]] + math.log(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = [math.exp(z[token] - z[order[0]]) for token in order]
        total, running, keep = math.fsum(mass), 0.0, 0
        for keep, weight in enumerate(mass, 1):  # noqa: B007
            running += weight
            if running >= params.top_p * total:
                break
        order = order[:keep]
    return order, z


def draw(x, params, seed, t, count=1):
    """The best `count` tokens."""
    if params.temperature < 1e-5:
        return sorted((v for v in range(len(x)) if x[v] > -math.inf), key=lambda v: (-x[v], v))[:count]
    order, z = survivors(x, params)
    return sorted(order, key=lambda token: (-(z[token] + noise(seed, t, token)), token))[:count]


def law(x, params):
    """Probabilities."""
    p = np.zeros(len(x))
    if params.temperature < 1e-5:
        p[draw(x, params, 0, 0)[0]] = 1.0
        return p
    order, z = survivors(x, params)
    for token in order:
        p[token] = math.exp(z[token] - z[order[0]])
    return p / p.sum()
