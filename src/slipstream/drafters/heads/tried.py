"""Which heads were tried on which targets: the trial takes a second or more and its outcome does not change."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from slipstream.core.errors import SlipstreamError
from slipstream.drafters.heads.probe import PROMPT, Trial, own_text, reader_of, try_head
from slipstream.models.heads.shipped import FOLDER, place_of
from slipstream.models.home import home

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.drafters.heads.parts import TargetParts
    from slipstream.models.files import ModelFile
    from slipstream.models.heads.head import Head
    from slipstream.targets.base import Target

log = logging.getLogger(__name__)

KIND = "2"
"""Of the trial: outcomes of another kind are not asked."""


def warn_if_useless(argument: str, head: Head, parts: TargetParts, target: Target, model: ModelFile) -> None:
    """Try a head that was not tried on this target before; log a loud warning when it does not fit or is weak."""
    place = place_of(argument)
    if place.parent == FOLDER:
        return
    trial = recall(place, model)
    if trial is None:
        log.info("trying head %s on text of %s", argument, model.name)
        try:
            trial = try_on(head, parts, target, model)
        except SlipstreamError as error:
            log.warning("head %s could not be tried on %s: %s", argument, model.name, error)
            return
        remember(place, model, trial)
    if trial.doubtful:
        log.warning("%s", trial.message(f"head {argument}"))


def try_on(head: Head, parts: TargetParts, target: Target, model: ModelFile) -> Trial:
    """The head on a text of its target's own. Raises SlipstreamError where it cannot be tried."""
    tokens = _prompt(model)
    text = own_text(target, tokens)
    return try_head(head, parts, reader_of(target), text, len(tokens), model.config.num_layers)


def recall(place: Path, model: ModelFile) -> Trial | None:
    """The outcome of an earlier trial; None when there was none, or head or model have changed."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Trial(**json.loads(_note(place, model).read_text()))
    return None


def remember(place: Path, model: ModelFile, trial: Trial) -> None:
    """Write the outcome down, where that is possible."""
    with contextlib.suppress(OSError):
        note = _note(place, model)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(asdict(trial)))


def _note(place: Path, model: ModelFile) -> Path:
    """The file of a pair; its name changes with every file of the head and with the model."""
    known = [KIND, str(place.resolve()), str(model.path), str(model.weights_bytes)]
    for file in sorted(place.iterdir()) if place.is_dir() else []:
        about = file.stat()
        known += [file.name, str(about.st_size), str(about.st_mtime_ns)]
    return home() / "tried-heads" / f"{hashlib.sha256(chr(0).join(known).encode()).hexdigest()[:24]}.json"


def _prompt(model: ModelFile) -> list[int]:
    """The built-in prompt as this model reads it."""
    if model.chat_template is not None:
        from slipstream.models.chat import chat_prompt

        return chat_prompt(model, [{"role": "user", "content": PROMPT}]).token_ids
    return model.tokenizer().encode(PROMPT, add_special=True)
