"""One face for GGUF files and Hugging Face folders: description, tensors by Hugging Face name, tokenizer, template."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.config import ModelConfig, config_from_gguf, config_from_hf
from slipstream.models.gguf_file import GGUFFile
from slipstream.models.home import typed
from slipstream.models.safetensors_file import SafetensorsFolder
from slipstream.models.tensor import Tensor
from slipstream.models.vocabulary import Vocabulary, hf_end_ids, vocabulary_from_gguf, vocabulary_from_hf

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MAX_JSON = 200_000_000


class ModelFile(ABC):
    """An opened model.

    path: the file or folder; name: the last part of it without extension. chat_template: jinja source, None when the
    model has none. weights_bytes: on disk. weight_types: of all tensors, the most common (in bytes) first.
    licence: as the file names it, when it does. template_tokens: bos_token and eos_token as texts, for the template.
    Tensors go by their Hugging Face names
    (`model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`, ...).
    """

    path: Path
    name: str
    config: ModelConfig
    vocabulary: Vocabulary
    chat_template: str | None
    weights_bytes: int
    weight_types: str
    licence: str | None
    template_tokens: dict[str, str]
    kind: ClassVar[str]
    """The format's name for the user."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One tensor as it lies on disk, rows in Hugging Face order. Raises ModelError when it is absent."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use."""

    def _weigh(self, sizes: Sequence[tuple[str, int]]) -> None:
        """Sum up (type, bytes) of all tensors."""
        totals: dict[str, int] = {}
        for kind, size in sizes:
            totals[kind] = totals.get(kind, 0) + size
        self.weights_bytes = sum(totals.values())
        self.weight_types = ", ".join(sorted(totals, key=lambda kind: -totals[kind]))


class GGUFModel(ModelFile):
    """A GGUF file. Files of architecture `llama` have the rows of q and k permuted for interleaved rotary pairs."""

    kind = "GGUF"

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem
        self.file = GGUFFile(path)
        metadata = self.file.metadata
        if metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedError(f"{path}: one part of a split GGUF; join the parts with llama-gguf-split --merge")
        self.vocabulary = vocabulary_from_gguf(self.file)
        self.config = config_from_gguf(self.file, self.vocabulary)
        self.chat_template = _text(metadata.get("tokenizer.chat_template"))
        self.licence = _text(metadata.get("general.license"))
        self.template_tokens = self._template_tokens()
        self._weigh([(info.type, info.size or 0) for info in self.file.tensors.values()])
        self._gguf_names = {_hf_name(name): name for name in self.file.tensors}

    def _template_tokens(self) -> dict[str, str]:
        tokens = self.file.metadata["tokenizer.ggml.tokens"]
        named = {name: self.file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        return {f"{name}_token": tokens[index] for name, index in named.items() if index is not None}

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._gguf_names)

    def tensor(self, name: str) -> Tensor:
        """A view of the file; of q and k in `llama` files a copy in the original row order."""
        found = self.file.tensor(self._gguf_names.get(name, name))
        if self.config.architecture == "llama":
            for part, heads in (("q_proj", self.config.num_heads), ("k_proj", self.config.num_kv_heads)):
                if f".self_attn.{part}." in name:
                    return self._unpermute(found, heads, name)
        return found

    def _unpermute(self, tensor: Tensor, heads: int, name: str) -> Tensor:
        """Row 2i + j of a head in the file is row j * head_dim / 2 + i of the original."""
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise ModelError(f"{self.path}: tensor {name} has {rows} rows, not {heads} heads; the file is damaged")
        order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
        return tensor.take_rows(order)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from slipstream.models.tokenizer_sources import tokenizer_from_gguf

        return tokenizer_from_gguf(self.file, self.vocabulary)

    def tokenizer(self) -> Tokenizer:
        """Built from tokenizer.ggml.* on first use."""
        return self._tokenizer


class FolderModel(ModelFile):
    """A Hugging Face folder: config.json, safetensors weights, tokenizer.json."""

    kind = "safetensors"
    licence = None

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        raw = read_json(path / "config.json")
        generation = read_json(path / "generation_config.json", optional=True)
        self.settings = read_json(path / "tokenizer_config.json", optional=True)
        self._tokenizer_json = read_json(
            path / "tokenizer.json", remedy="convert the model's tokenizer to tokenizer.json"
        )
        ends = hf_end_ids(raw, generation)
        bos = next(
            (config["bos_token_id"] for config in (generation, raw) if config.get("bos_token_id") is not None), None
        )
        self.vocabulary = vocabulary_from_hf(self._tokenizer_json, self.settings, ends, bos, str(path))
        self.config = config_from_hf(raw, self.vocabulary, path)
        self.weights = SafetensorsFolder(path)
        self._weigh(self.weights.sizes())
        self.chat_template = self._find_template()
        self.template_tokens = self._template_tokens()

    def _template_tokens(self) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self.settings.get(name)
            text = _text(value.get("content") if isinstance(value, dict) else value)
            if text is not None:
                found[name] = text
        return found

    def _find_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.exists():
            return file.read_text(encoding="utf-8", errors="replace")
        value = self.settings.get("chat_template")
        if isinstance(value, list):  # several named templates
            named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
            value = named.get("default")
        return _text(value)

    def names(self) -> list[str]:
        """Names of all tensors."""
        return self.weights.names()

    def tensor(self, name: str) -> Tensor:
        """A view of a weight file."""
        return self.weights.tensor(name)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from slipstream.models.tokenizer_sources import tokenizer_from_folder

        made = tokenizer_from_folder(self.path, self._tokenizer_json, self.settings, self.vocabulary)
        self._tokenizer_json = {}  # tens of megabytes as objects
        return made

    def tokenizer(self) -> Tokenizer:
        """Read from tokenizer.json on first use."""
        return self._tokenizer


def open_model(path: str | Path) -> ModelFile:
    """Open a GGUF file, a Hugging Face folder, or a folder that holds one GGUF file. Raises ModelError."""
    place = typed(path)
    if place.is_dir():
        if (place / "config.json").exists():
            return FolderModel(place)
        files = sorted(place.glob("*.gguf"))
        if len(files) == 1:
            return GGUFModel(files[0])
        found = f"{len(files)} GGUF files" if files else "neither config.json nor a GGUF file"
        raise ModelError(f"{place}: holds {found}; name one model file or a Hugging Face folder")
    if not place.exists():
        raise ModelError(f"{place}: no such file or folder; check the path or run `slipstream models`")
    return GGUFModel(place)


def read_json(path: Path, optional: bool = False, remedy: str = "fetch the model again") -> dict[str, Any]:
    """A JSON object from a file; {} when it is absent and may be. Raises ModelError."""
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ModelError(f"{path}: {path.stat().st_size} bytes of JSON; this is no model file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path}: missing; {remedy}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: damaged (not JSON); {remedy}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: damaged (not a JSON object); {remedy}")
    return value


def _hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without a counterpart stays."""
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match and match[2] in _GGUF_BLOCK:
        return f"model.layers.{int(match[1])}.{_GGUF_BLOCK[match[2]]}.{match[3]}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_GGUF_TOP[stem]}.{kind}" if stem in _GGUF_TOP else gguf_name


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
