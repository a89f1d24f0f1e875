"""Training of heads: the unrolled steps equal drafting, objectives their definitions, runs resume to the bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'slipstream[train]'")

import head_beds  # noqa: E402
from model_files import write_folder  # noqa: E402
from slipstream.cli import main  # noqa: E402
from slipstream.core.errors import InputError  # noqa: E402
from slipstream.drafters.heads.modules import load_arrays, make_module  # noqa: E402
from slipstream.models.files import open_model  # noqa: E402
from slipstream.models.heads.formats import read_head  # noqa: E402
from slipstream.train.build import Design, gather, start  # noqa: E402
from slipstream.train.data import Example  # noqa: E402
from slipstream.train.evaluate import OwnTokens, count_right  # noqa: E402
from slipstream.train.loss import batch_loss  # noqa: E402
from slipstream.train.objectives import OBJECTIVES, objective  # noqa: E402
from slipstream.train.run import Options, Training  # noqa: E402
from slipstream.train.schedule import Schedule  # noqa: E402
from slipstream.train.unroll import collate, guesses, unroll  # noqa: E402

STEPS = 3
CPU = torch.device("cpu")


def norm(x: np.ndarray, weight: np.ndarray, eps: float, parts: int = 1) -> np.ndarray:
    split = x.reshape(*x.shape[:-1], parts, -1)
    return (split / np.sqrt((split**2).mean(-1, keepdims=True) + eps)).reshape(x.shape) * weight


def turned(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = position * theta ** -(np.arange(half) / half)
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
            queries.append(turned(made[0], position, c.rope_theta))
            keys.append(turned(made[1], position, c.rope_theta))
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


def unrolled_faults(kind: str, shift: int = 0) -> float:
    """Largest relative difference of logits between the unrolled module, rows padded, and drafting step by step."""
    head = head_beds.head(kind)
    one = head.config
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
    from slipstream.train.features import sequence_key

    return sequence_key(example.tokens.tolist())


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-before", "eagle3-ours", "eagle3-two", "eagle1"])
def test_unrolled_steps_equal_drafting_step_by_step(kind):
    assert unrolled_faults(kind) < 2e-4


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
    from slipstream.train.loss import Truth

    drafted = torch.full((one.vocab,), -1, dtype=torch.int64)
    drafted[torch.from_numpy(ids.astype(np.int64))] = torch.arange(len(ids))
    return Truth(torch.ones(one.hidden), 1e-5, rows, drafted)


def test_the_schedule():
    plan = Schedule(peak=1e-3, unroll=3, alone=0.5)
    rates = [plan.rate(done / 100) for done in range(101)]
    assert max(rates) == pytest.approx(1e-3, rel=1e-2)
    assert rates[0] < 1e-4
    assert rates[-1] < 1e-4
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert [plan.steps(done) for done in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 3, 3]
    for bad in ({"peak": 0.0}, {"unroll": 0}, {"alone": 1.5}):
        with pytest.raises(InputError):
            Schedule(**bad)
    with pytest.raises(InputError, match="neither steps nor minutes"):
        Options()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny model and answers it wrote, by the command itself."""
    folder = tmp_path_factory.mktemp("train")
    model = write_folder(folder / "model")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"hello {'the world ' * (number % 5)}{number}"}) + "\n" for number in range(60))
    )
    answers = folder / "answers.jsonl"
    code = main(
        f"train answers --target {model} --prompts {prompts} --out {answers} --max-tokens 24 --threads 1 "
        "--feature-layers 0,1,2".split()
    )
    assert code == 0
    return model, answers


DESIGN = Design(draft_vocab=64, drafts=2, feature_layers=(0, 1, 2))


def training(made: tuple[Path, Path], design: Design = DESIGN, **options) -> Training:
    material = gather(open_model(made[0]), [made[1]], design)
    run = start(material, Options(**{"positions": 200, "autocast": False, **options}), CPU)
    material.shelf.close()
    return run


def test_training_lowers_the_loss_and_finds_the_answers(made, tmp_path):
    run = training(made, steps=60, schedule=Schedule(peak=5e-3))
    before = run.acceptance(run.held)
    losses = []
    learn = run._learn
    run._learn = lambda examples: (learn(examples), losses.append(run.state.loss))[0]
    run.run(tmp_path)
    assert np.mean(losses[20:29]) < 0.8 * losses[0]
    assert run.state.points[-1].acceptance[0] > before[0] + 0.1
    assert len(run.state.points[-1].acceptance) == 2


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_killed_run_ends_with_the_same_weights(made, tmp_path, kind):
    design = replace(DESIGN, kind=kind, feature_layers=DESIGN.feature_layers if kind == "eagle3" else ())
    whole = training(made, design, steps=12)
    whole.run(tmp_path / "whole")
    killed = training(made, design, steps=12)
    learn = killed._learn

    def until_five(examples) -> None:
        if killed.state.step == 5:
            raise KeyboardInterrupt
        learn(examples)

    killed._learn = until_five
    with pytest.raises(KeyboardInterrupt):
        killed.run(tmp_path / "killed")
    again = training(made, design, steps=12)
    again.resume(tmp_path / "killed")
    assert again.state.step == 5
    again.run(tmp_path / "killed")
    assert again.state.step == whole.state.step == 12
    for one, other in zip(again.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_planted_lost_optimizer_state_is_seen(made, tmp_path):
    whole = training(made, steps=8)
    whole.run(tmp_path / "whole")
    half = training(made, steps=8)
    half.options = replace(half.options, steps=8, minutes=None)
    learn = half._learn
    half._learn = lambda examples: learn(examples) if half.state.step < 4 else (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        half.run(tmp_path / "half")
    again = training(made, steps=8)
    fresh = again.optimizer.state_dict()
    again.resume(tmp_path / "half")
    again.optimizer.load_state_dict(fresh)
    again.run(tmp_path / "half")
    pairs = zip(again.module.parameters(), whole.module.parameters(), strict=True)
    assert not all(torch.equal(one, other) for one, other in pairs)


def test_a_time_limit_only_stops_early(made, tmp_path):
    limited = training(made, steps=10**6, minutes=0.005)
    limited.run(tmp_path / "limited")
    count = limited.state.step
    assert 0 < count < 10**6
    free = training(made, steps=10**6)
    learn = free._learn
    free._learn = lambda examples: (
        learn(examples) if free.state.step < count else (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        free.run(tmp_path / "free")
    for one, other in zip(limited.module.parameters(), free.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_damaged_checkpoint_is_named(made, tmp_path):
    run = training(made, steps=2)
    with pytest.raises(InputError, match="to resume from"):
        run.resume(tmp_path)
    run.run(tmp_path)
    other = training(made, replace(DESIGN, layers=2), steps=2)
    with pytest.raises(InputError, match="does not fit this run"):
        other.resume(tmp_path)


def command(made: tuple[Path, Path], kind: str, out: Path, *more: str) -> int:
    words = f"train {kind} --target {made[0]} --data {made[1]} --out {out} --draft-vocab 64 --batch 200 --threads 1"
    with warnings.catch_warnings():
        code = main([*words.split(), *more])
    torch.use_deterministic_algorithms(False)
    return code


def test_the_command_writes_a_head_with_its_provenance(made, tmp_path, capsys):
    out = tmp_path / "run"
    layers = ("--feature-layers", "0,1,2")
    assert command(made, "eagle3", out, "--steps", "4", "--unroll", "2", *layers) == 0
    head = read_head(out)
    assert head.config.kind == "eagle3"
    assert head.config.depth == 2
    assert len(head.ids) == 64
    facts = json.loads((out / "config.json").read_text())["provenance"]
    assert facts["steps"] == 4
    assert facts["command"].startswith("slipstream ")
    assert facts["versions"]["torch"] == torch.__version__
    assert set(facts["data"]) == {"answers.jsonl"}
    assert len(facts["weights"]) == 12
    assert "held-out acceptance" in capsys.readouterr().err
    words = f"train measure --target {made[0]} --head {out} --data {made[1]} --threads 1"
    assert main(words.split()) == 0
    assert "answers.jsonl: " in capsys.readouterr().out
    assert command(made, "eagle3", out, "--steps", "4") == 2
    assert "add --resume" in capsys.readouterr().err
    assert command(made, "eagle3", out, "--steps", "9", "--unroll", "2", "--resume", *layers) == 2
    assert "had other options" in capsys.readouterr().err
    assert command(made, "eagle3", out, "--steps", "4", "--unroll", "2", "--resume", *layers) == 0


def test_the_command_trains_medusa(made, tmp_path):
    assert command(made, "medusa", tmp_path / "m", "--steps", "4", "--heads", "2", "--storage", "Q8_0") == 0
    head = read_head(tmp_path / "m")
    assert (head.config.kind, head.config.medusa_heads, head.config.frozen_head) == ("medusa", 2, True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "4", "--objective", "best"], "unknown objective"),
        (["--steps", "4", "--storage", "Q4"], "--storage is Q4"),
        ([], "neither steps nor minutes"),
        (["--steps", "4", "--resume"], "holds no run to resume"),
        (["--steps", "4", "--feature-layers", "0,9"], "feature layer 9"),
        (["--steps", "4"], "name feature layers"),
    ],
)
def test_what_cannot_be_is_said_before_training(made, tmp_path, capsys, more, message):
    assert command(made, "eagle3", tmp_path / "run", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.full
def test_a_run_that_is_told_to_end_saves_and_is_resumed(made, tmp_path):
    """The command as a process of its own, ended from outside, then resumed: the same head as a run left alone."""
    words = [sys.executable, "-m", "slipstream", "train", "eagle3", "--target", str(made[0]), "--data", str(made[1])]
    more = "--draft-vocab 64 --batch 40 --threads 1 --feature-layers 0,1,2 --steps 60 --full-precision --storage F32"
    words += more.split()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*words, "--out", str(tmp_path / "whole")], check=True, **quiet)
    killed = subprocess.Popen([*words, "--out", str(tmp_path / "killed")], **quiet)
    while not (tmp_path / "killed" / "checkpoint.pt").exists() and killed.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    killed.send_signal(signal.SIGTERM)
    killed.wait()
    subprocess.run([*words, "--out", str(tmp_path / "killed"), "--resume"], check=True, **quiet)
    heads = [read_head(tmp_path / name) for name in ("whole", "killed")]
    for name, value in heads[0].arrays().items():
        assert np.array_equal(value, heads[1].arrays()[name]), name
