"""Tiny random models of many architectures, for tests of the transformers runtime."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

import beds
from slipstream.core.params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.verify import make_verifier

torch = pytest.importorskip("torch", reason="needs torch: pip install 'slipstream[torch]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'slipstream[torch]'")

torch.set_num_threads(1)  # tiny models: threads would only wait for each other
VOCAB = 120
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.4, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 8}),
    "mistral-window": ("MistralConfig", {"sliding_window": 8}),
    "mixtral": ("MixtralConfig", {**MOE, "sliding_window": None}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3-window": ("Gemma3TextConfig", {
        "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", {
        "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 48, "resid_pdrop": 0.0,
    }),
    "falcon": ("FalconConfig", {"alibi": False, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-mqa": ("FalconConfig", {"alibi": False, "multi_query": True, "new_decoder_architecture": False}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "gpt-oss-sinks": ("GptOssConfig", {**MOE, "head_dim": 8, "sliding_window": 8}),
}  # fmt: skip


def tiny(family: str, seed: int = 7, **changes: object):
    """A seeded random model with norms and biases that matter, in float32 on the CPU."""
    name, own = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**SIZES, **own, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key or "ln_" in key:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            elif key.endswith("bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
    if family == "gemma2":
        model.set_attn_implementation("eager")  # sdpa caps scores in some releases of transformers only
    return model


def save(model, folder: Path) -> Path:
    """The model as a folder with a tokenizer that has one letterless token per id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    words = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(VOCAB)}, "unk_token": "t0"}
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "added_tokens": [], "model": words, "pre_tokenizer": kind, "decoder": kind}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def engine_of(target, draft: str = "", second=None, max_batch: int = 1, nodes: int = 6) -> Engine:
    shape = "tree" if "tree" in draft else "chain"
    verifier = make_verifier("coupled", count_near_ties=True)
    tokenizer = beds.Pieces([bytes([65 + i % 26]) for i in range(VOCAB)])
    drafters = beds.named(draft, target, second)
    return beds.engine(
        target, drafters, nodes, tokenizer=tokenizer, shape=shape, verifier=verifier, max_batch=max_batch
    )


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list:
    return [result.outputs[0] for result in engine.run([engine.add(tokens, params) for tokens in prompts])]
