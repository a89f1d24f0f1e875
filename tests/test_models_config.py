"""The description of a model from both kinds of files: names, defaults, flags, ends; damage named by its key."""

from __future__ import annotations

import json

import pytest

from model_files import CONTROLS, tokenizer_json, vocabulary, write_folder, write_gguf
from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.config import ModelConfig
from slipstream.models.files import open_model


def from_folder(tmp_path, **changes) -> ModelConfig:
    return open_model(write_folder(tmp_path / "hf", **changes)).config


def from_gguf(tmp_path, **options) -> ModelConfig:
    return open_model(write_gguf(tmp_path / "m.gguf", **options)).config


def test_both_kinds_of_files_give_the_same_description(tmp_path):
    folder, gguf = from_folder(tmp_path), from_gguf(tmp_path)
    fields = [name for name in ModelConfig.__dataclass_fields__ if name != "rms_eps"]
    assert {name: getattr(folder, name) for name in fields} == {name: getattr(gguf, name) for name in fields}
    assert gguf.rms_eps == pytest.approx(folder.rms_eps)
    assert (folder.head_dim, folder.rotary_dim, folder.vocab_size) == (8, 8, len(vocabulary()))


REQUIRED_HF = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "rms_norm_eps",
    "max_position_embeddings", "model_type",
]  # fmt: skip
REQUIRED_GGUF = [
    "general.architecture", "llama.context_length", "llama.embedding_length", "llama.block_count",
    "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED_HF)
def test_a_missing_key_of_config_json_is_named(tmp_path, key):
    with pytest.raises(ModelError, match=f"{key} is missing"):
        from_folder(tmp_path, **{key: None})


@pytest.mark.parametrize("key", REQUIRED_GGUF)
def test_a_missing_key_of_gguf_is_named(tmp_path, key):
    with pytest.raises(ModelError, match=f"{key} is missing"):
        from_gguf(tmp_path, drop=(key,))


@pytest.mark.parametrize("value", [-1, 0, 2.5, "32", [32], True, 1 << 40])
def test_a_wrong_number_is_named_with_its_key(tmp_path, value):
    with pytest.raises(ModelError, match="num_hidden_layers"):
        from_folder(tmp_path, num_hidden_layers=value if not isinstance(value, list) else {"a": 1})


def test_heads_must_fit(tmp_path):
    with pytest.raises(ModelError, match="4 attention heads are not a multiple of 3"):
        from_folder(tmp_path, num_key_value_heads=3)
    with pytest.raises(ModelError, match="head_dim is 7"):
        from_folder(tmp_path, head_dim=7)


def test_layers_that_differ_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="differs between layers"):
        from_gguf(tmp_path, extra={"llama.attention.head_count_kv": [2, 4]})
    assert from_gguf(tmp_path, extra={"llama.attention.head_count_kv": [2, 2]}).num_kv_heads == 2


def test_an_architecture_of_another_kind_is_refused_by_name_when_its_numbers_are_missing(tmp_path):
    with pytest.raises(UnsupportedError, match="architecture rwkv"):
        from_folder(tmp_path, model_type="rwkv", num_attention_heads=None)
    assert from_folder(tmp_path, model_type="gemma").architecture == "gemma"


def test_numbers_of_other_families_are_found_under_their_own_names(tmp_path):
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
             "max_position_embeddings", "rms_norm_eps", "intermediate_size")  # fmt: skip
    own = {"n_embd": 64, "n_layer": 5, "n_head": 4, "n_positions": 77, "layer_norm_epsilon": 1e-3}
    found = from_folder(tmp_path, model_type="gpt2", **dict.fromkeys(usual), **own)
    numbers = (found.hidden_size, found.num_layers, found.num_heads, found.num_kv_heads, found.max_context)
    assert numbers == (64, 5, 4, 4, 77)
    assert (found.rms_eps, found.intermediate_size) == (1e-3, 256)


@pytest.mark.parametrize(
    ("model_type", "changes", "flags"),
    [
        ("llama", {}, (False, False, False, False)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("mistral", {"sliding_window": None}, (False, False, False, False)),
    ],
)
def test_flags_of_a_family(tmp_path, model_type, changes, flags):
    config = from_folder(tmp_path, model_type=model_type, **changes)
    assert (config.attention_bias, config.o_bias, config.mlp_bias, config.qk_norm) == flags


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, 32),
        ({"model_type": "mistral", "sliding_window": 128}, None),  # no shorter than the context
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, 32),
        ({"model_type": "qwen3", "sliding_window": 32, "layer_types": ["full_attention"] * 2}, None),
        ({"model_type": "mistral", "sliding_window": 32, "layer_types": ["sliding_attention"] * 2}, 32),
    ],
)
def test_fault_16_a_sliding_window_is_described_when_it_is_in_use(tmp_path, changes, window):
    assert from_folder(tmp_path, **changes).sliding_window == window


def test_sliding_window_of_gguf(tmp_path):
    assert from_gguf(tmp_path, extra={"llama.attention.sliding_window": 32}).sliding_window == 32
    assert from_gguf(tmp_path, extra={"llama.attention.sliding_window": 128}).sliding_window is None


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"type": "default"}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"type": "llama3", **LLAMA3}),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}}, {"type": "llama3", **LLAMA3}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, {"type": "default"}),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"type": "yarn", "factor": 4.0}),
    ],
)
def test_rope_scaling_of_config_json(tmp_path, changes, expected):
    config = from_folder(tmp_path, **changes)
    assert config.rope_theta == 5000.0
    assert {**config.rope_scaling} == expected


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"type": "linear"}, "factor"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ("linear", "rope_scaling"),
    ],
)
def test_damaged_rope_scaling_is_named(tmp_path, scaling, key):
    with pytest.raises(ModelError, match=key):
        from_folder(tmp_path, rope_scaling=scaling)


def test_rope_scaling_of_gguf(tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert from_gguf(tmp_path, extra=linear).rope_scaling == {"type": "linear", "factor": 2.0}
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert from_gguf(tmp_path, extra=yarn).rope_scaling == {"type": "yarn", "factor": 4.0}
    with pytest.raises(ModelError, match=r"rope\.scaling\.factor is missing"):
        from_gguf(tmp_path, extra={"llama.rope.scaling.type": "linear"})


def test_end_ids_come_from_all_sources(tmp_path):
    folder = write_folder(tmp_path / "hf", eos_token_id=[5])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    # <|endoftext|> and <|im_end|> are control tokens of the vocabulary
    assert open_model(folder).config.end_ids == (0, 2, 5, 6, 7)


def test_end_texts_count_only_as_control_tokens(tmp_path):
    folder = write_folder(tmp_path / "hf", eos_token_id=None)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(special=False)))
    (folder / "tokenizer_config.json").write_text("{}")
    assert open_model(folder).config.end_ids == ()
    types = [1] * len(vocabulary())
    extra = {"tokenizer.ggml.token_type": types}
    assert from_gguf(tmp_path, extra=extra, drop=("tokenizer.ggml.eos_token_id",)).end_ids == ()
    assert from_gguf(tmp_path, extra=extra).end_ids == (2,)
    assert from_gguf(tmp_path, extra={"tokenizer.ggml.eot_token_id": 9}).end_ids == (0, 2, 9)


@pytest.mark.parametrize("key", ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"])
def test_ids_outside_of_the_vocabulary_are_refused(tmp_path, key):
    with pytest.raises(ModelError, match=key.rsplit(".", maxsplit=1)[1]):
        from_gguf(tmp_path, extra={key: 5000})


def test_fault_14_padding_is_no_token(tmp_path):
    tokens = [*vocabulary()[:20], "[PAD20]", *vocabulary()[20:], "[PAD273]", "[PAD274]"]
    config = from_gguf(tmp_path, tokens=tokens)
    assert (config.vocab_size, config.token_count, config.unused_ids) == (len(tokens), len(tokens) - 2, (20,))
    wide = from_folder(tmp_path, vocab_size=len(vocabulary()) + 48)
    assert (wide.vocab_size, wide.token_count) == (len(vocabulary()) + 48, len(vocabulary()))


def test_no_bos(tmp_path):
    assert from_folder(tmp_path, bos_token_id=None).bos_id is None
    assert from_gguf(tmp_path, drop=("tokenizer.ggml.bos_token_id",)).bos_id is None
    assert from_gguf(tmp_path).bos_id == vocabulary().index(CONTROLS[0])
