"""What a model is: one description for Hugging Face folders and GGUF files. It describes; targets refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.gguf_file import GGUFFile
from slipstream.models.vocabulary import Vocabulary, is_number

_LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Numbers of one decoder.

    vocab_size: width of the head (rows of the embedding); token_count: real tokens, ids from there on are padding, and
    so are unused_ids. rotary_dim: leading values of a head that are rotated (all: head_dim).
    rope_scaling: {"type": "default"}, {"type": "linear", "factor": f}, {"type": "llama3", "factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings"}, {"type": "factors", "factors": (divisors of the
    rotary_dim / 2 base frequencies,)} (llama3 as GGUF stores it), or another type by its name with its numbers.
    sliding_window: None when no layer has one or it is no shorter than the context. o_bias, mlp_bias: as attention_bias
    (which is q, k and v). quantization: name of a Hugging Face quantisation scheme, None for plain weights.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    token_count: int
    rms_eps: float
    max_context: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=lambda: {"type": "default"})
    rotary_dim: int = 0
    tie_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    activation: str = "silu"
    quantization: str | None = None
    end_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    unused_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rotary_dim == 0:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        window = self.sliding_window
        if window is not None and window >= self.max_context:
            object.__setattr__(self, "sliding_window", None)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads are not a multiple of {self.num_kv_heads} key-value heads; "
                "the model's configuration is damaged"
            )
        for name, most in (("head_dim", 65536), ("rotary_dim", self.head_dim)):
            value = getattr(self, name)
            if value % 2 or not 0 < value <= most:
                raise ModelError(
                    f"{name} is {value}, not an even number up to {most}; the model's configuration is damaged"
                )

    @property
    def padding_ids(self) -> list[int]:
        """Ids that are no tokens, ascending: unused ones and those the head has beyond the token list."""
        return sorted({*self.unused_ids, *range(self.token_count, self.vocab_size)})


class Keys:
    """Typed access to a table of settings; errors name the source and the key."""

    def __init__(self, table: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.table, self.source, self.prefix = table, source, prefix

    def has(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self.table.get(self.prefix + key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number below 2**31."""
        value = self.table.get(self.prefix + key)
        value = default if value is None else value
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one number per layer, all equal
        if isinstance(value, list):
            raise UnsupportedError(f"{self.source}: {self.prefix + key} differs between layers, which is not supported")
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.table.get(self.prefix + key)
        value = default if value is None else value
        if value is None or not is_number(value) or not 0 < value < float("inf"):
            raise self.error(key, value)
        return float(value)

    def error(self, key: str, value: object) -> ModelError:
        """What to raise for this value of a key."""
        state = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return ModelError(f"{self.source}: {self.prefix + key} {state}; the model's configuration is damaged")


@contextmanager
def _other_families(architecture: str) -> Iterator[None]:
    """What is missing from a description of another family is no damage: the family is not supported."""
    try:
        yield
    except UnsupportedError:
        raise
    except ModelError as error:
        if architecture in _LLAMA_FAMILY:
            raise
        raise UnsupportedError(f"architecture {architecture} is not of the Llama family ({error})") from None


_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
}
"""What config.json of families beyond Llama's calls the same numbers."""


def _usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of another family under the usual keys: nested text settings on top, numbers by their own names.

    What a family leaves unsaid gets its usual value; only the transformers runtime runs these, from its own reading.
    """
    nested = config.get("text_config")
    found = {**config, **nested} if isinstance(nested, dict) else dict(config)
    for name, others in _OTHER_NAMES.items():
        values = [found[other] for other in (name, *others) if found.get(other) is not None]
        if values:
            found[name] = values[0]
    if isinstance(found.get("hidden_size"), int):
        found.setdefault("intermediate_size", 4 * found["hidden_size"])
    return {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, **found, "model_type": config.get("model_type")}


def config_from_hf(config: Mapping[str, Any], vocabulary: Vocabulary, folder: Path) -> ModelConfig:
    """The description from config.json and the folder's vocabulary. Raises ModelError naming the key."""
    if config.get("model_type") not in _LLAMA_FAMILY:
        config = _usual_names(config)
    keys = Keys(config, str(folder / "config.json"))
    architecture = config.get("model_type")
    if not isinstance(architecture, str):
        raise keys.error("model_type", architecture)
    with _other_families(architecture):
        heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
        rope = config.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise keys.error("rope_parameters", rope)
        head_dim = keys.integer("head_dim", hidden // heads)
        flags = _hf_flags(config, architecture)
        vocab_size = keys.integer("vocab_size")
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=keys.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=keys.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate_size=keys.integer("intermediate_size"),
            vocab_size=vocab_size,
            token_count=min(vocabulary.token_count, vocab_size),
            rms_eps=keys.number("rms_norm_eps"),
            max_context=keys.integer("max_position_embeddings"),
            rope_theta=Keys({**config, **rope}, keys.source).number("rope_theta", 10000.0),
            rope_scaling=hf_rope_scaling(config.get("rope_scaling") or rope, keys),
            rotary_dim=int(head_dim * Keys({**config, **rope}, keys.source).number("partial_rotary_factor", 1.0)),
            qk_norm=architecture == "qwen3",
            sliding_window=_hf_window(config, architecture, keys),
            activation=str(config.get("hidden_act", "silu")),
            quantization=_hf_quantization(config),
            end_ids=vocabulary.end_ids,
            bos_id=vocabulary.bos_id,
            unused_ids=vocabulary.unused_ids,
            **flags,
        )


def _hf_flags(config: Mapping[str, Any], architecture: str) -> dict[str, bool]:
    """Which parts exist beyond the plain Llama layer; defaults as the model classes of transformers have them."""
    bias = bool(config.get("attention_bias", False))
    return {
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention_bias": True if architecture == "qwen2" else bias,
        "o_bias": False if architecture == "qwen2" else bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


def _hf_quantization(config: Mapping[str, Any]) -> str | None:
    scheme = config.get("quantization_config")
    if not scheme:
        return None
    return str(scheme.get("quant_method", "unknown")) if isinstance(scheme, dict) else "unknown"


def _hf_window(config: Mapping[str, Any], architecture: str, keys: Keys) -> int | None:
    """The sliding window that is in use: qwen2 and qwen3 switch it separately, newer files say it per layer."""
    layers = config.get("layer_types")
    if isinstance(layers, list) and "sliding_attention" not in layers:
        return None
    if architecture in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        return None
    return keys.integer("sliding_window") if keys.has("sliding_window") else None


def hf_rope_scaling(raw: Any, keys: Keys) -> dict[str, Any]:
    """rope_scaling of older files or rope_parameters of newer ones in the form ModelConfig describes."""
    if not isinstance(raw, dict):
        raise keys.error("rope_scaling", raw)
    kind = raw.get("rope_type", raw.get("type", "default"))
    numbers = Keys(raw, keys.source, "")
    if kind in ("default", "mrope"):
        return {"type": kind}
    if kind == "linear":
        return {"type": "linear", "factor": numbers.number("factor")}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        found = {name: numbers.number(name) for name in names}
        if found["high_freq_factor"] <= found["low_freq_factor"]:
            raise keys.error("rope_scaling.high_freq_factor", found["high_freq_factor"])
        return {"type": "llama3", **found}
    return {**{key: value for key, value in raw.items() if key not in ("rope_type", "rope_theta")}, "type": str(kind)}


def config_from_gguf(file: GGUFFile, vocabulary: Vocabulary) -> ModelConfig:
    """The description from GGUF metadata and the names and shapes of the tensors. Raises ModelError naming the key."""
    architecture = file.metadata.get("general.architecture")
    general = Keys(file.metadata, str(file.path))
    if not isinstance(architecture, str):
        raise general.error("general.architecture", architecture)
    keys = Keys(file.metadata, str(file.path), f"{architecture}.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing; the file is incomplete, fetch it again")
    with _other_families(architecture):
        heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
        head_dim = keys.integer("attention.key_length", hidden // heads)
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=keys.integer("block_count"),
            num_heads=heads,
            num_kv_heads=keys.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=keys.integer("feed_forward_length"),
            vocab_size=embedding.shape[0],
            token_count=min(vocabulary.token_count, embedding.shape[0]),
            rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
            max_context=keys.integer("context_length"),
            rope_theta=keys.number("rope.freq_base", 10000.0),
            rope_scaling=_gguf_rope_scaling(file, keys),
            rotary_dim=keys.integer("rope.dimension_count", head_dim),
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            sliding_window=keys.integer("attention.sliding_window") if keys.has("attention.sliding_window") else None,
            end_ids=vocabulary.end_ids,
            bos_id=vocabulary.bos_id,
            unused_ids=vocabulary.unused_ids,
        )


def _gguf_rope_scaling(file: GGUFFile, keys: Keys) -> dict[str, Any]:
    """Scaling from the metadata; llama3 scaling is stored as a tensor of frequency divisors."""
    if "rope_freqs.weight" in file.tensors:
        divisors = file.tensor("rope_freqs.weight").float32().reshape(-1).tolist()
        if not all(0 < value < float("inf") for value in divisors):
            raise ModelError(f"{file.path}: rope_freqs.weight holds {min(divisors)}; the file is damaged")
        return {"type": "factors", "factors": tuple(divisors)}
    kind = file.metadata.get(f"{keys.prefix}rope.scaling.type", "none")
    if not isinstance(kind, str):
        raise keys.error("rope.scaling.type", kind)
    if keys.has("rope.scale_linear") and kind == "none":
        return {"type": "linear", "factor": keys.number("rope.scale_linear")}
    if kind == "none":
        return {"type": "default"}
    if kind == "linear":
        return {"type": "linear", "factor": keys.number("rope.scaling.factor")}
    prefix = f"{keys.prefix}rope.scaling."
    numbers = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return {**numbers, "type": kind}
