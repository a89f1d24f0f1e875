"""What a model last said after each token, and after each pair of tokens: a table of likely successors.

Rows are blended, not replaced: half of a row is what was shown last, a quarter what came before it, and so on.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import InputError

KEPT = 8
"""Successors per context."""
PAIRS = 1 << 15
"""Places for contexts of two tokens; a new pair takes the place of an old one with the same hash."""
NEWEST = 0.5
"""Weight of what was shown last."""
PAIR_WEIGHT = 0.85
"""Weight of the context of two tokens, where it is known, against that of one."""
REPEATS = 8
"""Of a context that a text repeats, the last so many times are learned; earlier ones have lost their weight."""
NO_TOKEN = -1
FORMAT = 1

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


class Successors:
    """ids int32 and weights float32, [vocab_size + PAIRS, KEPT]: row t is for token t, the rows after it for pairs.

    Weights are probabilities, best first; what a row's weights lack to 1 is unknown. Empty places hold -1 and 0.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.ids = np.full((vocab_size + PAIRS, KEPT), NO_TOKEN, np.int32)
        self.weights = np.zeros((vocab_size + PAIRS, KEPT), np.float32)
        self._owner = np.full(PAIRS, NO_TOKEN, np.int64)

    def after(self, before: int, token: int) -> list[tuple[int, float]]:
        """(token, chance) of what may follow `token` that followed `before` (-1: nothing), best first."""
        known = self.weights[token].tolist()
        found = dict(zip(self.ids[token].tolist(), known, strict=True))
        pair = self._pair(before, token)
        if self._owner[pair - self.vocab_size] == before * self.vocab_size + token:
            own = dict(zip(self.ids[pair].tolist(), self.weights[pair].tolist(), strict=True))
            shared = {one: (1.0 - PAIR_WEIGHT) * weight for one, weight in found.items()}
            found = shared | {one: PAIR_WEIGHT * weight + shared.get(one, 0.0) for one, weight in own.items()}
        found.pop(NO_TOKEN, None)
        return sorted(found.items(), key=lambda item: -item[1])

    def learn(self, before: Ids, tokens: Ids, ids: NDArray[np.int32], weights: Weights) -> None:
        """Blend in one list of successors [n, KEPT] per context; of equal contexts in one call the last counts."""
        pairs = self._pairs(before, tokens)
        owners = before * self.vocab_size + tokens
        strange = self._owner[pairs - self.vocab_size] != owners
        self.ids[pairs[strange]] = NO_TOKEN
        self.weights[pairs[strange]] = 0.0
        self._owner[pairs - self.vocab_size] = owners
        known = before >= 0
        rows = np.concatenate((tokens, pairs[known]))
        self._blend(rows, np.concatenate((ids, ids[known])), np.concatenate((weights, weights[known])))

    def read(self, tokens: Sequence[int]) -> None:
        """Learn which token follows which in a text."""
        text = np.asarray(tokens, np.int64)
        if len(text) < 2:
            return
        before = np.concatenate(([NO_TOKEN], text[:-2]))
        for chosen in _rounds(text[:-1], text[1:]):
            ids = np.full((len(chosen), KEPT), NO_TOKEN, np.int32)
            weights = np.zeros((len(chosen), KEPT), np.float32)
            ids[:, 0], weights[:, 0] = text[chosen + 1], 1.0
            self.learn(before[chosen], text[chosen], ids, weights)

    def _blend(self, rows: Ids, ids: NDArray[np.int32], weights: Weights) -> None:
        old_ids, old = self.ids[rows], self.weights[rows]
        # A row that is empty gives its weight to the new list only where that list is the model's own.
        share = np.where((old[:, :1] > 0) | (weights[:, 1:2] <= 0), np.float32(NEWEST), np.float32(1.0))
        new, old = share * weights, (1 - share) * old
        same = (ids[:, :, None] == old_ids[:, None, :]) & (ids[:, :, None] >= 0)
        new = new + np.where(same, old[:, None, :], np.float32(0)).sum(2)
        old = np.where(same.any(1), np.float32(0), old)
        both_ids, both = np.concatenate((ids, old_ids), 1), np.concatenate((new, old), 1)
        order = np.argsort(-both, axis=1, kind="stable")[:, :KEPT]
        weights = np.take_along_axis(both, order, 1)
        self.ids[rows] = np.where(weights > 0, np.take_along_axis(both_ids, order, 1), NO_TOKEN)
        self.weights[rows] = weights

    def _pair(self, before: int, token: int) -> int:
        return self.vocab_size + ((before * 0x9E3779B1 + token * 0x85EBCA77) >> 7) % PAIRS

    def _pairs(self, before: Ids, tokens: Ids) -> Ids:
        return self.vocab_size + ((before * 0x9E3779B1 + tokens * 0x85EBCA77) >> 7) % PAIRS

    def save(self, path: Path, model: str) -> None:
        """Write the table beside `path` and move it there; model: fingerprint of the vocabulary it belongs to."""
        aside = path.with_name(f"{path.name}.{np.random.default_rng().integers(1 << 40):x}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                np.savez(
                    file, format=FORMAT, model=model, ids=self.ids, weights=self.weights, owner=self._owner,
                    check=self._check(),
                )  # fmt: skip
            aside.replace(path)
        except OSError as error:
            raise InputError(f"recycling table {path} cannot be written: {error.strerror or error}") from None
        finally:
            aside.unlink(missing_ok=True)

    def load(self, path: Path, model: str) -> None:
        """Take over a saved table. Raises InputError when it is not one, or belongs to another vocabulary."""
        remedy = "choose another path, or delete the file"
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
                if int(saved["format"]) != FORMAT or str(saved["model"]) != model:
                    raise InputError(f"recycling table {path} belongs to another model or version; {remedy}")
                ids, weights, owner = saved["ids"], saved["weights"], saved["owner"]
                check = int(saved["check"])
        except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"recycling table {path} cannot be read ({error}); {remedy}") from None
        same = (ids.shape, ids.dtype, weights.dtype) == (self.ids.shape, self.ids.dtype, self.weights.dtype)
        if not same or weights.shape != ids.shape or owner.shape != self._owner.shape or ids.max() >= self.vocab_size:
            raise InputError(f"recycling table {path} does not fit a vocabulary of {self.vocab_size}; {remedy}")
        self.ids, self.weights, self._owner = ids, weights, owner
        if check != self._check():
            raise InputError(f"recycling table {path} is damaged; {remedy}")

    def _check(self) -> int:
        return zlib.crc32(self.weights.tobytes(), zlib.crc32(self.ids.tobytes()))


def _rounds(tokens: Ids, followers: Ids) -> list[Ids]:
    """Places of a text in rounds, oldest first, such that no context comes twice in a round; at most REPEATS rounds.

    Contexts are single tokens: a pair repeats no more often than its second token.
    """
    left: dict[int, int] = {}
    rounds: list[list[int]] = [[] for _ in range(REPEATS)]
    for place in range(len(followers) - 1, -1, -1):
        token = int(tokens[place])
        seen = left.get(token, 0)
        if seen < REPEATS:
            rounds[seen].append(place)
            left[token] = seen + 1
    return [np.array(places, np.int64) for places in reversed(rounds) if places]
