"""Tiny model files for the tests: the same random Llama as a GGUF file and as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 2, 4, 2, 8, 64
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "i n", "Ġ t", "Ġt h", "Ġth e")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """The byte-level alphabet, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(other)) for byte in range(256)]


def vocabulary() -> list[str]:
    """Control tokens, the alphabet, the merged pieces; ids in this order."""
    return [*CONTROLS, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def random_weights(seed: int = 0, rows: int | None = None) -> dict[str, np.ndarray]:
    """fp32 weights of a Llama under Hugging Face names, tied head."""
    make = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return make.standard_normal(shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(rows or len(vocabulary()), HIDDEN),
        "model.norm.weight": matrix(HIDDEN),
    }
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        weights |= {
            f"{place}.input_layernorm.weight": matrix(HIDDEN),
            f"{place}.post_attention_layernorm.weight": matrix(HIDDEN),
            f"{place}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{place}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{place}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{place}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{place}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{place}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{place}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return weights


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter writes them for interleaved rotary pairs."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, "output.weight")
    _, _, layer, *rest, kind = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(rest)]}.{kind}"


def write_gguf(
    path: Path,
    architecture: str = "llama",
    drop: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    tokens: list[str] | None = None,
    types: dict[str, str] | None = None,
) -> Path:
    """Write the tiny model. drop: keys left out; extra: keys put in; types: quantisation by GGUF tensor name."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    class Writer(GGUFWriter):
        def add_key_value(self, key, val, vtype, *args, **kwargs):
            if key not in drop:
                super().add_key_value(key, val, vtype, *args, **kwargs)

    tokens = tokens or vocabulary()
    writer = Writer(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if text in CONTROLS else 5 if text.startswith("[PAD") else 1 for text in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders.get(type(value), writer.add_array)(key, value)
    for name, weight in random_weights(rows=len(tokens)).items():
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name and architecture == "llama":
                weight = permuted(weight, heads)
        kind = (types or {}).get(gguf_name(name))
        if kind is None:
            writer.add_tensor(gguf_name(name), weight)
        else:
            raw = quants.quantize(weight, GGMLQuantizationType[kind])
            writer.add_tensor(gguf_name(name), raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_json(special: bool = True) -> dict[str, Any]:
    """The tiny vocabulary as a tokenizer.json of the GPT-2 kind."""
    texts = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": special}
        for index, text in enumerate(CONTROLS)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(texts)}, "merges": list(MERGES),
        },
    }  # fmt: skip


def hf_config(**changes: Any) -> dict[str, Any]:
    """config.json of the tiny model; a change to None takes the key out."""
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "intermediate_size": INNER, "vocab_size": len(vocabulary()),
        "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    return {key: value for key, value in (config | changes).items() if value is not None}


def write_folder(folder: Path, shards: int = 1, **changes: Any) -> Path:
    """Write the tiny model as a Hugging Face folder of one or several weight files."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(**changes)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}})
    )
    weights = random_weights()
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    owner = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: weight for place, (key, weight) in enumerate(weights.items()) if place % shards == shard}
        save_file(part, folder / name)
        owner |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))
    return folder
