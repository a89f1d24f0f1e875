"""What a drafting head is: one description for all formats, shared by drafting and training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from slipstream.core.errors import ModelError

KINDS = ("eagle1", "eagle3", "medusa")
MOST_VOCAB, MOST_PARTS = 2**24, 1024
"""Tokens, and layers or heads: far more than there are anywhere. What a damaged file says beyond is not built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Numbers and flags of one head.

    kind: eagle1 (EAGLE and EAGLE-2 share it: the tree is the drafter's affair), eagle3 or medusa. hidden: width of
    the head; target_hidden: of the target's hidden states. vocab: the target's; draft_vocab: tokens the head can
    draft (`vocab` when it is not reduced). Both are 0 where a file does not say, which means the target's.
    heads .. rope_scaling, layers: the decoder layers of EAGLE heads, rope_scaling as in ModelConfig.
    feature_layers: target layers whose *inputs* are read (the number of layers: what leaves the last one, before the
    final norm); empty means the kind's usual ones, see `layers_of`. norm_before_residual: the first layer's residual
    is hidden_norm(h) instead of h. medusa_heads, medusa_layers: heads, residual blocks of each.
    feature_norm: each feature is RMS-normed on its own before fc. embedding_residual: W x norm(embedding) is added to
    the first layer's residual. own_embedding: the file holds embed_tokens; else the target's is used. frozen_head: rows
    of the LM head are the target's rows of the drafted ids, and are not stored. markov_rank: logits of a token are
    raised by markov_out @ markov_in[token before it]; 0 for none. depth: tokens drafted in a row during training, 0
    where that is not known. max_context: positions it was made for, 0 for the target's. target, fingerprint: name of
    the target and fingerprint of its tokenizer, empty if unknown.
    """

    kind: str
    hidden: int
    target_hidden: int
    vocab: int
    draft_vocab: int
    layers: int = 1
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=lambda: {"type": "default"})
    eps: float = 1e-5
    feature_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    medusa_heads: int = 0
    medusa_layers: int = 0
    feature_norm: bool = False
    embedding_residual: bool = False
    own_embedding: bool = False
    frozen_head: bool = False
    markov_rank: int = 0
    depth: int = 0
    max_context: int = 0
    target: str = ""
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"head kind is {self.kind!r}; known are {', '.join(KINDS)}")
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        needed: tuple[str, ...] = ("hidden", "target_hidden")
        needed += ("medusa_heads",) if self.kind == "medusa" else ("layers", "heads", "kv_heads", "head_dim")
        for name in needed:
            if getattr(self, name) < 1:
                raise ModelError(f"head: {name} is {getattr(self, name)}; it must be 1 or more")
        self._check_ranges()
        if self.kind != "medusa" and (self.heads % self.kv_heads or self.head_dim % 2):
            raise ModelError(
                f"head: {self.heads} heads, {self.kv_heads} key-value heads of {self.head_dim} values do not fit"
            )
        ours = [
            name for name in ("feature_norm", "embedding_residual") if getattr(self, name) and self.kind != "eagle3"
        ]
        ours += ["markov_rank"] if self.markov_rank and self.kind == "medusa" else []
        if ours:
            raise ModelError(f"head: {ours[0]} is not defined for {self.kind} heads")
        if self.kind == "medusa" and self.hidden != self.target_hidden:
            raise ModelError(f"head: medusa of width {self.hidden} on hidden states of width {self.target_hidden}")

    def _check_ranges(self) -> None:
        """Raise ModelError for a number that no head has."""
        vocabularies, parts = ("vocab", "draft_vocab"), ("layers", "medusa_heads", "medusa_layers")
        limits = dict.fromkeys(vocabularies, MOST_VOCAB) | dict.fromkeys(parts, MOST_PARTS)
        for name in (*limits, "intermediate", "markov_rank", "depth", "max_context"):
            most = limits.get(name, 2**31 - 1)
            if not 0 <= getattr(self, name) <= most:
                raise ModelError(f"head: {name} is {getattr(self, name)}; it must be 0 to {most}, the head is damaged")
        for name in ("rope_theta", "eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ModelError(f"head: {name} is {getattr(self, name)}; it must be positive, the head is damaged")

    @property
    def inputs(self) -> int:
        """Columns of fc: all features of EAGLE-3; embedding and feature of EAGLE-1."""
        if self.kind == "eagle1":
            return self.hidden + self.target_hidden
        return self.target_hidden * (len(self.feature_layers) or 3)

    @property
    def final_norm(self) -> bool:
        """True when the one feature is what leaves the last layer, after the target's own final norm."""
        return self.kind != "eagle3"

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The feature layers on a target of this many layers."""
        if self.feature_layers:
            return self.feature_layers
        return (2, num_layers // 2, num_layers - 3) if self.kind == "eagle3" else (num_layers,)

    @property
    def drafts(self) -> int:
        """Most tokens to draft in a row, 0 for no limit: what it was trained for, or the heads there are."""
        return self.medusa_heads if self.kind == "medusa" else self.depth

    def as_dict(self) -> dict[str, Any]:
        """Every number and flag, as JSON takes them."""
        return {**asdict(self), "feature_layers": list(self.feature_layers), "rope_scaling": dict(self.rope_scaling)}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], source: str) -> HeadConfig:
        """The reverse of as_dict. Raises ModelError naming what is missing, unknown or of a wrong type."""
        known = {entry.name: entry for entry in fields(cls)}
        for name in table:
            if name not in known:
                raise ModelError(f"{source}: unknown setting {name!r}; the head is of a newer version of slipstream")
        plain: dict[str, Any] = dict(table)
        for name, entry in known.items():
            if name not in plain:
                raise ModelError(f"{source}: {name} is missing; the head is damaged, write it again")
            value = plain[name]
            if entry.type == "float" and type(value) is int:
                value = plain[name] = float(value)
            expected = {"str": str, "int": int, "float": float, "bool": bool}.get(str(entry.type), object)
            if type(value) is not expected and expected is not object:
                raise ModelError(f"{source}: {name} is {value!r}; it must be {entry.type}")
        layers = plain["feature_layers"]
        if not isinstance(layers, (list, tuple)) or any(type(layer) is not int for layer in layers):
            raise ModelError(f"{source}: feature_layers is {layers!r}; it must be a list of layers")
        scaling = plain["rope_scaling"]
        if not isinstance(scaling, Mapping) or not isinstance(scaling.get("type"), str):
            raise ModelError(f"{source}: rope_scaling is {scaling!r}; it must be a table with a type")
        return cls(**plain)


def tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of all stored tensors. Rows are outputs: y = W x.

    A vocabulary the file does not state counts as 0 rows.
    """
    found = _medusa(config) if config.kind == "medusa" else _eagle(config)
    if config.own_embedding:
        found["embed_tokens.weight"] = (config.vocab, config.hidden)
    if config.feature_norm:
        found["feature_norm.weight"] = (config.target_hidden * (len(config.feature_layers) or 3),)
    if config.embedding_residual:
        found["embedding_residual.weight"] = (config.hidden, config.hidden)
    if config.markov_rank:
        found["markov_in.weight"] = (config.vocab, config.markov_rank)
        found["markov_out.weight"] = (config.draft_vocab, config.markov_rank)
    return found


def _medusa(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for head in range(config.medusa_heads):
        for layer in range(config.medusa_layers):
            found[f"medusa.{head}.{layer}.linear.weight"] = (config.hidden, config.hidden)
            found[f"medusa.{head}.{layer}.linear.bias"] = (config.hidden,)
        if not config.frozen_head:
            found[f"medusa.{head}.lm_head.weight"] = (config.draft_vocab, config.hidden)
    return found


def _eagle(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"fc.weight": (config.hidden, config.inputs)}
    if config.fc_bias:
        found["fc.bias"] = (config.hidden,)
    for layer in range(config.layers):
        found |= _layer(config, layer)
    if config.kind == "eagle3":
        found["norm.weight"] = (config.hidden,)
    if not config.frozen_head:
        found["lm_head.weight"] = (config.draft_vocab, config.hidden)
    return found


def _layer(config: HeadConfig, layer: int) -> dict[str, tuple[int, ...]]:
    first, three = layer == 0, config.kind == "eagle3"
    prefix, hidden = f"layers.{layer}.", config.hidden
    inputs = 2 * hidden if first and three else hidden
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {}
    if three or not first:
        found["input_layernorm.weight"] = (hidden,)
    if three and first:
        found["hidden_norm.weight"] = (hidden,)
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        found[f"self_attn.{part}_proj.weight"] = (rows, inputs)
        if config.attention_bias:
            found[f"self_attn.{part}_proj.bias"] = (rows,)
    found["self_attn.o_proj.weight"] = (hidden, queries)
    found["post_attention_layernorm.weight"] = (hidden,)
    for part in ("gate", "up"):
        found[f"mlp.{part}_proj.weight"] = (config.intermediate, hidden)
        if config.mlp_bias:
            found[f"mlp.{part}_proj.bias"] = (config.intermediate,)
    found["mlp.down_proj.weight"] = (hidden, config.intermediate)
    if config.mlp_bias:
        found["mlp.down_proj.bias"] = (hidden,)
    return {prefix + name: shape for name, shape in found.items()}
