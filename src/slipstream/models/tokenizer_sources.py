"""Tokenizers as the two file formats store them: tokenizer.ggml.* in GGUF, tokenizer.json in Hugging Face folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import ModelError, UnsupportedError
from slipstream.models.gguf_file import GGUFFile
from slipstream.models.pretokenizers import ADDS_BOS, IGNORE_MERGES, pre_tokenizer
from slipstream.models.sentencepiece import SPACE, SentencePieceBPE
from slipstream.models.tokenizer import PlainEncoder, Tokenizer, TokenizerParts
from slipstream.models.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, gguf_tokens, is_number

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

REMEMBERED = 1 << 14
"""Tokens whose bytes are kept at hand."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins: code point of the stand-in to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    table.update({256 + place: byte for place, byte in enumerate(b for b in range(256) if b not in table)})
    return table


_ALPHABET = _byte_alphabet()
_TABLE = {point: chr(byte) for point, byte in _ALPHABET.items()}


def byte_level_bytes(text: str) -> bytes:
    """Bytes of a token written in the byte-level alphabet; characters outside of it stand for themselves."""
    if all(ord(letter) in _ALPHABET for letter in text):
        return text.translate(_TABLE).encode("latin-1")
    return b"".join(
        bytes([_ALPHABET[ord(letter)]]) if ord(letter) in _ALPHABET else letter.encode("utf-8") for letter in text
    )


def sentencepiece_bytes(text: str) -> bytes:
    """Bytes of a SentencePiece token: `<0x0A>` is that byte, the lower block is a space."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(SPACE, " ").encode("utf-8")


def _bytes_of(texts: Sequence[str], literal: frozenset[int], convert: Callable[[str], bytes]) -> Callable[[int], bytes]:
    """Bytes of an id; special tokens stand for their text."""

    @lru_cache(maxsize=REMEMBERED)
    def bytes_of(index: int) -> bytes:
        return texts[index].encode("utf-8") if index in literal else convert(texts[index])

    return bytes_of


def tokenizer_from_gguf(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer a GGUF file describes. Raises ModelError, or UnsupportedError naming what is not supported."""
    return Tokenizer(_parts_from_gguf(file, vocabulary))


def tokenizer_from_folder(
    folder: Path, description: Mapping[str, Any], settings: Mapping[str, Any], vocabulary: Vocabulary
) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, from its parsed tokenizer.json (description) and tokenizer_config.json.

    Raises ModelError, or UnsupportedError naming what is not supported.
    """
    return Tokenizer(_parts_from_folder(folder, description, settings, vocabulary))


def _parts_from_gguf(file: GGUFFile, vocabulary: Vocabulary) -> TokenizerParts:
    tokens, types = gguf_tokens(file)
    ids = {text: index for index, text in reversed(list(enumerate(tokens)))}
    model = file.metadata.get("tokenizer.ggml.model")
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if model == "gpt2":
        encode, convert, bos_default = _gguf_bpe(file, ids, pre), byte_level_bytes, pre in ADDS_BOS
    elif model == "llama":
        encode, convert, bos_default = _gguf_sentencepiece(file, ids), sentencepiece_bytes, True
    else:
        raise UnsupportedError(
            f"{file.path}: tokenizer model {model!r} (tokenizer.ggml.model) is not supported; "
            "'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) are"
        )
    special = [index for index, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token", bos_default)
    adds_eos = file.metadata.get("tokenizer.ggml.add_eos_token", False)
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    return TokenizerParts(
        encode=encode,
        bytes_of=_bytes_of(tokens, frozenset(special), convert),
        vocabulary=vocabulary,
        specials={tokens[index]: index for index in reversed(special)},
        always=frozenset(tokens[index] for index in special if types[index] == USER_DEFINED),
        prefix=(vocabulary.bos_id,) if adds_bos is True and vocabulary.bos_id is not None else (),
        suffix=(eos,) if adds_eos is True and isinstance(eos, int) else (),
    )


def _gguf_bpe(file: GGUFFile, ids: dict[str, int], pre: Any) -> PlainEncoder:
    rule = pre_tokenizer(pre if isinstance(pre, str) else repr(pre), str(file.path))
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges[:1]):
        raise ModelError(f"{file.path}: tokenizer.ggml.merges is missing; the file is damaged, fetch it again")
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        library = Library(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre in IGNORE_MERGES))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path}: tokenizer.ggml.merges does not fit the tokens ({error})") from None
    library.pre_tokenizer = rule
    return _plain(library)


def _gguf_sentencepiece(file: GGUFFile, ids: dict[str, int]) -> PlainEncoder:
    scores = file.metadata.get("tokenizer.ggml.scores")
    count = len(file.metadata["tokenizer.ggml.tokens"])
    if not isinstance(scores, list) or len(scores) != count or not all(map(is_number, scores)):
        raise ModelError(f"{file.path}: tokenizer.ggml.scores does not match the {count} tokens; fetch the file again")
    byte_ids = [ids.get(f"<0x{byte:02X}>") for byte in range(256)]
    if None in byte_ids:
        missing = byte_ids.index(None)
        raise UnsupportedError(f"{file.path}: the vocabulary has no token <0x{missing:02X}>, byte fallback is needed")
    space_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    pieces = SentencePieceBPE(ids, scores, [index for index in byte_ids if index is not None], space_prefix)
    return lambda text, first: pieces.encode(text)


def _plain(library: Library, later: Library | None = None) -> PlainEncoder:
    """Encode with the library; `later` serves stretches that are not at the beginning, where that matters."""

    def encode(text: str, first: bool) -> Sequence[int]:
        chosen = library if first or later is None else later
        ids: list[int] = chosen.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _parts_from_folder(
    folder: Path, description: Mapping[str, Any], settings: Mapping[str, Any], vocabulary: Vocabulary
) -> TokenizerParts:
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{folder / 'tokenizer.json'}: damaged ({error}); fetch it again") from None
    library.no_truncation()
    library.no_padding()
    prefix, suffix = _around(library, settings, vocabulary)
    library.encode_special_tokens = True  # control tokens are found by Tokenizer, not by the library
    added = {entry["id"]: entry for entry in description.get("added_tokens") or ()}
    texts = [""] * vocabulary.token_count
    known = {index: text for text, index in library.get_vocab(with_added_tokens=False).items()}
    known |= {index: entry["content"] for index, entry in added.items()}
    for index, text in known.items():
        if index < len(texts):  # what comes after the last real token is padding
            texts[index] = text
    control = {index: entry for index, entry in added.items() if entry.get("special")}
    return TokenizerParts(
        encode=_plain(library, _without_prefix(description)),
        bytes_of=_bytes_of(texts, frozenset(added), _converter(description, folder)),
        vocabulary=vocabulary,
        specials={entry["content"]: index for index, entry in control.items()},
        takes_before=frozenset(entry["content"] for entry in control.values() if entry.get("lstrip")),
        takes_after=frozenset(entry["content"] for entry in control.values() if entry.get("rstrip")),
        prefix=prefix,
        suffix=suffix,
    )


def _around(
    library: Library, settings: Mapping[str, Any], vocabulary: Vocabulary
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids the post-processor puts before and after a text; `add_bos_token` of the settings has the last word."""
    probe = library.encode("a", add_special_tokens=False).ids
    full = library.encode("a", add_special_tokens=True).ids
    extra = len(full) - len(probe)
    start = next((at for at in range(extra + 1) if full[at : at + len(probe)] == probe), 0)
    prefix, suffix = tuple(full[:start]), tuple(full[start + len(probe) :])
    bos, wanted = vocabulary.bos_id, settings.get("add_bos_token")
    if bos is not None and wanted is True and bos not in prefix:
        prefix = (bos, *prefix)
    if wanted is False:
        prefix = tuple(index for index in prefix if index != bos)
    return prefix, suffix


def _steps(part: Any) -> list[dict[str, Any]]:
    """The members of a normalizer, pre-tokenizer or decoder description, sequences opened."""
    if not isinstance(part, dict):
        return []
    inner = part.get("pretokenizers") or part.get("decoders") or part.get("normalizers")
    return [step for member in inner for step in _steps(member)] if inner else [part]


def _converter(description: Mapping[str, Any], folder: Path) -> Callable[[str], bytes]:
    """The map from token text to bytes that the decoder implies."""
    kinds = {str(step.get("type")) for step in _steps(description.get("decoder"))}
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if kinds & {"Metaspace", "ByteFallback"}:
        return sentencepiece_bytes
    raise UnsupportedError(
        f"{folder / 'tokenizer.json'}: decoder {', '.join(sorted(kinds)) or 'none'} is not supported; "
        "byte-level BPE and SentencePiece-style decoders are"
    )


def _without_prefix(description: Mapping[str, Any]) -> Library | None:
    """A second tokenizer for text after a special token, where only the beginning of a text gets a space in front."""

    def is_first(step: Mapping[str, Any]) -> bool:
        return step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"

    if not any(map(is_first, _steps(description.get("pre_tokenizer")))):
        return None
    from tokenizers import Tokenizer as Library

    changed = json.loads(json.dumps(description))
    for step in filter(is_first, _steps(changed["pre_tokenizer"])):
        step["prepend_scheme"] = "never"
    library = Library.from_str(json.dumps(changed))
    library.encode_special_tokens = True
    return library
