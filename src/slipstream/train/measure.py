"""How often an existing head guesses right on answers of its target, file by file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.core.errors import InputError
from slipstream.drafters.heads.modules import load_arrays
from slipstream.models.fingerprint import weights_fingerprint
from slipstream.train.build import Material, load_target, start, store_folder, stored_layers
from slipstream.train.data import Example, read_answers
from slipstream.train.run import Options
from slipstream.train.shelf import Shelf

if TYPE_CHECKING:
    from slipstream.models.files import ModelFile
    from slipstream.models.heads.head import Head


def measure_head(
    file: ModelFile, head: Head, paths: Sequence[Path], report: Callable[[int, int], None]
) -> list[tuple[str, int, list[float]]]:
    """(name, answer tokens, acceptance by guess) of each file of answers and, when there are several, of all together.

    Acceptance is the share of right guesses where those before were right. Only greedy answers count where there are
    any. Raises InputError for answers of another tokenizer.
    """
    config = head.config
    if (config.target_hidden, config.vocab) != (file.config.hidden_size, file.config.vocab_size):
        raise InputError(
            f"the head is for a model {config.target_hidden} wide with {config.vocab} tokens, "
            f"{file.name} is {file.config.hidden_size} wide with {file.config.vocab_size}"
        )
    fingerprint = file.tokenizer().fingerprint()
    parts = [
        [each for each in read_answers([path], config.vocab, fingerprint) if each.prompt >= 2 and each.answer >= 2]
        for path in paths
    ]
    layers = stored_layers(config, file.config.num_layers)
    folders = [store_folder(path) for path in paths]
    shelf = Shelf(folders, weights_fingerprint(file.path), layers, file.config.hidden_size)
    try:
        sequences = [example.tokens.tolist() for part in parts for example in part]
        shelf.fill(sequences, lambda wanted: load_target(file, wanted, 1), report)
        everything: list[Example] = [example for part in parts for example in part]
        material = Material(file, config, (everything, everything), shelf, head.ids, {})
        training = start(material, Options(steps=1), torch.device("cpu"))
        load_arrays(training.module, head.arrays())
        named = [(path.name, part) for path, part in zip(paths, parts, strict=True)]
        named += [("all", everything)] if len(paths) > 1 else []
        return [(name, sum(each.answer for each in part), training.acceptance(part)) for name, part in named]
    finally:
        shelf.close()
