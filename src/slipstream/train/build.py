"""From an opened target and its answers to everything a training run needs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.core.errors import InputError, UnsupportedError
from slipstream.drafters.heads.modules import make_module
from slipstream.drafters.heads.parts import TargetParts, parts_of
from slipstream.models.fingerprint import weights_fingerprint
from slipstream.models.heads.config import HeadConfig
from slipstream.targets.native.load import require_supported
from slipstream.targets.native.model import NativeTarget
from slipstream.train.data import Example, draft_vocabulary, read_answers, split
from slipstream.train.loss import Truth
from slipstream.train.run import Options, Training
from slipstream.train.shelf import Shelf

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.models.files import ModelFile

log = logging.getLogger(__name__)

LOGIT_SCALE = 0.3
"""What the head's own final norm begins as, relative to the target's: flatter guesses, as nothing is known yet."""


@dataclass(frozen=True, slots=True)
class Design:
    """What is free to choose in a head.

    draft_vocab: tokens it can draft; drafts: in a row. EAGLE-3: layers, intermediate (0: the target's), feature_layers
    (empty: the usual three), flags, markov_rank. Medusa: `drafts` heads of `medusa_layers` blocks each.
    """

    kind: str = "eagle3"
    draft_vocab: int = 8192
    drafts: int = 3
    layers: int = 1
    intermediate: int = 0
    feature_layers: tuple[int, ...] = ()
    feature_norm: bool = True
    embedding_residual: bool = True
    norm_before_residual: bool = False
    markov_rank: int = 0
    medusa_layers: int = 1


def head_config(file: ModelFile, design: Design) -> HeadConfig:
    """The description of a new head for this target. Raises UnsupportedError for targets it cannot be made for."""
    config = file.config
    require_supported(config)
    if design.kind not in ("eagle3", "medusa"):
        raise UnsupportedError(f"heads of kind {design.kind} cannot be trained; choose eagle3 or medusa")
    common: dict[str, Any] = {
        "kind": design.kind,
        "hidden": config.hidden_size,
        "target_hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "draft_vocab": design.draft_vocab,
        "frozen_head": True,
        "depth": design.drafts,
        "target": file.name,
        "fingerprint": file.tokenizer().fingerprint(),
    }
    if design.kind == "medusa":
        return HeadConfig(
            **common,
            medusa_heads=design.drafts,
            medusa_layers=design.medusa_layers,
            feature_layers=(config.num_layers,),
        )
    return HeadConfig(
        **common,
        layers=design.layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=design.intermediate or config.intermediate_size,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        eps=config.rms_eps,
        feature_layers=checked_layers(design.feature_layers, file),
        feature_norm=design.feature_norm,
        embedding_residual=design.embedding_residual,
        norm_before_residual=design.norm_before_residual,
        markov_rank=design.markov_rank,
    )


def checked_layers(layers: Sequence[int], file: ModelFile) -> tuple[int, ...]:
    """The layers to read, or the usual three. Raises InputError, UnsupportedError."""
    count = file.config.num_layers
    wrong = next((layer for layer in layers if not 0 <= layer <= count), None)
    if wrong is not None:
        raise InputError(f"feature layer {wrong} does not exist; {file.name} has layers 0 to {count}")
    if layers:
        return tuple(layers)
    if count < 6:
        raise UnsupportedError(
            f"{file.name} has {count} layers, too few to read (2, n / 2, n - 3); name feature layers"
        )
    return (2, count // 2, count - 3)


def stored_layers(config: HeadConfig, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are kept on disk: those the head reads, and what leaves the last one."""
    return tuple(dict.fromkeys((*config.layers_of(num_layers), num_layers)))


def store_folder(answers: Path) -> Path:
    """Where the features of a file of answers lie, unless said otherwise."""
    return answers.with_name(f"{answers.name}.features")


def load_target(file: ModelFile, layers: Sequence[int], slots: int) -> NativeTarget:
    """The target with features. Raises UnsupportedError where the native runtime cannot run it."""
    return NativeTarget.load(file, None, slots, features=layers)


@dataclass(slots=True)
class Material:
    """What a run is made of, beside its options: description, answers by side, features, drafted ids, where from."""

    file: ModelFile
    config: HeadConfig
    examples: tuple[list[Example], list[Example]]
    shelf: Shelf
    ids: NDArray[np.int32]
    provenance: dict[str, Any]


def gather(
    file: ModelFile,
    paths: Sequence[Path],
    design: Design,
    features: Path | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Material:
    """Read the answers, and the features that no file has yet through the target.

    features: their folder; None: beside the first file of answers. Raises InputError, UnsupportedError.
    """
    config = head_config(file, design)
    examples = split(read_answers(paths, file.config.vocab_size, config.fingerprint))
    ids = draft_vocabulary(examples[0], design.draft_vocab, file.config.vocab_size, file.config.end_ids)
    weights = weights_fingerprint(file.path)
    folders = [store_folder(path) for path in paths] if features is None else [features]
    shelf = Shelf(folders, weights, stored_layers(config, file.config.num_layers), file.config.hidden_size)
    sequences = [example.tokens.tolist() for part in examples for example in part]
    shelf.fill(sequences, lambda layers: load_target(file, layers, 1), report)
    provenance = {
        "target": file.name,
        "weights": weights,
        "data": {path.name: file_hash(path) for path in paths},
        "answers": len(examples[0]),
        "answer_tokens": sum(example.answer for example in examples[0]),
        "held_out_answers": len(examples[1]),
    }
    return Material(file, config, examples, shelf, ids, provenance)


def file_hash(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def truth_of(target: TargetParts, ids: NDArray[np.int32], device: torch.device, dtype: torch.dtype) -> Truth:
    """What the head learns from."""
    norm, rows = torch.from_numpy(target.final_norm()), torch.from_numpy(target.head_rows(ids))
    drafted = torch.full((target.head.shape[0],), -1, dtype=torch.int64)
    drafted[torch.from_numpy(ids.astype(np.int64))] = torch.arange(len(ids))
    return Truth(norm.to(device), target.eps, rows.to(device, dtype), drafted.to(device))


def start(material: Material, options: Options, device: torch.device) -> Training:
    """A run at its beginning: weights from the seed, nothing learned."""
    file, config = material.file, material.config
    dtype = torch.bfloat16 if options.autocast else torch.float32
    torch.manual_seed(options.seed)
    target = parts_of(file)
    truth = truth_of(target, material.ids, device, dtype)
    embedding = None
    if config.kind != "medusa":
        embedding = torch.from_numpy(target.embedding.float32()).to(device, dtype)
    module = make_module(config, embedding, truth.rows)
    if config.kind == "eagle3":
        with torch.no_grad():
            module.get_parameter("norm.weight").copy_(truth.norm.cpu() * LOGIT_SCALE)
    if options.schedule.unroll != config.depth:
        options = replace(options, schedule=replace(options.schedule, unroll=config.depth))
    layers = config.layers_of(file.config.num_layers)
    read = material.shelf.reader((*layers, file.config.num_layers))
    width = len(layers) * config.target_hidden
    training = Training(module.to(device), truth, material.examples, read, width, options)
    training.target_rows = target.head_rows
    return training
