"""The target writes the answers a head is trained on: batched through the engine, one line each, resumable.

A file of answers begins with a line that says which model wrote it; each further line is one answer in token ids. Rows
are appended and synced to disk in groups, three of which are in work at once: a run that is killed loses no more than
these and goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams
from slipstream.core.rows import read_rows
from slipstream.engine.stop import ENDED_WELL
from slipstream.models.chat import chat_prompt

if TYPE_CHECKING:
    from slipstream.core.types import RequestOutput
    from slipstream.engine.request import Request
    from slipstream.models.files import ModelFile
    from slipstream.targets.base import Target
    from slipstream.train.features import FeatureStore

FORMAT = 1
"""Version of the file format, in its first line."""

Messages = Sequence[Mapping[str, Any]]


class Author:
    """A target that answers conversations in batches; plain decoding, as in large batches drafts do not pay.

    store: where the hidden states that come by are kept, None for nowhere.
    """

    def __init__(self, target: Target, file: ModelFile, max_batch: int, store: FeatureStore | None = None) -> None:
        from slipstream.control.fixed import Fixed
        from slipstream.engine.engine import Engine
        from slipstream.train.features import Recorder
        from slipstream.verify import make_verifier

        self._file = file
        self._recorder = None if store is None else Recorder(store)
        drafters = [] if self._recorder is None else [self._recorder]
        self._engine = Engine(
            target, file.tokenizer(), make_verifier("coupled"), Fixed(0), drafters, max_batch=max_batch
        )

    def submit(self, messages: Messages, params: SamplingParams) -> Request:
        """Queue a conversation, through the chat template where there is one. Raises InputError."""
        if self._file.chat_template is None:
            return self._engine.add("\n".join(str(message["content"]) for message in messages), params)
        return self._engine.add(chat_prompt(self._file, messages).token_ids, params)

    def finish(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run these requests to their ends, others going along. Raises OSError where features cannot be kept."""
        results = self._engine.run(requests)
        if self._recorder is not None and self._recorder.failure is not None:
            raise self._recorder.failure
        return results


@dataclass(frozen=True, slots=True)
class Settings:
    """How answers are written: at most max_tokens each; a share of them sampled at `temperature`, the others greedy.

    max_batch: answers written side by side.
    """

    max_tokens: int = 200
    temperature: float = 0.8
    sampled: float = 0.25
    max_batch: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.sampled <= 1:
            raise InputError(f"the sampled share is {self.sampled}; it must be from 0 to 1")
        if self.max_tokens < 2:
            raise InputError(f"answers of {self.max_tokens} tokens teach nothing; let them have 2 or more")

    def params(self, key: str) -> SamplingParams:
        """Sampling parameters of one prompt; which ones are sampled, and their seeds, follow from the prompt alone."""
        number = int(key, 16)
        sampled = number % 1000 < 1000 * self.sampled
        temperature = self.temperature if sampled else 0.0
        return SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=number % 2**64)


@dataclass(slots=True)
class Progress:
    """Where a run stands: prompts done of all, tokens written in this run, and the seconds it took."""

    done: int
    total: int
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


Report = Callable[[Progress], None]


def read_prompts(paths: Sequence[Path]) -> list[Messages]:
    """Conversations out of JSONL files of prompts; repeated ones once.

    Raises InputError naming the file and the line, or the file that holds none.
    """
    prompts: dict[str, Messages] = {}
    for path in paths:
        for row in read_rows(path):
            prompts.setdefault(prompt_key(row.messages), row.messages)
    return list(prompts.values())


def prompt_key(messages: Messages) -> str:
    """What a conversation is known by in a file of answers."""
    return hashlib.sha256(json.dumps(list(messages), sort_keys=True).encode()).hexdigest()[:16]


def write_answers(
    author: Author,
    prompts: Sequence[Messages],
    out: Path,
    model: Mapping[str, Any],
    settings: Settings,
    report: Report = lambda progress: None,
    enough: Callable[[], bool] = lambda: False,
) -> Progress:
    """Append the answers to all prompts that `out` has none for yet.

    model: what the first line says of the target; a file that another model began is refused (InputError). A last line
    that was torn by a kill is cut off. Prompts the context has no room for are left out. enough: asked before every
    group of prompts; once true no further ones are begun.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    header = {"slipstream_answers": FORMAT, **model}
    known = _known(out, header)
    todo = [messages for messages in prompts if prompt_key(messages) not in known]
    progress = Progress(len(prompts) - len(todo), len(prompts), 0, 0.0)
    started = time.perf_counter()
    with out.open("a", encoding="utf-8") as file:
        if not known and file.tell() == 0:
            _append(file, [header])
        for rows, count in _groups(author, todo, settings, enough):
            _append(file, rows)
            progress.done += count
            progress.tokens += sum(len(row["token_ids"]) for row in rows)
            progress.seconds = time.perf_counter() - started
            report(progress)
    return progress


def _groups(
    author: Author, todo: Sequence[Messages], settings: Settings, enough: Callable[[], bool]
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Rows of one group of prompts after the other; the next group runs already while one is waited for."""
    size = settings.max_batch
    ahead: list[tuple[int, list[tuple[str, float, Request]]]] = []
    for start in range(0, len(todo) + 2 * size, size):
        part = [] if enough() else todo[start : start + size]
        if part:
            ahead.append((len(part), _submit(author, part, settings)))
        if ahead and (len(ahead) > 2 or not part):
            count, group = ahead.pop(0)
            results = author.finish([request for _, _, request in group])
            yield [_row(*each[:2], result) for each, result in zip(group, results, strict=True) if _good(result)], count


def _submit(author: Author, part: Sequence[Messages], settings: Settings) -> list[tuple[str, float, Request]]:
    group = []
    for messages in part:
        key = prompt_key(messages)
        params = settings.params(key)
        try:
            group.append((key, params.temperature, author.submit(messages, params)))
        except InputError:  # longer than the context, or refused by the template: this prompt has no answer
            continue
    return group


def _good(result: RequestOutput) -> bool:
    return result.outputs[0].finish_reason in ENDED_WELL and bool(result.outputs[0].token_ids)


def _row(key: str, temperature: float, result: RequestOutput) -> dict[str, Any]:
    output = result.outputs[0]
    return {
        "key": key,
        "temperature": temperature,
        "finish_reason": output.finish_reason,
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": output.token_ids,
    }


def _append(file: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole lines, on disk when this returns."""
    file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    file.flush()
    os.fsync(file.fileno())


def _known(out: Path, header: Mapping[str, Any]) -> set[str]:
    """Keys of the answers that are there; a torn last line is cut off."""
    if not out.exists():
        return set()
    data = out.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(out, whole)
    if not whole:
        return set()
    lines = data[:whole].decode("utf-8").splitlines()
    first = _parsed(lines[0], f"{out} line 1")
    if first != header:
        raise InputError(f"{out} was begun by {first.get('model', 'something else')}; give another --out")
    return {str(_parsed(line, f"{out} line {number}").get("key")) for number, line in enumerate(lines[1:], 2)}


def _parsed(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise InputError(f"{place} is damaged; remove this line, or give another --out")
    return row
