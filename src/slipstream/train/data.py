"""Answers as examples: reading, what is held out, the draft vocabulary, and batches in an order that a seed fixes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.core.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

HELD_OUT = 40
"""One row in this many is kept out of training, to be measured on."""
WINDOW = 64
"""Batches in a stretch of rows that is sorted by length."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One answer. tokens: int32, prompt and answer; prompt: how many are the prompt's. greedy: how it was made."""

    key: str
    tokens: NDArray[np.int32]
    prompt: int
    greedy: bool

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt


def read_answers(paths: Sequence[Path], vocab: int, tokenizer: str) -> list[Example]:
    """All answers of files that `train answers` wrote with a tokenizer of this fingerprint, each once.

    Raises InputError naming the file and the line of whatever is wrong.
    """
    found: dict[str, Example] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None
        if not lines:
            raise InputError(f"{path} is empty; write it with `slipstream train answers`")
        check_header(_parsed(lines[0], f"{path} line 1"), path, tokenizer)
        for number, line in enumerate(lines[1:], 2):
            example = _example(_parsed(line, f"{path} line {number}"), f"{path} line {number}", vocab)
            found.setdefault(example.key, example)
    if not found:
        raise InputError(f"there are no answers in {', '.join(map(str, paths))}")
    return list(found.values())


def check_header(header: dict[str, Any], path: Path, tokenizer: str) -> None:
    """Raise InputError unless a file was written for this tokenizer."""
    if "slipstream_answers" not in header:
        raise InputError(f"{path} line 1 is no header of answers; write the file with `slipstream train answers`")
    if header.get("tokenizer") != tokenizer:
        raise InputError(f"{path} was written by {header.get('model', 'a model')} with other tokens than the target's")


def _parsed(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is not JSON ({error}); remove the line") from None
    if not isinstance(row, dict):
        raise InputError(f"{place} is no object; remove the line")
    return row


def _example(row: dict[str, Any], place: str, vocab: int) -> Example:
    parts = []
    for name in ("prompt_token_ids", "token_ids"):
        ids = row.get(name)
        if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
            raise InputError(f"{place}: {name} must be a list of whole numbers, not empty; remove the line")
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise InputError(f"{place}: {name} holds {wrong}; the target's ids are 0 to {vocab - 1}")
        parts.append(ids)
    key = str(row.get("key") or hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16])
    tokens = np.asarray(parts[0] + parts[1], np.int32)
    return Example(key, tokens, len(parts[0]), not row.get("temperature"))


def split(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Rows to train on and rows held out, by their keys alone: the same row is always on the same side.

    Rows too short to guess anything in are left out. Raises InputError when nothing is left to train on.
    """
    usable = [each for each in examples if each.prompt >= 2 and each.answer >= 2]
    held = [each for each in usable if _place(each) % HELD_OUT == 0]
    train = [each for each in usable if _place(each) % HELD_OUT]
    if not train:
        raise InputError(f"{len(examples)} answers leave nothing to train on; write more of them")
    return train, held or train[:1]


def _place(example: Example) -> int:
    return int(hashlib.sha256(example.key.encode()).hexdigest()[:8], 16)


def draft_vocabulary(examples: Sequence[Example], size: int, vocab: int, extra: Sequence[int]) -> NDArray[np.int32]:
    """The `size` ids most frequent in the answers, ascending; lowest ids on ties. extra: ids always among them.

    Raises InputError for a size the vocabulary has not.
    """
    if not len(set(extra)) <= size <= vocab:
        raise InputError(f"the draft vocabulary is {size}; it must be from {len(set(extra))} to {vocab}")
    counts = np.zeros(vocab, np.int64)
    for example in examples:
        np.add.at(counts, example.tokens[example.prompt :], 1)
    counts[list(extra)] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(vocab), -counts))
    return np.sort(order[:size]).astype(np.int32)


def batches(examples: Sequence[Example], positions: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of examples, batch by batch: about `positions` answer tokens each, rows of like prompt lengths together.

    The order depends on (seed, epoch) alone.
    """
    chance = np.random.default_rng([seed, epoch])
    order = chance.permutation(len(examples))
    mean = max(1.0, float(np.mean([example.answer for example in examples])))
    stretch = max(1, round(WINDOW * positions / mean))
    made: list[list[int]] = []
    for start in range(0, len(order), stretch):
        part = sorted(order[start : start + stretch].tolist(), key=lambda index: examples[index].prompt)
        made += _cut(part, examples, positions)
    return [made[index] for index in chance.permutation(len(made))]


def _cut(order: Sequence[int], examples: Sequence[Example], positions: int) -> list[list[int]]:
    made: list[list[int]] = [[]]
    total = 0
    for index in order:
        if made[-1] and total + examples[index].answer > positions:
            made.append([])
            total = 0
        made[-1].append(index)
        total += examples[index].answer
    return made


def in_order(examples: Sequence[Example], positions: int, seed: int, start: int) -> Iterator[tuple[int, list[int]]]:
    """(number, batch) from the batch of this number on, epoch after epoch without end."""
    number, epoch = 0, 0
    while True:
        made = batches(examples, positions, seed, epoch)
        for batch in made:
            if number >= start:
                yield number, batch
            number += 1
        epoch += 1
