"""What the formats share: flags and sizes out of config.json, the map of drafted ids, additions of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.config import Keys, hf_rope_scaling
from slipstream.models.heads.config import HeadConfig, tensors
from slipstream.models.heads.head import Head, as_ids, full_ids, store
from slipstream.models.heads.weights import Weights
from slipstream.models.tensor import Tensor

Rows = Callable[[NDArray[np.int32]], NDArray[np.float32]]
"""The target's LM head: fp32 rows [ids, hidden] of these target ids."""
KEY = "slipstream"
"""Where config.json of a foreign format keeps what only slipstream reads."""
PROVENANCE = "provenance"
"""What a head was made from, for the reader's eyes: at the top of slipstream's format, under KEY in foreign ones."""
OURS = ("feature_norm", "embedding_residual", "markov_rank")
"""Settings that change what a head computes and that no other reader knows."""
OWN_TENSORS = ("feature_norm.weight", "embedding_residual.weight", "markov_in.weight", "markov_out.weight")
IGNORED = ("rotary_emb.inv_freq",)
NESTED = ("eagle_config", "transformer_layer_config")
"""Tables inside of config.json that may say a setting of its top again."""


@dataclass(slots=True)
class Written:
    """A head as a format wants it: config.json, tensors of the main file, tensors only slipstream reads, notices."""

    config: dict[str, Any]
    values: dict[str, Tensor]
    numbers: dict[str, NDArray[Any]]
    extra: dict[str, Tensor] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def inner(config: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """A table inside of config.json; an empty one when absent."""
    value = config.get(name)
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise ModelError(f"{source}: {name} is {str(value)[:80]!r}; it must be a table of settings")


def stated(config: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """What config.json says of a setting, by where it does: at the top first, then inside of nested tables."""
    tables = {"at the top": config, **{f"inside {place}": inner(config, place, source) for place in NESTED}}
    return {place: table[name] for place, table in tables.items() if table.get(name) is not None}


def contradiction(name: str, found: Mapping[str, Any]) -> str:
    """What is said of a setting and where, if not everywhere alike; else an empty text."""
    said = {place: json.dumps(value) for place, value in found.items()}
    if len(set(said.values())) < 2:
        return ""
    return f"{name} is " + " and ".join(f"{value} {place}" for place, value in said.items())


def flag(config: Mapping[str, Any], name: str, source: str, notices: list[str]) -> bool | None:
    """A truth value at the top of config.json or nested; None where it is in neither.

    No shape of a tensor tells which is right where they differ: the first is used, and a notice is added.
    """
    found = stated(config, name, source)
    for value in found.values():
        if type(value) is not bool:
            raise ModelError(f"{source}: {name} is {value!r}; it must be true or false")
    first: bool | None = next(iter(found.values()), None)
    if both := contradiction(name, found):
        notices.append(f"{both}: read as {json.dumps(first)}; correct the one that is wrong")
    return first


def size(
    config: Mapping[str, Any], name: str, default: int, source: str, notices: list[str], held: Collection[int]
) -> int:
    """A number at the top of config.json or nested, else the default.

    held: what the tensors make it. Where the file says two numbers, that one is used and a notice added. Raises
    ModelError where the tensors speak for neither.
    """
    found = stated(config, name, source)
    sizes = [Keys({name: value}, source).integer(name) for value in found.values()] or [default]
    if both := contradiction(name, found):
        fitting = [size for size in sizes if size in held]
        if not fitting:
            raise ModelError(f"{source}: {both}, and its tensors fit neither; the settings belong to another head")
        notices.append(f"{both}: read as {fitting[0]}, which its tensors have; correct the other")
        return fitting[0]
    return sizes[0]


def layer_ids(config: Mapping[str, Any], name: str, source: str) -> tuple[int, ...]:
    """A list of layers out of a table; empty when absent."""
    value = config.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or any(type(layer) is not int for layer in value):
        raise ModelError(f"{source}: {name} is {value!r}; it must be a list of layers")
    return tuple(value)


def decoder_settings(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Sizes of the decoder layers, as every format of the Llama family names them."""
    keys = Keys(config, source)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"{source}: hidden_act is {activation!r}; heads are run with silu only")
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    rope = inner(config, "rope_parameters", source)
    found: dict[str, Any] = {
        "layers": keys.integer("num_hidden_layers", 1),
        "heads": heads,
        "kv_heads": keys.integer("num_key_value_heads", heads),
        "head_dim": keys.integer("head_dim", hidden // heads),
        "intermediate": keys.integer("intermediate_size"),
        "rope_theta": Keys({**config, **rope}, source).number("rope_theta", 10000.0),
        "rope_scaling": hf_rope_scaling(config.get("rope_scaling") or rope, keys),
        "eps": keys.number("rms_norm_eps", 1e-5),
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "max_context": keys.integer("max_position_embeddings") if keys.has("max_position_embeddings") else 0,
    }
    return found


def decoder_json(config: HeadConfig) -> dict[str, Any]:
    """The reverse of decoder_settings. Raises UnsupportedError for a rotation other files cannot express."""
    if config.rope_scaling["type"] == "factors":
        raise UnsupportedError("the head's rotation has stored divisors, which only the slipstream format keeps")
    scaling = None
    if config.rope_scaling["type"] != "default":
        rest = {key: value for key, value in config.rope_scaling.items() if key != "type"}
        scaling = {"rope_type": config.rope_scaling["type"], **rest}
    return {
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context or 2048,
    }


def drafted_ids(weights: Weights, vocab: int, draft_vocab: int, source: str) -> tuple[NDArray[np.int32], list[str]]:
    """Target ids of the drafted ids out of d2t (differences), and notices. t2d, where there is one, must agree."""
    d2t, t2d = weights.numbers.pop("d2t", None), weights.numbers.pop("t2d", None)
    notices: list[str] = []
    if d2t is None:
        if draft_vocab == vocab:
            return full_ids(vocab), notices
        if t2d is None:
            raise ModelError(
                f"{source}: drafts {draft_vocab} of {vocab} tokens but holds no d2t; the head is incomplete"
            )
        ids = np.flatnonzero(t2d.reshape(-1))
        notices.append("d2t is missing; the drafted ids were taken from t2d, in ascending order")
    else:
        ids = np.arange(len(d2t.reshape(-1)), dtype=np.int64) + d2t.reshape(-1).astype(np.int64)
        inside = (ids >= 0) & (ids < vocab)
        if t2d is not None and len(ids) == draft_vocab and inside.all():
            mask = np.zeros(max(vocab, t2d.size), bool)
            mask[ids] = True
            if not np.array_equal(mask[: t2d.size], t2d.reshape(-1).astype(bool)):
                notices.append("d2t and t2d name different tokens; d2t is used, as every reader does")
    return as_ids(ids), notices


def maps_of(head: Head) -> dict[str, NDArray[Any]]:
    """d2t as differences, int64 [draft_vocab], and t2d as a mask, bool [vocab]."""
    config = head.config
    mask = np.zeros(config.vocab, np.bool_)
    mask[head.ids] = True
    return {"d2t": head.ids.astype(np.int64) - np.arange(config.draft_vocab, dtype=np.int64), "t2d": mask}


def assemble(config: HeadConfig, weights: Weights, ids: NDArray[np.int32], notices: list[str]) -> Head:
    """A head of the tensors the description names; the others are remembered as unused."""
    wanted = tensors(config)
    known = {*wanted, "lm_head.weight"} if config.frozen_head else set(wanted)  # for readers without the target
    unused = [name for name in weights.names() if name not in known and not name.endswith(IGNORED)]
    return Head(config, {name: weights.values[name] for name in wanted if name in weights.values}, ids, notices, unused)


def read_ours(
    config: HeadConfig, table: Mapping[str, Any], weights: Weights, extra: Weights, source: str
) -> HeadConfig:
    """Add what a foreign config.json keeps for slipstream alone; its tensors join the others."""
    ours = {name: value for name, value in inner(table, KEY, source).items() if name != PROVENANCE}
    weights.values.update(extra.values)
    return HeadConfig.from_dict({**config.as_dict(), **ours}, source) if ours else config


def our_settings(config: HeadConfig) -> dict[str, Any]:
    """The settings that a foreign config.json cannot say, for its slipstream table."""
    names = (*OURS, "frozen_head", "own_embedding", "depth", "max_context", "target", "fingerprint")
    table = config.as_dict()
    return {name: table[name] for name in names}


def split_ours(head: Head) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """(tensors every reader knows, tensors only slipstream reads, notices)."""
    common = {name: foreign(tensor) for name, tensor in head.tensors.items() if name not in OWN_TENSORS}
    extra = {name: tensor for name, tensor in head.tensors.items() if name in OWN_TENSORS}
    used = [name for name in OURS if getattr(head.config, name)]
    notices = []
    if used:
        notices.append(
            f"other readers ignore {', '.join(used)} and will draft worse with this head; slipstream reads them back"
        )
    return common, extra, notices


def foreign(tensor: Tensor) -> Tensor:
    """A tensor in a type that every reader knows."""
    return store(tensor.float32(), "F16") if tensor.type == "Q8_0" else tensor


def with_head_rows(head: Head, rows: Rows | None, format_name: str) -> tuple[Tensor | None, str]:
    """Rows of a frozen LM head, written out for readers that want them, and the name of the target.

    Raises ModelError when the target is needed for that and not given.
    """
    if not head.config.frozen_head:
        return None, head.config.target
    if rows is None:
        name = head.config.target or "the target"
        raise ModelError(
            f"the LM head of this head is made of rows of {name}, which format {format_name} must hold; "
            "name that model with --target"
        )
    return store(rows(head.ids), "F16"), head.config.target


def as_foreign(head: Head) -> Head:
    """The head as a foreign format keeps it: in types that every reader knows, but for what only slipstream reads."""
    kept = {name: tensor if name in OWN_TENSORS else foreign(tensor) for name, tensor in head.tensors.items()}
    return replace(head, tensors=kept)
