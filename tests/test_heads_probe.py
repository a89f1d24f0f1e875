"""Pre-flight: what does not fit is refused with its reason, or tried, found useless and named with what would help."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import head_beds
import native_beds
from slipstream.core.errors import ModelError
from slipstream.drafters.heads.load import make_drafter
from slipstream.drafters.heads.parts import parts_of
from slipstream.drafters.heads.probe import own_text, reader_of, try_head
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
    features = reader_of(target)(layers, text)[:-2]
    features = features[:, 96:] - features[:, 48:96]
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
    return try_head(head, parts, reader_of(target), text, len(PROMPT))


@pytest.mark.parametrize("before", [False, True])
def test_a_head_that_fits_is_let_through(before, bed):
    found = trial(bed, trained(bed[0], bed[2], before))
    assert found.rate > 0.6
    assert found.count == 120
    assert not found.useless


@pytest.mark.parametrize("before", [False, True])
def test_planted_wrong_norm_flag_is_named(before, bed):
    head = trained(bed[0], bed[2], before)
    wrong = Head(replace(head.config, norm_before_residual=not before), head.tensors, head.ids)
    found = trial(bed, wrong)
    assert found.useless
    assert found.remedy == f"norm_before_residual {str(before).lower()}"
    assert f"norm_before_residual {str(before).lower()}" in found.message("head x")
    assert found.better > 0.6


@pytest.mark.parametrize("shift", [1, -1])
def test_planted_shifted_layer_ids_are_named(shift, bed):
    head = trained(bed[0], bed[2])
    layers = tuple(layer + shift for layer in (1, 2, 3))
    found = trial(bed, Head(replace(head.config, feature_layers=layers), head.tensors, head.ids))
    assert found.useless
    assert found.remedy == "layer ids [1, 2, 3]"


def test_fault_26_a_head_that_does_not_fit_is_useless_without_a_remedy(bed):
    found = trial(bed, head_beds.head("eagle3", draft_vocab=101, feature_layers=(1, 2, 3)))
    assert found.useless
    assert "another model" in found.message("head x")


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
