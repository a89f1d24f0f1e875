"""What `slipstream info` says of a drafting head: its kind and sizes, its target, its flags, what it was made from."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.drafters.heads.probe import Trial
    from slipstream.models.heads.config import HeadConfig
    from slipstream.models.heads.head import Head

FLAGS = {
    "eagle1": ("fc_bias", "attention_bias", "mlp_bias", "own_embedding", "frozen_head", "markov_rank"),
    "eagle3": (
        "norm_before_residual", "feature_norm", "embedding_residual", "fc_bias", "attention_bias", "mlp_bias",
        "own_embedding", "frozen_head", "markov_rank",
    ),
    "medusa": ("frozen_head",),
}  # fmt: skip
"""Settings of each kind that change what is computed."""
NAMES = {"eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3", "medusa": "Medusa"}


def describe(head: Head, path: str, trial: Trial | None = None) -> dict[str, Any]:
    """Everything there is to say of a head that was read from `path`; trial: on its target, where there was one."""
    unused = [f"nothing uses tensor {name}; a target refuses the head" for name in head.unused]
    found = {
        "head": path,
        "format": head.format,
        **head.config.as_dict(),
        "weight_types": sorted({tensor.type for tensor in head.tensors.values()}),
        "weights_bytes": head.nbytes,
        "values": sum(math.prod(tensor.shape) for tensor in head.tensors.values()),
        "notices": [*head.notices, *unused],
        "provenance": head.provenance,
    }
    if trial is not None:
        found["trial"] = {"right": trial.right, "guesses": trial.count, "remedy": trial.remedy}
    return found


def as_text(head: Head, path: str, trial: Trial | None = None) -> str:
    """The same for people."""
    config, found = head.config, describe(head, path, trial)
    width_of = f"hidden states of {config.target_hidden}"
    target = [config.target or "not named", width_of, f"{config.vocab or 'any number of'} tokens"]
    target += [f"tokenizer {config.fingerprint[:8]}"] if config.fingerprint else []
    drafts = f"{config.draft_vocab or 'all'} tokens, {config.drafts or 'any number'} in a row"
    lines = [
        ("head", f"{NAMES[config.kind]}, {sizes(config)}  ({path}, format {head.format})"),
        ("target", ", ".join(target)),
        ("reads", reads(config)),
        ("drafts", drafts + (f"; positions up to {config.max_context}" if config.max_context else "")),
        ("weights", f"{head.nbytes / 1e6:.1f} MB ({', '.join(found['weight_types'])}), {found['values']:,} values"),
        ("flags", ", ".join(f"{name} {json.dumps(getattr(config, name))}" for name in FLAGS[config.kind])),
        *(("notice", notice) for notice in found["notices"]),
    ]
    if trial is not None:
        lines.append(("trial", trial.told()))
    facts = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in head.provenance.items()]
    lines += [("made from", f"{name}: {value}") for name, value in facts] or [("made from", "not said in the file")]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)


def sizes(config: HeadConfig) -> str:
    """The network in words."""
    if config.kind == "medusa":
        return f"{config.medusa_heads} heads of {config.medusa_layers} residual blocks, width {config.hidden}"
    heads = f"{config.heads} heads ({config.kv_heads} for keys and values) of {config.head_dim}"
    return f"{config.layers} layer{'s' * (config.layers > 1)} of width {config.hidden}, {heads}"


def reads(config: HeadConfig) -> str:
    """Which hidden states, in words."""
    if config.final_norm:
        return "what leaves the target's final norm"
    if not config.feature_layers:
        return "inputs of layers 2, n / 2 and n - 3 of n: the file does not say which"
    return f"inputs of layers {', '.join(map(str, config.feature_layers))}"
