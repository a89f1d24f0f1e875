"""Heads on disk: every format reads back what was written, value by value and flag by flag."""

from __future__ import annotations

import numpy as np
import pytest

import head_beds
from slipstream.models.heads.formats import read_head, write_head

FORMATS = {"eagle3": ("speculators", "eagle3"), "medusa": ("medusa",), "eagle1": ()}


def rows(ids):
    return np.random.default_rng(3).standard_normal((101, 48), np.float32)[ids]


def same(one, other):
    assert one.config == other.config
    assert np.array_equal(one.ids, other.ids)
    assert one.tensors.keys() == other.tensors.keys()
    for name, values in one.arrays().items():
        assert np.array_equal(values, other.arrays()[name]), name
    assert not other.unused


@pytest.mark.parametrize("storage", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", head_beds.KINDS)
def test_slipstream_format_keeps_everything(name, storage, tmp_path):
    head = head_beds.head(name, storage=storage)
    assert write_head(tmp_path / "head", head) == []
    same(head, read_head(tmp_path / "head"))


@pytest.mark.parametrize("name", head_beds.KINDS)
def test_foreign_formats_keep_everything(name, tmp_path):
    head = head_beds.head(name, storage="F16")
    for form in FORMATS[head.config.kind]:
        if form == "eagle3" and head.config.layers > 1:
            continue
        write_head(tmp_path / form, head, form, rows)
        same(head, read_head(tmp_path / form))
