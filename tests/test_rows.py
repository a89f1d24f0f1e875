"""Rows of prompts: every kind of line, and what is wrong with one."""

from __future__ import annotations

import json

import pytest

from slipstream.core.errors import InputError
from slipstream.core.rows import parse_row, read_rows

ASKED = [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"messages": ASKED, "prompt": "not this"}, ASKED),
        ({"turns": ["Why?", "And then?"]}, ASKED),
        ({"prompt": "Why?"}, "Why?"),
        ({"question": "Why?", "answer": "So."}, "Why?"),
        ({"prompt_token_ids": [3, 4]}, {"prompt_token_ids": [3, 4]}),
    ],
)
def test_every_kind_of_row(row, content):
    found = parse_row(json.dumps({**row, "category": "qa"}), "here")
    assert (found.content, found.category) == (content, "qa")
    if isinstance(content, dict):
        with pytest.raises(InputError, match="no conversation"):
            _ = found.messages
    else:
        assert found.messages == ASKED


def test_files_are_read_as_far_as_asked_for_and_errors_name_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n\r\n{"turns": []}\r\n', encoding="utf-8", newline="")
    assert [row.content for row in read_rows(path, 1)] == ["a\u2028b"]
    with pytest.raises(InputError, match=r"rows\.jsonl line 3 needs messages or turns"):
        read_rows(path)
    with pytest.raises(InputError, match="cannot read"):
        read_rows(tmp_path / "none.jsonl")
