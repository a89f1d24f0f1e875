"""Heads that were trained for a few steps only: weak, and never accused of a setting that is right."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="training needs torch: pip install 'slipstream[train]'")

import test_train_run
from slipstream.drafters.heads.load import open_head
from slipstream.drafters.heads.parts import parts_of
from slipstream.drafters.heads.probe import own_text, reader_of, try_head
from slipstream.models.files import open_model
from slipstream.targets.native.model import NativeTarget

made = test_train_run.made
PROMPTS = ([7, 3, 9, 4, 11, 6, 2, 12], [5, 5, 8, 13, 1, 10, 3, 3])


@pytest.mark.parametrize("steps", ["3", "20", "80"])
def test_a_head_of_few_steps_is_not_accused_of_a_wrong_setting(steps, made, tmp_path):
    out, layers = tmp_path / "head", ("--feature-layers", "0,1,2")
    assert test_train_run.command(made, "eagle3", out, "--steps", steps, "--unroll", "2", *layers) == 0
    file = open_model(made[0])
    head, target = open_head(str(out), file), NativeTarget.load(file, slots=2)
    for prompt in PROMPTS:
        text = own_text(target, prompt, 160)
        trial = try_head(head, parts_of(file), reader_of(target), text, len(prompt), file.config.num_layers)
        assert trial.count >= 50
        assert trial.remedy == ""
