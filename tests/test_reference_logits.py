"""Logits and features against transformers, on tiny random models of every family and on SmolLM2 (development only)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from slipstream.core.tree import Draft
from slipstream.models.files import open_model
from slipstream.targets.base import RowInput
from slipstream.targets.native.model import NativeTarget

pytestmark = pytest.mark.full
TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
}


@pytest.fixture(scope="module")
def torch():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers", reason="development only: pip install 'slipstream[reference]'")
    return pytest.importorskip("torch", reason="development only: pip install 'slipstream[reference]'")


def write_tokenizer(folder: Path, count: int) -> None:
    """The smallest tokenizer.json that a model folder needs: one letterless token per id."""
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(count)}, "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def reference_model(torch, family: str, folder: Path):
    """A seeded random transformers model with biases and norms that matter, saved as a safetensors folder."""
    import transformers

    name, changes = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, name)(**{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            elif key.endswith("bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    write_tokenizer(folder, SIZES["vocab_size"])
    return model


def expected(torch, model, ids: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [ids, vocab] and the hidden states that enter each layer."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0].numpy(), [state[0].numpy() for state in out.hidden_states]


def worst(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference relative to the size of the row's values."""
    return float((np.abs(ours - theirs).max(axis=-1) / np.abs(theirs).max(axis=-1)).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_agree_with_transformers(torch, family, tmp_path):
    """Prefill of 180 tokens, then a tree in one pass: each node against a run over its own tokens."""
    model = reference_model(torch, family, tmp_path)
    subject = NativeTarget.load(tmp_path, features=(0, 1, 2))
    prompt = np.random.default_rng(1).integers(0, 120, 181).tolist()
    tree = Draft([5, 6, 7, 8, 9, 10], [-1, -1, 0, 1, 2, 4])
    slot = subject.open()
    features = subject.prefill(slot, prompt[:-1])
    out = subject.forward([RowInput(slot, prompt[-1], tree)])
    logits, hidden = expected(torch, model, prompt)
    assert worst(features, np.concatenate(hidden[:3], axis=1)[:-1]) < TOLERANCE
    assert worst(out.logits[0][:1], logits[-1:]) < TOLERANCE
    for node in range(len(tree)):
        logits, hidden = expected(torch, model, prompt + tree.path_tokens(node))
        assert worst(out.logits[0][node + 1 : node + 2], logits[-1:]) < TOLERANCE
        assert worst(out.features[0][node + 1 : node + 2], np.concatenate(hidden[:3], axis=1)[-1:]) < TOLERANCE
    assert np.abs(logits).max() > 1


def test_planted_wrong_norm_epsilon_is_seen(torch, tmp_path):
    """The tolerance is tight enough to notice an epsilon of 1e-3 instead of 1e-6."""
    model = reference_model(torch, "llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    subject = NativeTarget.load(tmp_path)
    prompt = list(range(20))
    slot = subject.open()
    subject.prefill(slot, prompt[:-1])
    assert worst(subject.forward([RowInput(slot, 19)]).logits[0], expected(torch, model, prompt)[0][-1:]) > TOLERANCE


@pytest.mark.model
def test_smollm2_agrees_with_transformers(torch):
    """The real model: its GGUF weights, dequantised, in transformers' own Llama class."""
    import transformers

    from slipstream.models.registry import ensure

    file = open_model(ensure("smollm2"))
    subject, c = NativeTarget.load(file, features=(1, 15, 29)), file.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_context, rms_norm_eps=c.rms_eps, rope_theta=c.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=c.tie_embeddings,
    )  # fmt: skip
    weights = {name: torch.from_numpy(file.tensor(name).float32()) for name in file.names()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(weights)
    text = "<|im_start|>user\nName three rivers of Europe and one fact about each.<|im_end|>\n<|im_start|>assistant\n"
    ids = (file.tokenizer().encode(text) * 6)[:140]
    slot = subject.open()
    features = subject.prefill(slot, ids[:100])
    chain = Draft(ids[101:], list(range(-1, len(ids) - 102)))
    out = subject.forward([RowInput(slot, ids[100], chain)])
    logits, hidden = expected(torch, model, ids)
    assert worst(out.logits[0], logits[100:]) < TOLERANCE
    assert worst(features, np.concatenate([hidden[i] for i in (1, 15, 29)], axis=1)[:100]) < TOLERANCE
    assert (out.logits[0].argmax(axis=1) == logits[100:].argmax(axis=1)).all()
