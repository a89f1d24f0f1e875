"""From a model file to packed decoder weights. Everything unsupported is refused by name before a weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.core.errors import InputError, ModelError, UnsupportedError
from slipstream.kernels.memory import together
from slipstream.kernels.pack import pack_stacked
from slipstream.kernels.packed import BLOCKS
from slipstream.kernels.passes import DecoderShape, DecoderWeights, LayerWeights
from slipstream.targets.native.rope import unsupported_rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from slipstream.kernels.packed import Packed
    from slipstream.models.config import ModelConfig
    from slipstream.models.files import ModelFile
    from slipstream.models.tensor import Tensor

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def unsupported(config: ModelConfig) -> str | None:
    """The property of this model that the native target cannot compute exactly; None when it can run the model."""
    if config.architecture not in ARCHITECTURES:
        return f"architecture {config.architecture!r} (supported: {', '.join(ARCHITECTURES)})"
    if config.sliding_window is not None:
        return f"a sliding window ({config.sliding_window}) shorter than the context ({config.max_context})"
    if config.activation not in ("silu", "swish"):
        return f"activation {config.activation!r} (supported: silu)"
    if config.quantization is not None:
        return f"weights quantised by {config.quantization!r}; GGUF files may be quantised"
    if config.rotary_dim != config.head_dim:
        return f"rotation of {config.rotary_dim} of {config.head_dim} values of a head"
    return unsupported_rope(config)


def require_supported(config: ModelConfig) -> None:
    """Raise UnsupportedError, naming the property, unless the native target computes this model exactly."""
    missing = unsupported(config)
    if missing is not None:
        raise UnsupportedError(f"the native target does not support {missing}; use the transformers target")


def feature_layers(layers: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    """The layers whose inputs are wanted as features, checked. Raises InputError."""
    for layer in layers:
        if not 0 <= layer <= config.num_layers:
            raise InputError(f"feature layer {layer} does not exist; the model has layers 0 to {config.num_layers}")
    return tuple(layers)


def decoder_shape(config: ModelConfig, features: Sequence[int] = ()) -> DecoderShape:
    """Sizes of the decoder for this model."""
    return DecoderShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        eps=config.rms_eps,
        features=feature_layers(features, config),
    )


class _Reader:
    """Reads tensors of one model, checks their shapes, packs them."""

    def __init__(self, model: ModelFile, shape: DecoderShape) -> None:
        self.model, self.shape = model, shape

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """The tensor of this name. Raises ModelError when it is missing, of another shape or of an unsupported type."""
        tensor = self.model.tensor(name)
        if tensor.shape != (rows, columns):
            raise ModelError(
                f"{self.model.path}: {name} is {list(tensor.shape)}, expected {[rows, columns]}; the file is damaged"
            )
        if tensor.type not in BLOCKS:
            raise UnsupportedError(
                f"{self.model.path}: {name} has type {tensor.type}; supported are {', '.join(BLOCKS)}"
            )
        return tensor

    def vector(self, name: str, length: int) -> NDArray[np.float32]:
        """A norm weight or bias as float32."""
        values = self.model.tensor(name).float32().reshape(-1)
        if len(values) != length:
            raise ModelError(
                f"{self.model.path}: {name} holds {len(values)} values, expected {length}; the file is damaged"
            )
        return np.ascontiguousarray(values, np.float32)

    def vectors(self, names: Sequence[str], lengths: Sequence[int]) -> NDArray[np.float32]:
        """Several vectors end to end."""
        return np.concatenate([self.vector(name, length) for name, length in zip(names, lengths, strict=True)])

    def packed(self, name: str, rows: int, columns: int) -> Packed:
        """One packed matrix."""
        return self._pack([self.matrix(name, rows, columns)])

    def stacked(self, names: Sequence[str], rows: Sequence[int], columns: int) -> list[Packed]:
        """Matrices that share their input: one stack when all have one type, else one by one."""
        parts = [self.matrix(name, count, columns) for name, count in zip(names, rows, strict=True)]
        if len({part.type for part in parts}) == 1:
            return [self._pack(parts)]
        return [self._pack([part]) for part in parts]

    @staticmethod
    def _pack(parts: Sequence[Tensor]) -> Packed:
        return pack_stacked(parts[0].type, [part.raw for part in parts], parts[0].shape[1])


@together()
def load_weights(model: ModelFile, shape: DecoderShape) -> DecoderWeights:
    """Pack all weights of the model. Raises ModelError for missing or misshapen tensors."""
    reader = _Reader(model, shape)
    embedding = reader.packed("model.embed_tokens.weight", shape.vocab, shape.hidden)
    tied = model.config.tie_embeddings
    return DecoderWeights(
        shape=shape,
        embedding=embedding,
        layers=[_layer(reader, model.config, f"model.layers.{index}.") for index in range(shape.layers)],
        norm=reader.vector("model.norm.weight", shape.hidden),
        head=embedding if tied else reader.packed("lm_head.weight", shape.vocab, shape.hidden),
    )


def _layer(reader: _Reader, config: ModelConfig, prefix: str) -> LayerWeights:
    shape = reader.shape
    attention = [f"{prefix}self_attn.{part}_proj." for part in "qkv"]
    widths = [shape.q_width, shape.kv_width, shape.kv_width]
    gate_up = [f"{prefix}mlp.gate_proj.", f"{prefix}mlp.up_proj."]
    layer = LayerWeights(
        attention_norm=reader.vector(f"{prefix}input_layernorm.weight", shape.hidden),
        qkv=reader.stacked([f"{name}weight" for name in attention], widths, shape.hidden),
        output=reader.packed(f"{prefix}self_attn.o_proj.weight", shape.hidden, shape.q_width),
        mlp_norm=reader.vector(f"{prefix}post_attention_layernorm.weight", shape.hidden),
        gate_up=reader.stacked([f"{name}weight" for name in gate_up], [shape.intermediate] * 2, shape.hidden),
        down=reader.packed(f"{prefix}mlp.down_proj.weight", shape.hidden, shape.intermediate),
    )
    if config.attention_bias:
        layer.qkv_bias = reader.vectors([f"{name}bias" for name in attention], widths)
    if config.o_bias:
        layer.output_bias = reader.vector(f"{prefix}self_attn.o_proj.bias", shape.hidden)
    if config.qk_norm:
        layer.q_norm = reader.vector(f"{prefix}self_attn.q_norm.weight", shape.head_dim)
        layer.k_norm = reader.vector(f"{prefix}self_attn.k_norm.weight", shape.head_dim)
    if config.mlp_bias:
        layer.gate_up_bias = reader.vectors([f"{name}bias" for name in gate_up], [shape.intermediate] * 2)
        layer.down_bias = reader.vector(f"{prefix}mlp.down_proj.bias", shape.hidden)
    return layer
