"""Token ids and bytes: equal to llama.cpp's, exact to the byte, control tokens only where they are meant."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from model_files import CONTROLS, tokenizer_json, vocabulary, write_folder, write_gguf
from slipstream.core.errors import InputError, ModelError, UnsupportedError
from slipstream.models import registry
from slipstream.models.files import open_model
from slipstream.models.pretokenizers import STEPS, pre_tokenizer
from slipstream.models.sentencepiece import SPACE, SentencePieceBPE
from slipstream.models.special_texts import SpecialTexts
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.tokenizer_sources import byte_level_bytes

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "tokenizer_golden.json").read_text())
SPM = json.loads((DATA / "sentencepiece_vocabulary.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tokenizer:
    return open_model(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")).tokenizer()


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    return open_model(write_sentencepiece(path)).tokenizer()


def write_sentencepiece(path: Path, scores: list[float] | None = None, tokens: list[str] | None = None) -> Path:
    extra = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores or SPM["scores"],
        "tokenizer.ggml.token_type": SPM["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    drop = ("tokenizer.ggml.merges", "tokenizer.ggml.pre")
    return write_gguf(path, extra=extra, tokens=tokens or SPM["tokens"], drop=drop)


def differences(tokenizer: Tokenizer, expected: list[list[list[int]] | None]) -> list[str]:
    """Texts whose ids are not the expected ones, with special tokens parsed or not."""
    wrong = []
    for text, ids in zip(GOLDEN["texts"], expected, strict=True):
        if ids is not None:
            got = [tokenizer.encode(text), tokenizer.encode(text, parse_special=False)]
            if got != [ids[0], ids[-1]]:
                wrong.append(text)
    return wrong


@pytest.mark.model
def test_ids_equal_llama_cpp_on_smollm2():
    tokenizer = open_model(registry.ensure("smollm2", quiet=True)).tokenizer()
    assert differences(tokenizer, GOLDEN["ids"]["smollm2"]) == []
    for text in GOLDEN["texts"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.model
@pytest.mark.full
def test_ids_equal_llama_cpp_on_qwen():
    tokenizer = open_model(registry.ensure("qwen2.5-coder-0.5b", quiet=True)).tokenizer()
    assert differences(tokenizer, GOLDEN["ids"]["qwen2.5-coder-0.5b"]) == []
    larger = open_model(registry.ensure("qwen2.5-coder-1.5b", quiet=True)).tokenizer()
    assert tokenizer.fingerprint() == larger.fingerprint()
    assert tokenizer.vocab_size == 151665
    assert tokenizer.token_bytes(151700) == b""


def test_ids_equal_llama_cpp_on_sentencepiece(pieces):
    assert differences(pieces, GOLDEN["ids"]["sentencepiece"]) == []
    for text in filter(None, GOLDEN["texts"]):
        assert pieces.decode(pieces.encode(text, parse_special=False), skip_special=False) == " " + text


@pytest.mark.model
def test_planted_wrong_splitting_rule_is_seen():
    model = open_model(registry.ensure("smollm2", quiet=True))
    model.file.metadata["tokenizer.ggml.pre"] = "gpt-2"  # digits then take the space before them
    assert "x =  3 +    40" in differences(model.tokenizer(), GOLDEN["ids"]["smollm2"])


def test_planted_merging_by_rank_of_the_left_piece_is_seen(tmp_path):
    tokenizer = open_model(write_sentencepiece(tmp_path / "m.gguf", scores=SPM["scores"][::-1])).tokenizer()
    assert differences(tokenizer, GOLDEN["ids"]["sentencepiece"])


SPLITS = {
    "gpt-2": ["I", "'m", " 1234", " x", "+=", "  ", " y", "\n", "\n", "'", "LL"],
    "smollm": ["I", "'m", " ", "1", "2", "3", "4", " x", "+=", "  ", " y", "\n", "\n", "'", "LL"],
    "llama-bpe": ["I", "'m", " ", "123", "4", " x", "+=", "  ", " y", "\n\n", "'LL"],
    "qwen2": ["I", "'m", " ", "1", "2", "3", "4", " x", "+=", "  ", " y", "\n\n", "'LL"],
    "tekken": ["I", "'m", " ", "1", "2", "3", "4", " x", "+=", "  ", " y", "\n\n", "'LL"],
    "default": ["I", "'", "m", " ", "123", "4", " x", "+=", "  ", " y", "\n\n", "'", "LL"],
}


@pytest.mark.parametrize("rule", SPLITS)
def test_splitting_rules(rule):
    splits = pre_tokenizer(rule, "m.gguf").pre_tokenize_str("I'm 1234 x+=   y\n\n'LL")
    assert [byte_level_bytes(piece).decode() for piece, _ in splits] == SPLITS[rule]


@pytest.mark.parametrize("rule", STEPS)
def test_every_rule_keeps_every_byte(rule):
    text = "".join(text for text in GOLDEN["texts"])
    splits = pre_tokenizer(rule, "m.gguf").pre_tokenize_str(text)
    assert b"".join(byte_level_bytes(piece) for piece, _ in splits) == text.encode()


def test_unknown_splitting_rule_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra={"tokenizer.ggml.pre": "new-rule"})
    with pytest.raises(UnsupportedError, match="'new-rule'"):
        open_model(path).tokenizer()


def test_unknown_tokenizer_model_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra={"tokenizer.ggml.model": "bert"})
    with pytest.raises(UnsupportedError, match="'bert'"):
        open_model(path).tokenizer()


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_decode_undoes_encode(tiny, text):
    assert tiny.decode(tiny.encode(text, parse_special=False), skip_special=False) == text


@given(text=st.text(alphabet="ab▁ \tcÄ😀", max_size=24))
def test_sentencepiece_merges_as_the_plain_rule_says(text):
    """Against the rule applied literally: join the best pair, leftmost on ties, until none is left."""
    merged = ["ab", "abc", "▁a", "▁ab", "▁▁", "▁▁▁", "aa", "aaa", "ba", "bb", "bbb", "Äa", "b▁a", "ca"]
    letters = ["a", "b", "c", "▁", "Ä", "\t"]
    ids = {piece: index for index, piece in enumerate([*merged, *letters])}
    scores = [-float(index // 2) for index in range(len(ids))]  # with ties

    def plainly() -> list[int]:
        parts = list(SPACE + text.replace(" ", SPACE))
        while True:
            pairs = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
            if not pairs:
                break
            at = -max(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [index for part in parts for index in ([ids[part]] if part in ids else [100 + b for b in part.encode()])]

    byte_ids = [100 + byte for byte in range(256)]
    assert SentencePieceBPE(ids, scores, byte_ids, space_prefix=True).encode(text) == plainly()


def test_special_tokens_are_parsed_only_when_asked_for(tiny):
    text = "a<|im_end|>b"
    end = tiny.special_texts["<|im_end|>"]
    assert tiny.encode(text) == [*tiny.encode("a"), end, *tiny.encode("b")]
    plain = tiny.encode(text, parse_special=False)
    assert end not in plain
    assert not any(map(tiny.is_control, plain))
    assert tiny.decode(plain) == text
    assert tiny.decode(tiny.encode(text)) == "ab"
    assert tiny.decode(tiny.encode(text), skip_special=False) == text


def test_parts_are_joined_before_they_are_split_into_words(tiny):
    assert tiny.encode_parts([("hel", True), ("lo", False)]) == tiny.encode("hello")
    assert tiny.encode_parts([("<|im_", True), ("end|>", True)]) == tiny.encode("<|im_end|>", parse_special=False)


def test_the_longest_special_text_wins(tmp_path):
    tokens = [*vocabulary(), "<a>", "<a><b>"]
    types = [3] * 3 + [1] * (len(vocabulary()) - 3) + [4, 4]
    tokenizer = open_model(
        write_gguf(tmp_path / "m.gguf", tokens=tokens, extra={"tokenizer.ggml.token_type": types})
    ).tokenizer()
    assert tokenizer.encode("<a><b>", parse_special=False) == [len(tokens) - 1]
    assert not tokenizer.is_control(len(tokens) - 1)


def test_special_tokens_that_swallow_white_space(tmp_path):
    folder = write_folder(tmp_path / "hf")
    added = tokenizer_json()["added_tokens"]
    added[0]["lstrip"], added[1]["rstrip"] = True, True
    tokenizer = rewrite(folder, added_tokens=added)
    text = "a  <|endoftext|> b <|im_start|>  c <|im_end|>"
    reference = Library.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text) == reference.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == "a<|endoftext|> b <|im_start|>c <|im_end|>"


@given(text=st.text(alphabet="<ab>| ", max_size=30))
def test_special_texts_are_found_leftmost_and_longest(text):
    texts = ["<a>", "<a><b>", "<", "ab|", "b"]
    pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    expected = [(match[0], match.start(), match.end()) for match in pattern.finditer(text)]
    assert list(SpecialTexts(texts).find(text)) == expected


def test_thousands_of_special_tokens_do_not_slow_plain_text_down(tmp_path):
    tokens = [*vocabulary(), *(f"<control_{number}>" for number in range(4000))]
    types = [3] * 3 + [1] * (len(vocabulary()) - 3) + [3] * 4000
    path = write_gguf(tmp_path / "m.gguf", tokens=tokens, extra={"tokenizer.ggml.token_type": types})
    tokenizer = open_model(path).tokenizer()
    start = time.perf_counter()
    assert tokenizer.encode("<p>hello</p> " * 2000 + "<control_3999>")[-1] == len(tokens) - 1
    assert time.perf_counter() - start < 5  # trying each of them at each place takes a minute


@pytest.mark.parametrize(("setting", "expected"), [(True, [0]), (False, []), (None, [])])
def test_bos_only_where_the_settings_say_so(tmp_path, setting, expected):
    extra = {} if setting is None else {"tokenizer.ggml.add_bos_token": setting}
    tokenizer = open_model(write_gguf(tmp_path / "m.gguf", extra=extra)).tokenizer()
    assert tokenizer.encode("a", add_special=True) == [*expected, *tokenizer.encode("a")]


def test_bytes_of_tokens(tiny, pieces):
    assert tiny.token_bytes(tiny.encode("é")[0]) == b"\xc3"
    assert tiny.token_text(tiny.encode("é")[0]) == "�"
    assert tiny.token_bytes(len(vocabulary())) == b""
    assert tiny.token_bytes(0) == CONTROLS[0].encode()
    with pytest.raises(InputError, match="-1"):
        tiny.token_bytes(-1)
    assert pieces.token_bytes(SPM["tokens"].index("<0x0A>")) == b"\n"
    assert pieces.token_bytes(SPM["tokens"].index("▁")) == b" "


def test_a_lone_surrogate_is_an_input_error(tiny, pieces):
    for tokenizer in (tiny, pieces):
        with pytest.raises(InputError, match="surrogate"):
            tokenizer.encode("a\ud800b")


def test_fault_14_vocabularies_compare_by_their_bytes(tmp_path, tiny):
    folder = open_model(write_folder(tmp_path / "hf")).tokenizer()
    assert folder.fingerprint() == tiny.fingerprint()
    padded = open_model(write_gguf(tmp_path / "padded.gguf", tokens=[*vocabulary(), "[PAD272]", "[PAD273]"]))
    assert padded.tokenizer().fingerprint() == tiny.fingerprint()
    assert (padded.config.vocab_size, padded.config.token_count) == (len(vocabulary()) + 2, len(vocabulary()))
    description = tokenizer_json()
    description["model"]["vocab"] |= {f"[PAD{index}]": index for index in (272, 273)}  # a copy of such a file
    assert rewrite(tmp_path / "hf", **description).fingerprint() == tiny.fingerprint()
    swapped = vocabulary()
    swapped[10], swapped[11] = swapped[11], swapped[10]
    other = open_model(write_gguf(tmp_path / "other.gguf", tokens=swapped)).tokenizer()
    assert other.fingerprint() != tiny.fingerprint()


def test_tokenizer_json_gives_the_same_ids(tmp_path, tiny):
    folder = open_model(write_folder(tmp_path / "hf")).tokenizer()
    for text in GOLDEN["texts"]:
        for parse in (True, False):
            ids = folder.encode(text, parse_special=parse)
            assert ids == tiny.encode(text, parse_special=parse)
            assert folder.decode(ids, skip_special=False) == text


def rewrite(folder: Path, **changes) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json() | changes))
    return open_model(folder).tokenizer()


def test_tokenizer_json_post_processor_decides_on_bos(tmp_path):
    folder = write_folder(tmp_path / "hf")
    template = [{"SpecialToken": {"id": CONTROLS[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {
        "type": "TemplateProcessing", "single": template, "pair": template,
        "special_tokens": {CONTROLS[0]: {"id": CONTROLS[0], "ids": [0], "tokens": [CONTROLS[0]]}},
    }  # fmt: skip
    tokenizer = rewrite(folder, post_processor=processor)
    assert tokenizer.encode("a", add_special=True) == [0, *tokenizer.encode("a")]
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = open_model(folder).tokenizer()
    assert tokenizer.encode("a", add_special=True) == tokenizer.encode("a")


def sentencepiece_json() -> dict[str, object]:
    """A tokenizer.json in the style of Llama 2: metaspace at the beginning only, byte fallback."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    added = [entry | {"content": text} for entry, text in zip(tokenizer_json()["added_tokens"], texts, strict=False)]
    model = tokenizer_json()["model"] | {
        "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True,
        "vocab": {text: index for index, text in enumerate(texts)}, "merges": ["▁ a"],
    }  # fmt: skip
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, space]}
    return {"added_tokens": added, "model": model, "pre_tokenizer": space, "decoder": decoder}


def test_tokenizer_json_of_sentencepiece_style(tmp_path):
    folder = write_folder(tmp_path / "hf", vocab_size=263)
    tokenizer = rewrite(folder, **sentencepiece_json())
    assert [tokenizer.token_text(index) for index in tokenizer.encode("a a\n</s>a")] == [" a", " a", "\n", "</s>", "a"]
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.end_ids == (2,)


def test_tokenizer_json_that_cannot_be_exact_is_refused(tmp_path):
    folder = write_folder(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="WordPiece"):
        rewrite(folder, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        rewrite(folder, model={"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]})
