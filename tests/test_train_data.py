"""Data of training: prompts, answers that the target writes, their features, what is held out, the draft vocabulary."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from model_files import write_folder
from slipstream.core.errors import InputError
from slipstream.models.files import open_model
from slipstream.targets.native.model import NativeTarget
from slipstream.train.answers import Author, Settings, prompt_key, read_prompts, write_answers
from slipstream.train.data import HELD_OUT, batches, draft_vocabulary, in_order, read_answers, split
from slipstream.train.features import FeatureStore, compute_missing, sequence_key
from slipstream.train.prompts import grammar, make_prompts
from slipstream.train.shelf import Shelf

DATA = Path(os.environ.get("SLIPSTREAM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
LAYERS = (0, 1, 2)
MODEL = {"model": "tiny", "tokenizer": "t"}
SHORT = Settings(max_tokens=12, max_batch=4)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return open_model(write_folder(tmp_path_factory.mktemp("tiny")))


def conversations(count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"hello world {'the ' * (number % 7)}{number}"}] for number in range(count)]


def author(file, store: FeatureStore | None = None) -> Author:
    return Author(NativeTarget.load(file, slots=12, features=LAYERS), file, 4, store)


def store_in(folder: Path, file, layers: tuple[int, ...] = LAYERS) -> FeatureStore:
    return FeatureStore(folder, {"weights": "w", "layers": list(layers)}, len(layers) * file.config.hidden_size)


def write(file, out: Path, count: int, store: FeatureStore | None = None) -> list[str]:
    write_answers(author(file, store), conversations(count), out, MODEL, SHORT)
    return out.read_text().splitlines()


def test_prompts_are_varied_and_the_same_for_a_seed():
    first, again, other = make_prompts(600), make_prompts(600), make_prompts(600, seed=1)
    assert first == again
    assert len(set(first)) == 600
    assert len(set(first) & set(other)) < 200
    assert not [prompt for prompt in first if re.search(r"\{\w+\}", prompt)]
    assert len(grammar()[1]) >= 10


def test_prompts_are_none_of_the_evaluation_rows():
    if not DATA.exists():
        pytest.skip("the evaluation rows are not on this machine")
    rows = [json.loads(line) for line in (DATA / "spec_bench.jsonl").read_text().splitlines()]
    texts = {turn.strip().lower().rstrip("?. ") for row in rows for turn in row["turns"]}
    for name, key in (("gsm8k_test.jsonl", "question"), ("humaneval.jsonl", "prompt")):
        texts |= {
            json.loads(line)[key].strip().lower().rstrip("?. ") for line in (DATA / name).read_text().splitlines()
        }
    made = {prompt.strip().lower().rstrip("?. ") for prompt in make_prompts(8000)}
    assert not made & texts


def test_answers_are_resumed_after_a_kill(file, tmp_path):
    whole = write(file, tmp_path / "whole.jsonl", 11)
    assert len(whole) == 12
    out = tmp_path / "killed.jsonl"
    write(file, out, 5)
    out.write_text(out.read_text() + whole[-1][:40])  # a line torn by a kill
    assert sorted(write(file, out, 11)) == sorted(whole)
    assert write(file, out, 11) == out.read_text().splitlines()
    with pytest.raises(InputError, match="begun by tiny"):
        write_answers(author(file), conversations(2), out, {"model": "other"}, Settings(max_tokens=4))


def test_a_limit_begins_no_more_answers_and_the_rest_follow(file, tmp_path):
    """Groups of four: what is begun is finished, what is not waits for the next run."""
    whole, out = write(file, tmp_path / "whole.jsonl", 40), tmp_path / "limited.jsonl"
    turns = iter(range(100))
    found = write_answers(author(file), conversations(40), out, MODEL, SHORT, enough=lambda: next(turns) >= 3)
    assert found.done == 12
    assert out.read_text().splitlines() == whole[:13]
    assert write(file, out, 40) == whole


def test_recorded_features_equal_those_computed(file, tmp_path):
    """Answers share prefixes and run in one batch; what is kept is what reading each of them alone gives."""
    out = tmp_path / "a.jsonl"
    with store_in(tmp_path / "recorded", file) as store, store_in(tmp_path / "computed", file) as other:
        write(file, out, 12, store)
        rows = [example.tokens.tolist() for example in read_answers([out], 300, "t")]
        assert all(sequence_key(tokens) in store for tokens in rows)
        compute_missing(other, NativeTarget.load(file, slots=1, features=LAYERS), rows)
        one, two = store.reader(), other.reader()
        for tokens in rows:
            assert np.array_equal(one(sequence_key(tokens)), two(sequence_key(tokens)))
            assert len(one(sequence_key(tokens))) == len(tokens) - 1


def test_features_survive_a_kill_and_refuse_other_weights(file, tmp_path):
    store = store_in(tmp_path / "f", file)
    store.add([1, 2, 3], np.ones((2, store.width)))
    store.close()
    with (tmp_path / "f" / "features.f16").open("ab") as data:
        data.write(b"torn")
    with (tmp_path / "f" / "index.jsonl").open("a") as index:
        index.write('{"key": "x", "sta')
    with store_in(tmp_path / "f", file) as again:
        again.add([4, 5], np.full((1, store.width), 2.0))
        read = again.reader()
        assert (read(sequence_key([1, 2, 3])) == 1).all()
        assert (read(sequence_key([4, 5])) == 2).all()
    with pytest.raises(InputError, match="other weights or layers"):
        FeatureStore(tmp_path / "f", {"weights": "v", "layers": list(LAYERS)}, store.width)


def test_a_shelf_reads_some_layers_of_folders_with_more(file, tmp_path):
    first = store_in(tmp_path / "a.features", file)
    hidden = file.config.hidden_size
    first.add([1, 2], np.repeat(np.arange(3.0), hidden)[None])
    first.close()
    shelf = Shelf([tmp_path / "b.features", tmp_path / "a.features"], "w", (1, 2), hidden)
    assert sequence_key([1, 2]) in shelf
    shelf.fill([[1, 2], [3, 4, 5]], lambda layers: NativeTarget.load(file, slots=1, features=layers), lambda *_: None)
    read = shelf.reader((2, 1))
    assert read(sequence_key([1, 2])).tolist() == [[2.0] * hidden + [1.0] * hidden]
    assert read(sequence_key([3, 4, 5])).shape == (2, 2 * hidden)
    shelf.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not JSON"),
        ("[1]", "line 3 is no object"),
        ('{"token_ids": [1]}', "line 3: prompt_token_ids must be"),
        ('{"prompt_token_ids": [1], "token_ids": [1.5]}', "line 3: token_ids must be"),
        ('{"prompt_token_ids": [1], "token_ids": [999]}', "line 3: token_ids holds 999"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    good = json.dumps({"key": "1", "prompt_token_ids": [1, 2], "token_ids": [3]})
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([json.dumps({"slipstream_answers": 1, **MODEL}), good, line]))
    with pytest.raises(InputError, match=message):
        read_answers([path], 300, "t")


def test_what_teaches_nothing_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(InputError, match=r"p\.jsonl holds no rows"):
        read_prompts([tmp_path / "p.jsonl"])
    with pytest.raises(InputError, match="2 or more"):
        Settings(max_tokens=1)


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    with pytest.raises(InputError, match=r"cannot read .*x\.jsonl"):
        read_answers([path], 300, "t")
    path.write_text("")
    with pytest.raises(InputError, match="is empty"):
        read_answers([path], 300, "t")
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(InputError, match="no header"):
        read_answers([path], 300, "t")
    path.write_text(json.dumps({"slipstream_answers": 1, **MODEL}) + "\n")
    with pytest.raises(InputError, match="other tokens"):
        read_answers([path], 300, "another")
    path.write_text('{"question": "a"}\n{"text": "a"}\n')
    with pytest.raises(InputError, match="line 2 needs messages"):
        read_prompts([path])


def test_held_out_rows_do_not_depend_on_the_others(file, tmp_path):
    out = tmp_path / "a.jsonl"
    write(file, out, 3)
    examples = read_answers([out], 300, "t")
    many = [type(each)(f"{number:x}", each.tokens, each.prompt, True) for number in range(900) for each in examples[:1]]
    train, held = split(many)
    assert abs(len(held) - 900 / HELD_OUT) < 20
    some_train, some_held = split(many[:450])
    assert {each.key for each in some_train} <= {each.key for each in train}
    assert {each.key for each in some_held} <= {each.key for each in held}


def test_the_draft_vocabulary_is_the_most_frequent_ids(file, tmp_path):
    out = tmp_path / "a.jsonl"
    write(file, out, 6)
    examples = read_answers([out], 300, "t")
    counts = np.bincount(np.concatenate([each.tokens[each.prompt :] for each in examples]), minlength=300)
    ids = draft_vocabulary(examples, 20, 300, [299])
    assert len(ids) == 20
    assert (np.diff(ids) > 0).all()
    assert 299 in ids
    assert counts[ids[ids != 299]].min() >= np.delete(counts, ids).max()
    with pytest.raises(InputError, match="from 1 to 300"):
        draft_vocabulary(examples, 301, 300, [299])


def test_batches_hold_every_row_once_in_an_order_fixed_by_the_seed(file, tmp_path):
    out = tmp_path / "a.jsonl"
    write(file, out, 12)
    examples = read_answers([out], 300, "t")
    made = batches(examples, 30, seed=1, epoch=0)
    assert sorted(index for batch in made for index in batch) == list(range(12))
    assert made == batches(examples, 30, seed=1, epoch=0)
    assert made != batches(examples, 30, seed=1, epoch=1)
    assert all(sum(examples[index].answer for index in batch) <= 30 or len(batch) == 1 for batch in made)
    order = in_order(examples, 30, 1, 0)
    first = [next(order) for _ in range(3 * len(made))]
    resumed = in_order(examples, 30, 1, 7)
    assert [next(resumed) for _ in range(5)] == first[7:12]


def test_keys_of_prompts_are_of_their_content():
    assert prompt_key([{"role": "user", "content": "a"}]) == prompt_key([{"content": "a", "role": "user"}])
    assert prompt_key([{"role": "user", "content": "a"}]) != prompt_key([{"role": "user", "content": "b"}])
