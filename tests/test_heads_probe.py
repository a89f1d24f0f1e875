"""Pre-flight: what does not fit is refused with its reason, or tried, found useless and named with what would help."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import head_beds
import native_beds
from slipstream.core.errors import ModelError
from slipstream.drafters.heads import probe, tried
from slipstream.drafters.heads.causes import Reading, clearly_better
from slipstream.drafters.heads.load import make_drafter
from slipstream.drafters.heads.parts import parts_of
from slipstream.drafters.heads.probe import Trial, own_text, reader_of, try_head
from slipstream.models.heads.check import fitted
from slipstream.models.heads.config import tensors
from slipstream.models.heads.formats import read_head, write_head
from slipstream.models.heads.head import Head, make_head, store

LAYERS = (0, 1, 2)
PROMPT = [5, 17, 33, 2, 71, 40, 8, 90, 63, 21, 55, 12]
MODEL = {"num_layers": 4}


def trained(target, text, before=False, layers=(1, 2, 3)):
    """A head whose LM head was fitted to the target's own text: attention and MLP are silent, h is what a layer adds.

    Its hidden_norm turns the signs of half of h around, so that the norm flag matters.
    """
    one = head_beds.config("eagle3", draft_vocab=101, feature_layers=layers, norm_before_residual=before)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors(one).items()}
    for name in arrays:
        if name.endswith("norm.weight"):
            arrays[name][:] = 1
    for name in (f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"):  # the cache is filled, and not heard
        arrays[name][:] = np.random.default_rng(0).standard_normal(arrays[name].shape)
    arrays["fc.weight"][:, 48:] = np.hstack([-np.eye(48), np.eye(48)])
    signs = np.where(np.arange(48) % 2, 1, -1).astype(np.float32)
    arrays["layers.0.hidden_norm.weight"][:] = signs
    read = reader_of(target)(layers, text)
    features = (read[layers[2]] - read[layers[1]])[:-2]
    x = features / np.sqrt((features**2).mean(1, keepdims=True) + 1e-5)
    x = x * signs / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) if before else x
    wanted = np.eye(101)[text[2:]]
    arrays["lm_head.weight"][:] = (np.linalg.solve(x.T @ x + 1e-3 * np.eye(48), x.T @ wanted)).T
    return make_head(one, arrays)


@pytest.fixture(scope="module")
def bed():
    target = native_beds.target(**MODEL)
    return target, parts_of(native_beds.model(**MODEL)), own_text(target, PROMPT, 120)


def trial(bed, head):
    target, parts, text = bed
    return try_head(head, parts, reader_of(target), text, len(PROMPT), MODEL["num_layers"])


def reread(head, **changes):
    """The head with another description."""
    return Head(replace(head.config, **changes), head.tensors, head.ids)


@pytest.mark.parametrize("before", [False, True])
def test_a_head_that_fits_is_let_through(before, bed):
    found = trial(bed, trained(bed[0], bed[2], before))
    assert found.rate > 0.6
    assert found.count == 120
    assert not found.doubtful
    assert not found.tried


@pytest.mark.parametrize("before", [False, True])
def test_planted_wrong_norm_flag_is_named(before, bed):
    found = trial(bed, reread(trained(bed[0], bed[2], before), norm_before_residual=not before))
    assert found.doubtful
    assert found.remedy == f"norm_before_residual {str(before).lower()}"
    assert f"norm_before_residual {str(before).lower()}" in found.message("head x")
    assert found.better > 0.6 * found.count


@pytest.mark.parametrize("layers", [(2, 3, 4), (0, 1, 2), (3, 2, 1), (1, 3, 2), (2, 3, 1), (2, 1, 0)])
def test_planted_shifted_layer_ids_are_named(layers, bed):
    """One higher, one lower, in another order, both."""
    found = trial(bed, reread(trained(bed[0], bed[2]), feature_layers=layers))
    assert found.doubtful
    assert found.remedy == "layer ids [1, 2, 3]"


def test_two_wrong_things_at_once_are_named(bed):
    found = trial(bed, reread(trained(bed[0], bed[2]), feature_layers=(3, 2, 1), norm_before_residual=True))
    assert found.remedy == "norm_before_residual false and layer ids [1, 2, 3]"


def test_fault_26_a_head_that_does_not_fit_is_useless_without_a_remedy(bed):
    found = trial(bed, head_beds.head("eagle3", draft_vocab=101, feature_layers=(1, 2, 3)))
    assert found.useless
    assert not found.remedy
    assert "another model" in found.message("head x")
    assert f"None of {found.tried} other readings" in found.message("head x")


@pytest.mark.parametrize("kind", ["medusa", "eagle1"])
def test_of_heads_without_such_settings_nothing_is_said_to_have_been_tried(kind, bed):
    found = trial(bed, head_beds.head(kind, feature_layers=(4,)))
    assert found.useless
    assert found.tried == 0
    assert "reading" not in found.message("head x")


def weakened(head, bed, share):
    """The head with so large a part of its LM head unlearnt that it is right about `share` of the time."""
    rng = np.random.default_rng(4)
    noise = rng.standard_normal((101, 48)).astype(np.float32)
    rows = head.tensors["lm_head.weight"].float32()
    for much in np.geomspace(0.01, 10, 60):
        weak = Head(head.config, {**head.tensors, "lm_head.weight": store(rows + much * noise, "F32")}, head.ids)
        if trial(bed, weak).rate <= share:
            return weak
    raise AssertionError("noise does not weaken it")


@pytest.mark.parametrize("share", [0.16, 0.12, 0.07])
def test_a_weak_head_is_called_weak_and_of_nothing_else(share, bed):
    found = trial(bed, weakened(trained(bed[0], bed[2]), bed, share))
    assert 0.05 <= found.rate <= share
    assert found.doubtful
    assert not found.useless
    assert found.tried > 20
    assert found.remedy == ""
    assert "is weak, or does not fit" in found.message("head x")


def test_a_small_head_is_let_through(bed):
    found = trial(bed, weakened(trained(bed[0], bed[2]), bed, 0.25))
    assert found.rate > 0.2
    assert not found.doubtful


def test_untrained_heads_are_never_accused_of_a_wrong_setting(bed):
    for seed in range(30):
        head = head_beds.head("eagle3", seed=seed, draft_vocab=101, feature_layers=(1, 2, 3))
        assert trial(bed, head).remedy == "", seed


def test_chance_is_not_named(bed):
    """Readings that differ by luck alone, over many heads: hardly ever is one found better."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(300):
        base, *others = rng.geometric(0.15, (36, 160)).astype(np.int32) - 1
        wrong += clearly_better(base, [(Reading((1, 2, 3), True), ranks) for ranks in others]) is not None
    assert wrong <= 1


def test_the_simplest_of_like_readings_is_named():
    base, good = np.full(160, 9, np.int32), np.repeat(np.int32([0, 5]), 80)
    better = np.where(np.arange(160) < 83, 0, 5).astype(np.int32)
    two, one = Reading((1, 2, 3), True, 2), Reading((1, 2, 3), True, 1)
    assert clearly_better(base, [(two, better), (one, good)]) == 1
    assert clearly_better(base, [(two, better), (one, base)]) == 0
    assert clearly_better(base, [(two, base)]) is None


def test_a_trial_takes_a_bounded_time(bed, monkeypatch):
    target, parts, _ = bed
    clock = itertools.count(0, 5.0)
    monkeypatch.setattr(probe.time, "monotonic", lambda: next(clock))
    text = own_text(target, PROMPT, 120)
    assert len(text) == len(PROMPT) + probe.FEWEST + 3
    head = head_beds.head("eagle3", draft_vocab=101, feature_layers=(1, 2, 3))
    found = try_head(head, parts, reader_of(target), text, len(PROMPT), MODEL["num_layers"])
    assert found.tried == 3
    assert found.count == probe.FEWEST + 3


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Trial(15, 160, 35), "9% were right; it is weak, or does not fit. None of 35 other readings"),
        (Trial(15, 160, 35, "layer ids [1, 2, 3]", 46), "With layer ids [1, 2, 3] 29% are right: correct"),
        (Trial(1, 160), "1% were right; it does not fit. It may belong to another model"),
        (Trial(31, 160, 35), ""),
        (Trial(46, 160), ""),
        (Trial(0, 0), ""),
    ],
)
def test_a_head_is_tried_once_and_warned_of_at_every_load(outcome, said, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    head = head_beds.head("eagle3")
    write_head(tmp_path / "h", head)
    model = SimpleNamespace(name="m", path=tmp_path / "m", weights_bytes=5)
    trials = []
    monkeypatch.setattr(tried, "try_on", lambda *given: trials.append(given) or outcome)
    for _ in range(2):
        caplog.clear()
        tried.warn_if_useless(str(tmp_path / "h"), head, None, None, model)
        assert [each.message for each in caplog.records if each.levelname == "WARNING"] == (
            [outcome.message(f"head {tmp_path / 'h'}")] if said else []
        )
        assert said in caplog.text
    assert len(trials) == 1
    (tmp_path / "h" / "config.json").write_text("{}")
    tried.warn_if_useless(str(tmp_path / "h"), head, None, None, model)
    assert len(trials) == 2


def test_the_outcome_of_any_trial_can_be_told():
    assert Trial(46, 160).told() == "of 160 guesses on the model's own text 29% were right"
    assert "not tried" in Trial(0, 0).told()


def test_planted_truncated_d2t_is_named(tmp_path):
    head = head_beds.head("eagle3")
    write_head(tmp_path / "cut", Head(head.config, head.tensors, head.ids), "speculators")
    written = read_head(tmp_path / "cut")
    with pytest.raises(ModelError, match=r"d2t maps 30 ids, the head drafts 37.*truncated"):
        Head(written.config, written.tensors, written.ids[:30]).check("head x")


def check(head, **changes):
    return fitted(head, native_beds.model(**changes).config, "tokens", "head x", "m")


def with_config(name="eagle3", **changes):
    head = head_beds.head(name)
    return Head(replace(head.config, **changes), head.tensors, head.ids)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (with_config(target_hidden=64), "hidden states of 64, m has 48"),
        (with_config(vocab=200), "vocabulary of 200, m has 101"),
        (with_config(fingerprint="others"), "another tokenizer"),
        (with_config(feature_layers=(0, 1, 9)), "layer 9, m has layers 0 to 2"),
        (with_config(attention_bias=True), "q_proj.bias.* missing"),
        (with_config(intermediate=80), "gate_proj.weight is .72, 48., its settings make it .80, 48."),
        (with_config(layers=2), "are missing"),
        (with_config("eagle3-two", layers=1), "nothing uses tensor layers.1"),
    ],
)
def test_fault_26_misfits_are_refused_with_their_reason(head, message):
    with pytest.raises(ModelError, match=message):
        check(head)


def test_fault_26_maps_and_values_are_looked_at():
    head = head_beds.head("eagle3")
    doubled = head.ids.copy()
    doubled[1] = doubled[0]
    with pytest.raises(ModelError, match="several draft ids"):
        check(Head(head.config, head.tensors, doubled))
    with pytest.raises(ModelError, match="may have been written as target ids"):
        check(Head(head.config, head.tensors, head.ids + 64))
    broken = head.tensors["fc.weight"].float32()
    broken[3, 4] = np.nan
    with pytest.raises(ModelError, match=r"fc.weight holds NaN"):
        check(Head(head.config, {**head.tensors, "fc.weight": store(broken, "F32")}, head.ids))
    with pytest.raises(ModelError, match=r"nothing uses tensors rotary.extra"):
        check(Head(head.config, head.tensors, head.ids, unused=["rotary.extra"]))


@pytest.mark.parametrize("name", head_beds.KINDS)
def test_heads_that_fit_are_accepted(name):
    head = check(head_beds.head(name))
    assert head.config.feature_layers
    assert make_drafter(head, parts_of(native_beds.model()), 101, 400).name in ("eagle", "medusa")
