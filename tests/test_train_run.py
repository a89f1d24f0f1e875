"""Training of heads: schedules, runs that resume to the bit, the commands and what they refuse."""

from __future__ import annotations

import errno
import json
import os
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

from model_files import write_folder  # noqa: E402
from slipstream.cli import main  # noqa: E402
from slipstream.core.errors import InputError  # noqa: E402
from slipstream.models.files import open_model  # noqa: E402
from slipstream.models.heads.formats import read_head  # noqa: E402
from slipstream.train.build import Design, gather, start  # noqa: E402
from slipstream.train.features import FeatureStore  # noqa: E402
from slipstream.train.run import Options, Training  # noqa: E402
from slipstream.train.schedule import Schedule  # noqa: E402

CPU = torch.device("cpu")


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
    assert facts["command"].split()[0] == "slipstream"
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
        (["--steps", "4", "--device", "tpu"], "--device tpu is not there"),
        (["--steps", "4", "--threads", "0"], "--threads is 0"),
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


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("kind", "owner", "name"), [("eagle3", Training, "save"), ("answers", FeatureStore, "_keep")])
def test_a_full_disk_is_named(made, tmp_path, capsys, kind, owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, full)
    if kind == "eagle3":
        code = command(made, kind, tmp_path / "run", "--steps", "4", "--feature-layers", "0,1,2")
    else:
        words = f"train answers --target {made[0]} --prompts {made[1].parent / 'prompts.jsonl'} --feature-layers 0,1,2"
        code = main([*words.split(), "--out", str(tmp_path / "run"), "--max-tokens", "8"])
    assert code == 2
    assert f"cannot write {tmp_path / 'run'}: No space left on device; once it can" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_from_outside_is_resumed(made, tmp_path, end):
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
    killed.send_signal(end)
    killed.wait()
    subprocess.run([*words, "--out", str(tmp_path / "killed"), "--resume"], check=True, **quiet)
    heads = [read_head(tmp_path / name) for name in ("whole", "killed")]
    for name, value in heads[0].arrays().items():
        assert np.array_equal(value, heads[1].arrays()[name]), name
