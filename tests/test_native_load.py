"""Loading: what is refused, by name and before a weight is read; padding ids; features; rope tables."""

from __future__ import annotations

import numpy as np
import pytest

from native_beds import LLAMA3, logits_of, model, opened, same_bits, target, tokens
from slipstream.core.errors import InputError, ModelError, UnsupportedError
from slipstream.core.tree import chain
from slipstream.targets.base import RowInput
from slipstream.targets.native.model import NativeTarget
from slipstream.targets.native.rope import RopeTables, frequencies


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architecture": "gemma3"}, "gemma3"),
        ({"sliding_window": 8}, "sliding window .8."),
        ({"activation": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "factors", "factors": (1.0,) * 3}}, "3 frequency divisors for 8 pairs"),
        ({"rotary_dim": 8}, "rotation of 8 of 16"),
        ({"quantization": "awq"}, "awq"),
    ],
)
def test_fault_24_unsupported_models_are_refused_by_name_before_loading(changes, name):
    refused = model(**changes)
    with pytest.raises(UnsupportedError, match=name):
        NativeTarget.load(refused)
    assert refused.read == []


def test_fault_16_a_window_no_shorter_than_the_context_is_no_window():
    NativeTarget.load(model(architecture="mistral", sliding_window=400))


def test_misshapen_and_unsupported_tensors_name_themselves():
    wrong = model()
    original = wrong.tensor
    wrong.tensor = lambda name: original(name.replace("o_proj", "down_proj"))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.o_proj\.weight is \[48, 72\], expected \[48, 64\]"):
        NativeTarget.load(wrong)


def test_fault_14_padding_has_probability_zero():
    """Ids beyond the token list and unused ids never win, in plain and drafted rows."""
    subject = target("odd")
    logits = logits_of(subject, tokens(9, 1, 40), chain([1, 2]))
    padding = [7, 50, 51, 52]
    assert np.isneginf(logits[:, padding]).all()
    assert np.isfinite(np.delete(logits, padding, axis=1)).all()


def test_features_are_the_inputs_of_layers():
    """Layer 0 sees the embedding; prefill and forward give the same; other requests do not change the logits."""
    subject = target("llama", features=(0, 2, 1))
    embedding = model("llama").tensor("model.embed_tokens.weight").float32()
    prompt = tokens(40, 1)
    slot = subject.open()
    features = subject.prefill(slot, prompt)
    assert features.shape == (40, 3 * 48) == (40, subject.features_width)
    assert same_bits(features[:, :48].copy(), embedding[prompt])
    other = opened(subject, prompt[:30])
    out = subject.forward([RowInput(other, prompt[30], chain(prompt[31:]))])
    assert same_bits(out.features[0], features[30:].copy())
    assert same_bits(out.logits[0], logits_of(target("llama"), prompt[:31], chain(prompt[31:])))
    assert target("llama").features_width == 0
    with pytest.raises(InputError, match="feature layer 3 does not exist"):
        target("llama", features=(3,))


def test_max_context_is_checked():
    assert NativeTarget.load(model(), max_context=64).max_context == 64
    assert NativeTarget.load(model()).max_context == 400
    for wrong in (0, 401):
        with pytest.raises(InputError, match="1 to 400"):
            NativeTarget.load(model(), max_context=wrong)


def test_weights_bytes_counts_a_tied_head_once():
    tied, untied = target("llama", tie_embeddings=True), target("llama")
    assert untied.weights_bytes - tied.weights_bytes == 4 * 48 * 128  # rows are packed in panels of 32


def test_rope_variants():
    default = frequencies(model().config)
    assert default[0] == 1
    assert default[4] == pytest.approx(10000**-0.5)
    linear = frequencies(model(rope_scaling={"type": "linear", "factor": 4.0}).config)
    assert np.allclose(linear, default / 4)
    llama3 = frequencies(model(rope_scaling=LLAMA3).config)
    wavelength = 2 * np.pi / default
    assert np.allclose(llama3[wavelength < 16], default[wavelength < 16])
    assert np.allclose(llama3[wavelength > 64], default[wavelength > 64] / 8)
    between = (wavelength >= 16) & (wavelength <= 64)
    assert between.any()
    assert ((llama3 < default) & (llama3 > default / 8))[between].all()
    stored = frequencies(model(rope_scaling={"type": "factors", "factors": tuple(default / llama3)}).config)
    assert np.allclose(stored, llama3)


def test_rope_tables_grow_without_changing():
    tables = RopeTables(model(max_context=5000).config)
    cos = tables.cos.copy()
    assert not tables.ensure(1024)
    assert tables.ensure(1025)
    assert len(tables.cos) == 2048
    assert same_bits(tables.cos[:1024].copy(), cos)
    subject = target("llama", max_context=1100)
    expected = logits_of(subject, tokens(20, 1))
    logits_of(subject, tokens(1090, 2))
    assert same_bits(logits_of(subject, tokens(20, 1)), expected)
