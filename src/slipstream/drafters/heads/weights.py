"""From a head's tensors and its target's parts to packed weights for the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.errors import UnsupportedError
from slipstream.drafters.heads.parts import TargetParts, packed
from slipstream.kernels.head_weights import HeadWeights
from slipstream.kernels.memory import together
from slipstream.kernels.pack import pack_stacked
from slipstream.kernels.packed import Packed
from slipstream.kernels.passes import DecoderShape, LayerWeights
from slipstream.models.config import ModelConfig
from slipstream.targets.native.rope import RopeTables, unsupported_rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from slipstream.models.heads.config import HeadConfig
    from slipstream.models.heads.head import Head


@together()
def eagle_weights(head: Head, target: TargetParts, compact: bool = False) -> HeadWeights:
    """Packed weights of an EAGLE head, which fits its target. Matrices keep the type they are stored in.

    compact: but for rows of the target's LM head, as `TargetParts.packed_head` says.
    """
    config = head.config
    optional = _Optional(head)
    norm, eps = optional.vector("feature_norm.weight"), config.eps
    if config.final_norm:
        norm, eps = np.ascontiguousarray(target.final_norm(), np.float32), target.eps
    return HeadWeights(
        shape=shape_of(config),
        three=config.kind == "eagle3",
        norm_before_residual=config.norm_before_residual,
        feature=config.target_hidden,
        features=len(config.feature_layers) or (3 if config.kind == "eagle3" else 1),
        feature_eps=eps,
        embedding=packed(head.tensors["embed_tokens.weight"]) if config.own_embedding else target.packed_embedding(),
        head=target.packed_head(head.ids, compact) if config.frozen_head else packed(head.tensors["lm_head.weight"]),
        fc=packed(head.tensors["fc.weight"]),
        layers=[_layer(optional, layer) for layer in range(config.layers)],
        norm=optional.vector("norm.weight"),
        fc_bias=optional.vector("fc.bias"),
        feature_norm=norm,
        hidden_norm=optional.vector("layers.0.hidden_norm.weight"),
        residual=optional.matrix("embedding_residual.weight"),
        markov_in=optional.matrix("markov_in.weight"),
        markov_out=optional.matrix("markov_out.weight"),
    )


def shape_of(config: HeadConfig) -> DecoderShape:
    """Sizes of the layers; vocab counts the tokens the head can draft."""
    return DecoderShape(
        hidden=config.hidden,
        intermediate=config.intermediate,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.draft_vocab,
        eps=config.eps,
        features=(config.layers,),
    )


class _Optional:
    """Tensors of a head by name; None for those it does not have."""

    def __init__(self, head: Head) -> None:
        self._tensors = head.tensors

    def vector(self, name: str) -> NDArray[np.float32] | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else np.ascontiguousarray(tensor.float32().reshape(-1))

    def matrix(self, name: str) -> Packed | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else packed(tensor)

    def stacked(self, names: Sequence[str]) -> list[Packed]:
        parts = [self._tensors[name] for name in names]
        if len({part.type for part in parts}) == 1:
            return [pack_stacked(parts[0].type, [part.raw for part in parts], parts[0].shape[1])]
        return [packed(part) for part in parts]

    def joined(self, names: Sequence[str]) -> NDArray[np.float32] | None:
        found = [self.vector(name) for name in names]
        return None if found[0] is None else np.concatenate([part for part in found if part is not None])


def _layer(head: _Optional, layer: int) -> LayerWeights:
    prefix = f"layers.{layer}."
    attention = [f"{prefix}self_attn.{part}_proj." for part in "qkv"]
    gate_up = [f"{prefix}mlp.{part}_proj." for part in ("gate", "up")]
    output, down = head.matrix(f"{prefix}self_attn.o_proj.weight"), head.matrix(f"{prefix}mlp.down_proj.weight")
    mlp_norm = head.vector(f"{prefix}post_attention_layernorm.weight")
    assert output is not None, "a head is checked before it is packed"
    assert down is not None, "a head is checked before it is packed"
    assert mlp_norm is not None, "a head is checked before it is packed"
    return LayerWeights(
        attention_norm=head.vector(f"{prefix}input_layernorm.weight"),  # type: ignore[arg-type]  # EAGLE-1 has none
        qkv=head.stacked([f"{name}weight" for name in attention]),
        output=output,
        mlp_norm=mlp_norm,
        gate_up=head.stacked([f"{name}weight" for name in gate_up]),
        down=down,
        qkv_bias=head.joined([f"{name}bias" for name in attention]),
        gate_up_bias=head.joined([f"{name}bias" for name in gate_up]),
        down_bias=head.vector(f"{prefix}mlp.down_proj.bias"),
    )


def rope_of(config: HeadConfig) -> RopeTables:
    """The head's rotary tables. Raises UnsupportedError for a rotation that is not known."""
    model = ModelConfig(
        architecture="llama",
        hidden_size=config.hidden,
        num_layers=config.layers,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate,
        vocab_size=max(config.vocab, 1),
        token_count=max(config.vocab, 1),
        rms_eps=config.eps,
        max_context=config.max_context or 2**31 - 1,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
    )
    missing = unsupported_rope(model)
    if missing is not None:
        raise UnsupportedError(f"the head has {missing}, which is not supported")
    return RopeTables(model)
