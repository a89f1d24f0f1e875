"""The transformers target: passes, caches and the promise, on tiny random models of many architectures."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.core.errors import CacheFullError, InputError, UnsupportedError
from slipstream.core.params import SamplingParams
from slipstream.core.tree import Draft
from slipstream.targets.base import RowInput

torch_beds = pytest.importorskip("torch_beds", reason="needs torch: pip install 'slipstream[torch]'")
torch, transformers, VOCAB = torch_beds.torch, torch_beds.transformers, torch_beds.VOCAB

from slipstream.targets.transformers import model as model_module  # noqa: E402
from slipstream.targets.transformers import passes  # noqa: E402
from slipstream.targets.transformers.features import FeatureTap  # noqa: E402
from slipstream.targets.transformers.model import TransformersTarget  # noqa: E402
from torch_beds import answers, engine_of, prompt  # noqa: E402

QUICK = ("llama", "gemma3-window", "falcon-mqa")
FULL = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in torch_beds.FAMILIES]
TREE = Draft([5, 6, 7, 3, 9], [-1, -1, 1, 2, 0])
PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 11},
    "penalised": {"temperature": 1.1, "seed": 12, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
}
MASKED = ("falcon", "falcon-mqa", "opt")
"""Architectures that do not take their attention from the interface, in some release of transformers 5."""


def fresh(model, tokens: list[int]) -> np.ndarray:
    """Logits [tokens, vocab] from the model's own forward without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def worst(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(found - right).max() / np.abs(right).max())


def tree_error(target, reference, prompts: list[list[int]]) -> float:
    """Largest relative error over a tree below each prompt, all in one pass."""
    rows = []
    for tokens in prompts:
        slot = target.open()
        target.prefill(slot, tokens[:-1])
        rows.append(RowInput(slot, tokens[-1], TREE))
    output = target.forward(rows)
    errors = []
    for tokens, logits in zip(prompts, output.logits, strict=True):
        for node in range(-1, len(TREE)):
            right = fresh(reference, tokens + TREE.path_tokens(node))[-1]
            errors.append(worst(logits[node + 1], right))
    for row in rows:
        target.close(row.slot)
    return max(errors)


def cache_of(target, slot: int) -> list[np.ndarray]:
    length = target.length(slot)
    held = target._cache._slots[slot].buffers
    return [buffer[:, :, :length].numpy() for pair in held for buffer in pair]


@pytest.mark.parametrize("family", FULL)
def test_trees_in_a_ragged_batch_equal_fresh_forwards(family):
    target = TransformersTarget(torch_beds.tiny(family), slots=4)
    assert target.by_interface or family in MASKED
    assert tree_error(target, torch_beds.tiny(family), [prompt(40), prompt(21, 1), prompt(5, 2)]) < 1e-5


def test_fault_16_windows_are_exact_past_their_end():
    """Window 8, context 40: refused rather than wrong when our attention cannot run."""
    target = TransformersTarget(torch_beds.tiny("mistral-window"), slots=4)
    assert tree_error(target, torch_beds.tiny("mistral-window"), [prompt(40)]) < 1e-5


def test_planted_mask_without_window_is_seen(monkeypatch):
    target = TransformersTarget(torch_beds.tiny("mistral-window"), slots=4)
    visible = passes.Pass.visible
    monkeypatch.setattr(passes.Pass, "visible", lambda self, i, rule: visible(self, i, passes.causal_mask_function))
    assert tree_error(target, torch_beds.tiny("mistral-window"), [prompt(40)]) > 1e-2


def test_fault_16_windows_are_refused_where_only_a_mask_would_do(monkeypatch):
    model = torch_beds.tiny("mistral-window")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(UnsupportedError, match=r"'mistral'.*sliding windows"):
        TransformersTarget(model)


def test_planted_siblings_that_see_each_other_are_refused(monkeypatch):
    """The check at load can fail."""
    monkeypatch.setattr(passes.PassRow, "ancestors", lambda self: None)
    with pytest.raises(UnsupportedError, match="draft trees differ"):
        TransformersTarget(torch_beds.tiny("llama"))


def test_planted_commit_of_the_wrong_rows_is_refused(monkeypatch):
    from slipstream.targets.transformers.cache import SlotCache

    commit = SlotCache.commit
    monkeypatch.setattr(SlotCache, "commit", lambda self, slot, kept: commit(self, slot, range(len(kept))))
    with pytest.raises(UnsupportedError, match="after a commit differ"):
        TransformersTarget(torch_beds.tiny("llama"))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("BloomConfig", {}, "ALiBi"),
        ("MptConfig", {}, "ALiBi"),
        ("FalconConfig", {"alibi": True}, "ALiBi"),
        ("MambaConfig", {}, "recurrent state"),
        ("RecurrentGemmaConfig", {}, "recurrent state"),
        ("Qwen3NextConfig", {}, "recurrent state"),
        ("GPTNeoConfig", {}, "local attention"),
        ("T5Config", {}, "encoder-decoder"),
    ],
)
def test_fault_16_what_cannot_roll_back_is_refused_by_name(name, changes, reason):
    from slipstream.targets.transformers.require import require_supported

    config = getattr(transformers, name)(**changes)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        require_supported(config)
    assert config.model_type in str(caught.value)


def test_rotations_that_switch_end_the_context_before_they_do():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = TransformersTarget(torch_beds.tiny("phi3", rope_parameters=rope, original_max_position_embeddings=64))
    assert target.max_context == 64


def check_identity(target, second, drafts, params_name: str, tokens: int = 24) -> int:
    """Every way of drafting gives plain decoding's ids, but for near-ties; returns accepted nodes."""
    prompts = [prompt(30), [*prompt(6, 3) * 3], prompt(2, 4)]
    params = SamplingParams(max_tokens=tokens, **PARAMS[params_name])
    plain = [answers(engine_of(target), [one], params)[0] for one in prompts]
    assert all(output.speculation.num_draft_tokens == 0 for output in plain)
    accepted = 0
    for draft, max_batch in [("", 3), *((draft, size) for draft in drafts for size in (1, 3))]:
        found = answers(engine_of(target, draft, second, max_batch), prompts, params)
        for ours, right in zip(found, plain, strict=True):
            same = ours.token_ids == right.token_ids
            assert same or ours.speculation.near_ties + right.speculation.near_ties, f"{draft}, batch {max_batch}"
            accepted += ours.speculation.num_accepted_draft_tokens
    return accepted


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("params_name", PARAMS)
def test_identity_with_plain_decoding(family, params_name):
    if family not in QUICK or params_name == "penalised":
        drafts = ("lookup", "suffix tree", "model tree")
    else:
        drafts = ("suffix tree", "model tree")
    target = TransformersTarget(torch_beds.tiny(family), slots=4)
    second = TransformersTarget(torch_beds.tiny(family), slots=4)
    assert check_identity(target, second, drafts, params_name) > 40


@pytest.mark.parametrize("family", FULL)
def test_fault_15_the_cache_after_steps_is_a_fresh_prefill(family):
    target = TransformersTarget(torch_beds.tiny(family), slots=4)
    second = TransformersTarget(torch_beds.tiny(family, seed=8), slots=4)
    engine = engine_of(target, "model tree", second, max_batch=2)
    requests = [engine.add(tokens, SamplingParams(max_tokens=20)) for tokens in (prompt(9), prompt(30, 1))]
    for _ in range(8):
        engine.step()
        for request in requests:
            row = request.answers[0].row
            if request.done:
                continue
            slot = target.open()
            target.prefill(slot, row.tokens[: target.length(row.slot)])
            for ours, right in zip(cache_of(target, row.slot), cache_of(target, slot), strict=True):
                assert np.allclose(ours, right, rtol=0, atol=1e-4 * np.abs(right).max())
            target.close(slot)
    engine.run(requests)


@pytest.mark.parametrize("first", ["native", "transformers"])
def test_either_runtime_drafts_for_the_other(first, tmp_path):
    from slipstream.targets.native.model import NativeTarget

    folder = torch_beds.save(torch_beds.tiny("llama"), tmp_path)
    pair = [NativeTarget.load(folder, slots=4), TransformersTarget.load(folder, slots=4)]
    target, second = pair if first == "native" else pair[::-1]
    for name in ("greedy", "sampled"):
        params = SamplingParams(max_tokens=40, **PARAMS[name])
        plain = answers(engine_of(target), [prompt(12)], params)[0]
        found = answers(engine_of(target, "model", second), [prompt(12)], params)[0]
        assert found.token_ids == plain.token_ids
        assert found.speculation.draft_acceptance_rate > 0.95


def test_near_ties_are_counted_and_reported():
    """A head whose two best rows are equal: every position is a near-tie, and the lowest id wins."""
    model = torch_beds.tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[:] = 0
        model.lm_head.weight[[5, 9]] = 1.0
    target = TransformersTarget(model, slots=2)
    output = answers(engine_of(target, "suffix"), [prompt(5)], SamplingParams(max_tokens=12))[0]
    assert output.speculation.near_ties == output.speculation.tokens_before_trimming > 0
    assert set(output.token_ids) <= {0, 5}
    usual = answers(engine_of(TransformersTarget(torch_beds.tiny("llama"))), [prompt(5)], SamplingParams(max_tokens=12))
    assert usual[0].speculation.near_ties == 0


def test_features_are_the_inputs_of_layers():
    model, target = torch_beds.tiny("llama"), TransformersTarget(torch_beds.tiny("llama"), slots=2, features=(2, 0, 1))
    tokens, slot = prompt(30), target.open()
    features = target.prefill(slot, tokens[:-1])
    assert features.shape == (29, target.features_width) == (29, 96)
    output = target.forward([RowInput(slot, tokens[-1], TREE)])
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        below = model(torch.tensor([tokens + TREE.path_tokens(3)]), output_hidden_states=True).hidden_states
    assert worst(features, torch.cat([states[i][0, :-1] for i in (2, 0, 1)], 1).numpy()) < 1e-5
    assert worst(output.features[0][4], torch.cat([below[i][0, -1] for i in (2, 0, 1)]).numpy()) < 1e-5
    with pytest.raises(InputError, match="layer 4 does not exist"):
        TransformersTarget(torch_beds.tiny("llama"), features=(4,))


@pytest.mark.parametrize("last", [0, 1, 9, 10, 25, 29, None])
def test_prefill_in_chunks_gives_the_features_that_are_asked_for_and_keeps_no_others(monkeypatch, last):
    target = TransformersTarget(torch_beds.tiny("llama"), slots=2, features=(2, 0, 1))
    tokens, kept, take = prompt(29), [], FeatureTap.take
    whole = target.prefill(target.open(), tokens)

    def counting(self, first=0):
        kept.append(take(self, first))
        return kept[-1]

    monkeypatch.setattr(FeatureTap, "take", counting)
    monkeypatch.setattr(model_module, "PREFILL_ROWS", 10)
    features = target.prefill(target.open(), tokens, last)
    assert features.shape == (29 if last is None else last, 96)
    assert sum(map(len, kept)) == len(features)
    if last != 0:
        assert worst(features, whole[29 - len(features) :]) < 1e-5


def test_slots_grow_fork_truncate_and_close():
    target = TransformersTarget(torch_beds.tiny("llama"), slots=3)
    tokens, slot = prompt(200), target.open()
    target.prefill(slot, tokens[:150])
    fork = target.fork(slot, 100)
    target.truncate(slot, 60)
    target.prefill(slot, tokens[60:199])
    target.prefill(fork, tokens[100:199])
    outputs = [target.forward([RowInput(one, tokens[199])]).logits[0] for one in (slot, fork)]
    right = fresh(torch_beds.tiny("llama"), tokens)[-1]
    assert max(worst(logits[0], right) for logits in outputs) < 1e-5
    held = target.memory_bytes()["kv_used"]
    target.close(fork)
    assert target.memory_bytes()["kv_used"] < held
    with pytest.raises(InputError, match="over the context"):
        target.prefill(slot, prompt(80))
    with pytest.raises(InputError, match="not open"):
        target.length(fork)


def test_a_device_without_memory_is_a_full_cache(monkeypatch):
    """The engine can then make room; what was there stays."""
    target = TransformersTarget(torch_beds.tiny("llama"), slots=3)
    tokens, slot = prompt(200), target.open()
    target.prefill(slot, tokens[:100])

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(CacheFullError, match="no memory for 256 more cache rows"):
            target.prefill(slot, tokens[100:199])
        with pytest.raises(CacheFullError):
            target.fork(slot, 50)
    assert target.free_slots == 2
    target.prefill(slot, tokens[100:199])
    logits = target.forward([RowInput(slot, tokens[199])]).logits[0][0]
    assert worst(logits, fresh(torch_beds.tiny("llama"), tokens)[-1]) < 1e-5


def test_fault_14_padding_has_probability_zero():
    target = TransformersTarget(torch_beds.tiny("llama"), padding=[117, 118, 119])
    slot = target.open()
    logits = target.forward([RowInput(slot, 5)]).logits[0]
    assert np.isneginf(logits[:, 117:]).all()
    assert np.isfinite(logits[:, :117]).all()


@pytest.mark.parametrize("family", ["llama", "gemma3-window", "gpt2"])
def test_passes_of_fixed_width_equal_the_usual_ones(family):
    """The shapes that CUDA graphs need, run without them: trees, windows, commits, and buffers that are used again."""
    usual = TransformersTarget(torch_beds.tiny(family), slots=2)
    fixed = TransformersTarget(torch_beds.tiny(family), slots=2, graphs="eager")
    assert tree_error(fixed, torch_beds.tiny(family), [prompt(40)]) < 1e-5
    places = set()
    for seed in range(3):
        prompts = [prompt(20, seed)]
        params = SamplingParams(max_tokens=20, temperature=0.8, seed=seed)
        found = [answers(engine_of(one, "suffix tree"), prompts, params)[0].token_ids for one in (usual, fixed)]
        assert found[0] == found[1]
        places |= {name for name, _ in fixed._fixed._made}
    assert len(places) == 1
    with pytest.raises(InputError, match="CUDA graphs were asked for, but the model is on cpu"):
        TransformersTarget(torch_beds.tiny("llama"), graphs="cuda")
