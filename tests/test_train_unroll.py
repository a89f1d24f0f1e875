"""What is trained: the unrolled steps equal drafting, objectives and the loss their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'slipstream[train]'")

import head_beds  # noqa: E402
from model_files import write_folder  # noqa: E402
from slipstream.core.errors import InputError, UnsupportedError  # noqa: E402
from slipstream.drafters.heads.modules import load_arrays, make_module  # noqa: E402
from slipstream.models.files import open_model  # noqa: E402
from slipstream.models.heads.config import HeadConfig  # noqa: E402
from slipstream.train.build import Design, head_config  # noqa: E402
from slipstream.train.data import Example  # noqa: E402
from slipstream.train.evaluate import OwnTokens, count_right  # noqa: E402
from slipstream.train.features import sequence_key  # noqa: E402
from slipstream.train.loss import Truth, batch_loss  # noqa: E402
from slipstream.train.objectives import OBJECTIVES, objective  # noqa: E402
from slipstream.train.unroll import collate, guesses, unroll  # noqa: E402

STEPS = 3
CPU = torch.device("cpu")


def norm(x: np.ndarray, weight: np.ndarray, eps: float, parts: int = 1) -> np.ndarray:
    split = x.reshape(*x.shape[:-1], parts, -1)
    return (split / np.sqrt((split**2).mean(-1, keepdims=True) + eps)).reshape(x.shape) * weight


def llama3(frequency: float, scaling: dict[str, Any]) -> float:
    """Radians per position, as the paper's own code has it: by wavelength."""
    wavelength, before = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < before / high:
        return frequency
    if wavelength > before / low:
        return frequency / scaling["factor"]
    smooth = (before / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def turned(x: np.ndarray, position: int, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = position * theta ** -(np.arange(half) / half)
    if scaling["type"] == "llama3":
        angle = position * np.array([llama3(theta ** -(pair / half), scaling) for pair in range(half)])
    elif scaling["type"] == "linear":
        angle = angle / scaling["factor"]
    one, two = x[..., :half], x[..., half:]
    return np.concatenate([one * np.cos(angle) - two * np.sin(angle), two * np.cos(angle) + one * np.sin(angle)], -1)


class Slow:
    """An EAGLE head, one position after the other in float64, written from the description alone."""

    def __init__(self, head, embedding: np.ndarray, rows: np.ndarray) -> None:
        self.c, self.w = head.config, {name: value.astype(np.float64) for name, value in head.arrays().items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding.astype(np.float64))
        self.rows = self.w.get("lm_head.weight", rows.astype(np.float64))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0.0)

    def layer(self, index: int, inputs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """The last position's output; inputs: (hidden state, embedding) of all positions."""
        c, place = self.c, f"layers.{index}"
        queries, keys, values, residual = [], [], [], np.zeros(0)
        for position, (h, e) in enumerate(inputs):
            x, residual = h, h
            if c.kind == "eagle3" and index == 0:
                e = norm(e, self.w[f"{place}.input_layernorm.weight"], c.eps)
                hn = norm(h, self.w[f"{place}.hidden_norm.weight"], c.eps)
                x, residual = np.concatenate([e, hn]), hn if c.norm_before_residual else h
                if c.embedding_residual:
                    residual = residual + self.linear("embedding_residual", e)
            elif index:
                x = norm(h, self.w[f"{place}.input_layernorm.weight"], c.eps)
            made = [self.linear(f"{place}.self_attn.{part}_proj", x).reshape(-1, c.head_dim) for part in "qkv"]
            queries.append(turned(made[0], position, c.rope_theta, c.rope_scaling))
            keys.append(turned(made[1], position, c.rope_theta, c.rope_scaling))
            values.append(made[2])
        gathered = []
        for number in range(c.heads):
            kv = number // (c.heads // c.kv_heads)
            scores = np.array([queries[-1][number] @ key[kv] for key in keys]) / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            gathered.append(sum(w * value[kv] for w, value in zip(weights / weights.sum(), values, strict=True)))
        h = residual + self.linear(f"{place}.self_attn.o_proj", np.concatenate(gathered))
        x = norm(h, self.w[f"{place}.post_attention_layernorm.weight"], c.eps)
        gate = self.linear(f"{place}.mlp.gate_proj", x)
        inner = gate / (1 + np.exp(-gate)) * self.linear(f"{place}.mlp.up_proj", x)
        return h + self.linear(f"{place}.mlp.down_proj", inner)

    def entered(self, h: np.ndarray, e: np.ndarray, first: bool) -> np.ndarray:
        if self.c.kind == "eagle1":
            return self.linear("fc", np.concatenate([e, h]))
        if not first:
            return h
        return self.linear("fc", norm(h, self.w["feature_norm.weight"], self.c.eps, 3) if self.c.feature_norm else h)

    def draft(self, features: np.ndarray, tokens: list[int], last: int, steps: int) -> list[np.ndarray]:
        """Logits of each step of a chain that starts after token last + 1, fed with the tokens that follow."""
        read = []
        for position in range(last + 1):
            e = self.embedding[tokens[position + 1]]
            read.append((self.entered(features[position].astype(np.float64), e, True), e))
        logits = []
        for step in range(steps):
            h = read[-1][0]
            inputs = [read]
            for index in range(self.c.layers):
                outputs = [self.layer(index, inputs[-1][: upto + 1]) for upto in range(len(read))]
                inputs.append([(out, e) for out, (_, e) in zip(outputs, read, strict=True)])
                h = outputs[-1]
            token = tokens[last + 1 + step]
            normed = norm(h, self.w["norm.weight"], self.c.eps) if self.c.kind == "eagle3" else h
            made = self.rows @ normed
            if self.c.markov_rank:
                made = made + self.w["markov_out.weight"] @ self.w["markov_in.weight"][token]
            logits.append(made)
            e = self.embedding[tokens[last + 2 + step]] if last + 2 + step < len(tokens) else read[-1][1]
            read.append((self.entered(h, e, False), e))
        return logits


def examples_of(one, lengths: list[tuple[int, int]]) -> tuple[list[Example], dict[bytes, np.ndarray]]:
    chance = np.random.default_rng(4)
    made, kept = [], {}
    width = one.target_hidden * (1 + (len(one.feature_layers) or (3 if one.kind == "eagle3" else 1)))
    for number, (prompt, answer) in enumerate(lengths):
        tokens = chance.integers(0, one.vocab, prompt + answer).astype(np.int32)
        made.append(Example(str(number), tokens, prompt, True))
        kept[tokens.tobytes()] = chance.standard_normal((len(tokens) - 1, width)).astype(np.float16)
    return made, kept


def unrolled_faults(kind: str, shift: int = 0, trained: HeadConfig | None = None, **changes: Any) -> float:
    """Largest relative difference of logits between the unrolled module, rows padded, and drafting step by step.

    trained: the description that the module has where it is not the head's.
    """
    head = head_beds.head(kind, **changes)
    one = trained or head.config
    embedding = np.random.default_rng(1).standard_normal((one.vocab, one.hidden)).astype(np.float32)
    rows = embedding[head.ids]
    frozen = torch.from_numpy(rows) if one.frozen_head else None
    module = make_module(one, torch.from_numpy(embedding), frozen)
    load_arrays(module, head.arrays())
    examples, kept = examples_of(one, [(5, 6), (2, 9), (7, 3)])
    by_key = dict(zip([keyed(example) for example in examples], kept.values(), strict=True))
    batch = collate(examples, by_key.__getitem__, STEPS, one.inputs - (one.hidden if one.kind == "eagle1" else 0), CPU)
    batch.features = batch.features.roll(shift, 1)
    worst = 0.0
    slow = Slow(head, embedding, rows)
    for step, h in unroll(module, batch, STEPS):
        where = batch.guessed(step)
        made = np.zeros((*where.shape, one.draft_vocab))
        made[where.numpy()] = guesses(module, h, batch, step, where).detach().numpy()
        for row, example in enumerate(examples):
            tokens = example.tokens.tolist()
            for place in range(example.answer - step):
                last = example.prompt - 2 + place
                assert where[row, place]
                assert int(batch.right(step)[row, place]) == tokens[last + 2 + step]
                features = by_key[keyed(example)]
                right = slow.draft(features[:, : batch.features.shape[2]], tokens, last, step + 1)[step]
                worst = max(worst, float(np.abs(made[row, place] - right).max() / np.abs(right).max()))
            assert not where[row, example.answer - step :].any()
    return worst


def keyed(example: Example) -> str:
    return sequence_key(example.tokens.tolist())


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-before", "eagle3-ours", "eagle3-two", "eagle1"])
def test_unrolled_steps_equal_drafting_step_by_step(kind):
    assert unrolled_faults(kind) < 2e-4


LLAMA3 = {
    "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("scaling", [LLAMA3, {"type": "linear", "factor": 4.0}], ids=["llama3", "linear"])
def test_scaled_rotary_positions_are_trained_as_they_are_drafted_with(scaling):
    assert unrolled_faults("eagle3", rope_scaling=scaling) < 2e-4


def test_planted_ignored_scaling_of_rotary_positions_is_seen():
    assert unrolled_faults("eagle3", trained=head_beds.config("eagle3"), rope_scaling=LLAMA3) > 1e-2


def test_a_new_head_turns_as_its_target_does(tmp_path):
    changes = {"rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "max_position_embeddings": 512}
    design = Design(draft_vocab=64, feature_layers=(0, 1, 2))
    assert head_config(open_model(write_folder(tmp_path / "llama3", **changes)), design).rope_scaling == LLAMA3
    yarn = open_model(write_folder(tmp_path / "yarn", rope_scaling={"rope_type": "yarn", "factor": 4.0}))
    with pytest.raises(UnsupportedError, match="rope scaling 'yarn'"):
        head_config(yarn, design)
    with pytest.raises(UnsupportedError, match="rope scaling 'yarn'"):
        make_module(head_beds.config("eagle3", rope_scaling={"type": "yarn"}), torch.zeros(101, 48), None)


def test_planted_features_shifted_by_a_position_are_seen():
    assert unrolled_faults("eagle3", shift=1) > 1e-2


def test_objectives_equal_their_definitions():
    chance = np.random.default_rng(0)
    p, q = (chance.dirichlet(np.full(7, 0.5), 4) for _ in range(2))
    low = np.minimum(p, q).sum(1)
    right = {
        "ce": -(p * np.log(q)).sum(1),
        "kl": (p * np.log(p / q)).sum(1),
        "tv": 0.5 * np.abs(p - q).sum(1),
        "accept": -np.log(low),
        "greedy": -np.log(q[np.arange(4), p.argmax(1)]),
    }
    assert set(right) == set(OBJECTIVES)
    log_q, log_p = torch.from_numpy(np.log(q)), torch.from_numpy(np.log(p))
    for name, expected in right.items():
        assert np.allclose(objective(name)(log_q, log_p).numpy(), expected), name
    both = objective("ce+accept")(log_q, log_p).numpy()
    assert np.allclose(both, (right["ce"] + right["accept"]) / 2)
    with pytest.raises(InputError, match="unknown objective 'loss'; choose of ce, kl"):
        objective("ce+loss")


def test_the_loss_counts_drafted_tokens_only_and_weighs_steps():
    head = head_beds.head("eagle3-ours")
    one = head.config
    embedding = torch.from_numpy(np.random.default_rng(1).standard_normal((one.vocab, one.hidden), np.float32))
    rows = embedding[torch.from_numpy(head.ids.astype(np.int64))]
    module = make_module(one, embedding, rows)
    load_arrays(module, head.arrays())
    examples, kept = examples_of(one, [(5, 6), (2, 9)])
    by_key = dict(zip(map(keyed, examples), kept.values(), strict=True))
    batch = collate(examples, by_key.__getitem__, 2, one.inputs, CPU)
    truth = training_truth(one, embedding, rows, head.ids)
    total, shares = batch_loss(module, batch, truth, 2, objective("greedy"))
    expected = 0.0
    for step, h in unroll(module, batch, 2):
        where = batch.guessed(step) & (truth.drafted[batch.right(step)] >= 0)
        log_q = guesses(module, h, batch, step, where).log_softmax(-1)
        best = truth.log_p(batch.truth(step)[where]).argmax(-1)
        expected += 0.8**step * float(-log_q.detach()[torch.arange(len(best)), best].mean())
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)
    counts = count_right(module, batch, truth, 2)
    assert counts[0, 0] == 15
    assert counts[1, 0] <= counts[0, 1]
    assert len(shares) == 2
    own = OwnTokens(examples, truth, lambda ids: embedding[torch.from_numpy(ids.astype(np.int64))].numpy())
    assert not set(own.ids.tolist()) & set(head.ids.tolist())
    more = count_right(module, batch, truth, 2, own)
    assert more[0, 0] == 15
    for row, example in enumerate(examples):
        allowed = set(own.ids[own.allowed[row]].tolist())
        assert allowed == set(example.tokens[: example.prompt].tolist()) - set(head.ids.tolist())


def training_truth(one, embedding, rows, ids):
    drafted = torch.full((one.vocab,), -1, dtype=torch.int64)
    drafted[torch.from_numpy(ids.astype(np.int64))] = torch.arange(len(ids))
    return Truth(torch.ones(one.hidden), 1e-5, rows, drafted)
