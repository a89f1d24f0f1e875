"""What an answer must look like, as masks over tokens: JSON schemas, patterns, choices and grammars by llguidance.

A grammar is compiled once per model and form; each row has its own matcher, which follows the committed tokens. For a
node of the draft tree it reads the node's path and goes back again: history at a node = committed output + ancestors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import InputError, UnsupportedError, install_hint
from slipstream.core.tree import ANCHOR

if TYPE_CHECKING:
    from slipstream.core.structured import StructuredOutputs

Mask = NDArray[np.bool_]

BLANKS = r"[ \t\n\r]{1,32}"
"""White space between the parts of a JSON text unless the request says otherwise: any, but not for ever."""
KEPT = 64
"""Compiled grammars that stay for the next request that asks for the same."""
PATTERN_FUEL, CHOICE_FUEL = 100_000, 1_000_000
"""Size of patterns, in steps of the library: a fraction of a second, where its own limit, which plain texts may use up,
allows repetitions that take many."""


class Tokens(Protocol):
    """What grammars need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of real tokens."""

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end an answer."""

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of stretches of text, each with whether control tokens are found in it."""

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token stands for; none for padding."""

    def is_control(self, index: int) -> bool:
        """True for tokens that are never part of the text."""


class _Bridge:
    """A tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokens, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        real = min(tokenizer.vocab_size, vocab_size)
        ends = set(tokenizer.end_ids)
        self.eos_token_id = min(ends)
        self.bos_token_id = None
        self.special_token_ids = [index for index in range(real) if index in ends or tokenizer.is_control(index)]
        self.tokens = [tokenizer.token_bytes(index) if index < real else b"" for index in range(vocab_size)]
        self.library: Any = None

    def __call__(self, text: str) -> list[int]:
        """Ids of a text in the middle of an answer; the library cannot bear an exception."""
        if not isinstance(text, str):
            raise TypeError("only texts are encoded")  # the library asks once, to know
        ids = self._tokenizer.encode_parts([(text, False)])
        data = text.encode()
        if b"".join(self.tokens[index] for index in ids) == data or self.library is None:
            return ids
        # A tokenizer that puts a space before every text; what is guessed from this may be less than the best.
        found: list[int] = self.library.greedy_tokenize(text)
        return found


class Grammars:
    """Compiles forms of answers for one model, when the first one is asked for. Safe to share between threads.

    vocab_size: width of the logits; ids without a token of their own are never allowed.
    """

    def __init__(self, tokenizer: Tokens, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._library: Any = None
        self._matchers: OrderedDict[StructuredOutputs, Any] = OrderedDict()

    def start(self, wanted: StructuredOutputs) -> TokenGrammar:
        """The grammar at its beginning, a new one for every row.

        Raises InputError when the form is malformed, contradicts itself or is too large; UnsupportedError without
        llguidance or for a model that has no end token.
        """
        with self._lock:
            self._library = self._library or self._open()
            matcher = self._matchers.get(wanted)
        # A form that is slow to compile holds up nobody else.
        matcher = matcher or self._compile(wanted)
        with self._lock:
            self._matchers[wanted] = matcher
            self._matchers.move_to_end(wanted)
            if len(self._matchers) > KEPT:
                self._matchers.popitem(last=False)
        return TokenGrammar(matcher.deep_copy(), self._vocab_size, self._tokenizer.end_ids)

    def _compile(self, wanted: StructuredOutputs) -> Any:
        import llguidance

        library = self._library
        try:
            grammar = _grammar(wanted)
        except ValueError as error:
            raise _refused(wanted, str(error)) from None
        fuel = CHOICE_FUEL if wanted.kind == "choice" else PATTERN_FUEL
        limits = llguidance.LLParserLimits(initial_lexer_fuel=fuel, verbose_errors=False)
        wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, library, limits=limits)
        if wrong:
            raise _refused(wanted, messages[0])
        matcher = llguidance.LLMatcher(library, grammar, limits=limits, log_level=0)
        # The first token builds most of the automaton: what is too large shows here, before any work.
        probe = TokenGrammar(matcher.deep_copy(), self._vocab_size, self._tokenizer.end_ids)
        first = np.flatnonzero(probe.allowed(()))[:1].tolist()
        if not first:
            raise _refused(wanted, f"nothing fits it ({probe.error or matcher.stop_reason()})")
        probe.append(first)
        if not probe.allowed(()).any():
            raise _refused(wanted, probe.error or "nothing fits it")
        return matcher

    def _open(self) -> Any:
        try:
            import llguidance
        except ImportError:
            raise UnsupportedError(f"structured outputs need llguidance: {install_hint('serve')}") from None
        if not self._tokenizer.end_ids:
            raise UnsupportedError("structured outputs need an end token, and this model's vocabulary names none")
        bridge = _Bridge(self._tokenizer, self._vocab_size)
        wrapped: Any = llguidance.TokenizerWrapper(bridge)
        ends = sorted(self._tokenizer.end_ids)
        bridge.library = llguidance.LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=ends)
        return bridge.library


class TokenGrammar:
    """The grammar of one row, at its committed output. Implements the `Grammar` protocol of `sampling/processors.py`.

    After an end token only end tokens may follow, and they may come before it only where the grammar accepts.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        self._matcher, self._vocab_size, self._end_ids = matcher, vocab_size, frozenset(end_ids)
        self._below: list[int] = []
        """Tokens beyond the committed ones that the matcher has read."""
        self._masks: dict[tuple[int, ...], Mask] = {}
        self._ended = False
        self._error = ""

    @property
    def error(self) -> str:
        """Why nothing is allowed any more; empty while all is well."""
        return self._error or self._failure()

    def allowed(self, path: Sequence[int]) -> Mask:
        """Mask [vocab] of tokens that may follow; all False below a forbidden token, and after a failure."""
        key = tuple(path)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self._mask(key)
        return mask

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the committed output."""
        before_end = self._before_end(tokens)
        if not self._ended and not self._read(before_end):
            self._error = self._failure() or f"the answer left its grammar at token {tokens[len(self._below)]}"
        self._ended = self._ended or len(before_end) < len(tokens)
        self._below.clear()
        self._masks.clear()

    def forced(self) -> list[int]:
        """Tokens that spell the text which must come next, as the tokenizer would; a guess of tokens, not of text."""
        if self._ended or self.error or not self._read(()):
            return []
        found: list[int] = self._matcher.compute_ff_tokens()
        return found

    def fitting(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a tree (as in Draft) may be accepted as far as is known cheaply, parents before children.

        Right after the committed output that is the mask itself; below, it is what the matcher can read.
        """
        fits: list[bool] = []
        first = self.allowed(())
        paths: dict[int, tuple[int, ...]] = {ANCHOR: ()}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = paths.get(parent)
            if above is None:
                fits.append(False)
                continue
            path = (*above, token)
            if token in self._end_ids:
                fits.append(bool(self.allowed(above)[token]))
                continue
            good = bool(first[token]) if parent == ANCHOR else self._read(path)
            fits.append(good)
            if good:
                paths[node] = path
        return fits

    def _mask(self, path: tuple[int, ...]) -> Mask:
        before_end = self._before_end(path)
        if self._ended or len(before_end) < len(path):
            reached = self._ended or (self._read(before_end) and self._matcher.is_accepting())
            return self._only_ends() if reached else np.zeros(self._vocab_size, np.bool_)
        if self.error or not self._read(path):
            return np.zeros(self._vocab_size, np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self.error:
            return np.zeros(self._vocab_size, np.bool_)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _only_ends(self) -> Mask:
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[[end for end in self._end_ids if end < self._vocab_size]] = True
        return mask

    def _before_end(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens up to the first end token."""
        end = next((place for place, token in enumerate(tokens) if token in self._end_ids), len(tokens))
        return tokens[:end]

    def _read(self, path: Sequence[int]) -> bool:
        """Bring the matcher to the node below `path`; False when the path leaves the grammar."""
        shared = 0
        for mine, given in zip(self._below, path, strict=False):
            if mine != given:
                break
            shared += 1
        if len(self._below) > shared:
            self._matcher.rollback(len(self._below) - shared)
            del self._below[shared:]
        if len(path) > shared:
            rest = list(path[shared:])
            self._below += rest[: self._matcher.try_consume_tokens(rest)]
        return len(self._below) == len(path)

    def _failure(self) -> str:
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


def _grammar(wanted: StructuredOutputs) -> str:
    """In llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(str(wanted.regex))
    if wanted.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_literal, wanted.choice or ())))
    if wanted.kind == "grammar":
        return grammar_from("grammar", str(wanted.grammar))
    schema = str(wanted.json) if wanted.kind == "json" else '{"type": "object"}'
    if wanted.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    blanks = wanted.whitespace_pattern or BLANKS
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": blanks})


def _literal(text: str) -> str:
    """The pattern that matches this text and no other."""
    return "".join(letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


def _first_line(message: str) -> str:
    """One line of what the library says, which may be a page."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines() if line.strip()]
    return " ".join(lines)[:300]


def _refused(wanted: StructuredOutputs, reason: str) -> InputError:
    return InputError(f"structured_outputs {wanted.kind} cannot be used: {_first_line(reason)}")
