"""The head that ships for SmolLM2: what it is, what it was made from, how often it guesses right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from slipstream.models.files import open_model
from slipstream.models.heads.formats import read_head
from slipstream.models.registry import ensure

FOLDER = Path(__file__).resolve().parents[1] / "src" / "slipstream" / "data" / "heads" / "smollm2"
DATA = Path(os.environ.get("SLIPSTREAM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
CHAT = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
PLACED = {"chat": CHAT, "qa": {"qa"}, "math": {"math_reasoning"}, "translation": {"translation"}}


def test_the_shipped_head_is_small_and_says_where_it_is_from():
    head = read_head(FOLDER)
    assert head.nbytes <= 20e6
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 20e6
    assert head.config.frozen_head
    assert not head.notices
    assert not head.unused
    facts = json.loads((FOLDER / "config.json").read_text())["provenance"]
    for name in ("target", "weights", "data", "answers", "answer_tokens", "options", "versions", "seconds"):
        assert facts[name], name
    assert not any(name in str(facts["data"]) for name in ("spec_bench", "gsm8k_test", "humaneval"))


@pytest.mark.model
def test_the_shipped_head_fits_smollm2():
    file = open_model(ensure("smollm2"))
    config = read_head(FOLDER).config
    assert config.fingerprint == file.tokenizer().fingerprint()
    assert (config.target_hidden, config.vocab) == (file.config.hidden_size, file.config.vocab_size)


@pytest.mark.full
@pytest.mark.model
def test_the_shipped_head_guesses_right_often_enough(tmp_path):
    """First guesses on the target's own greedy answers to Spec-Bench rows: .43; guesses after right ones: .40."""
    pytest.importorskip("torch", reason="measuring needs torch: pip install 'slipstream[train]'")
    if not DATA.exists():
        pytest.skip("the evaluation rows are not on this machine")
    from slipstream.train.answers import Author, Settings, read_prompts, write_answers
    from slipstream.train.build import load_target, store_folder, stored_layers
    from slipstream.train.features import FeatureStore
    from slipstream.train.measure import measure_head

    head, file = read_head(FOLDER), open_model(ensure("smollm2"))
    rows = [json.loads(line) for line in (DATA / "spec_bench.jsonl").read_text().splitlines()]
    layers = stored_layers(head.config, file.config.num_layers)
    target = load_target(file, layers, 24)
    header = {"weights": weights_of(file), "layers": list(layers)}
    paths = []
    for name, categories in PLACED.items():
        prompts, out = tmp_path / f"{name}.prompts", tmp_path / f"{name}.jsonl"
        chosen = [row["turns"][0] for row in rows if row["category"] in categories][::2]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in chosen))
        with FeatureStore(store_folder(out), header, len(layers) * file.config.hidden_size) as store:
            author = Author(target, file, 16, store)
            model = {"model": file.name, "tokenizer": head.config.fingerprint}
            write_answers(author, read_prompts([prompts]), out, model, Settings(128, sampled=0.0, max_batch=16))
        paths.append(out)
    shares = {name: found for name, _, found in measure_head(file, head, paths, lambda *_: None)}
    assert shares["all"][0] >= 0.43
    assert min(shares["all"][1:]) >= 0.40
    assert np.mean([shares[f"{name}.jsonl"][0] for name in PLACED]) >= 0.43


def weights_of(file) -> str:
    from slipstream.models.fingerprint import weights_fingerprint

    return weights_fingerprint(file.path)
