"""Quantised weights against their fp32 unpacking, stacked against single matrices, and the real model: bit for bit."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from native_beds import (
    Recoded,
    cache_of,
    logits_of,
    model,
    opened,
    random_tree,
    same_bits,
    target,
    tokens,
    tree_faults,
)
from slipstream.core.tree import chain
from slipstream.models.files import open_model
from slipstream.models.registry import ensure
from slipstream.models.tensor import Tensor
from slipstream.targets.base import RowInput
from slipstream.targets.native.model import NativeTarget

ALIGNED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_heads": 4}
MIXED = {"": "Q4_0", "v_proj": "Q8_0", "up_proj": "Q5_1", "lm_head": "Q8_0", "embed_tokens": "Q4_1"}


def results(subject):
    """Logits of a tree after a prompt, and the cache."""
    slot = opened(subject, tokens(140, 1))
    out = subject.forward([RowInput(slot, 3, random_tree(8, 2))]).logits[0]
    return out, cache_of(subject, slot)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "mixed"])
def test_packed_weights_equal_their_unpacked_ones(kind):
    """Mixed types take the way of matrices that cannot be stacked."""
    file = model(kind=MIXED if kind == "mixed" else kind, **ALIGNED)
    subject = NativeTarget.load(file, slots=2)
    plain = NativeTarget.load(Recoded(file, "F32"), slots=2)
    for ours, theirs in zip(results(subject), results(plain), strict=True):
        assert same_bits(ours, theirs)
    assert subject.weights_bytes < 0.8 * plain.weights_bytes


def test_planted_change_of_one_weight_is_seen():
    """The comparison above notices a single block that was unpacked wrongly."""

    class Off(Recoded):
        def tensor(self, name):
            found = super().tensor(name)
            if not name.endswith("1.mlp.up_proj.weight"):
                return found
            values = found.float32()
            values[5, 7] = np.nextafter(values[5, 7], np.float32(9))
            return Tensor("F32", values.shape, values.view(np.uint8))

    file = model(kind="Q8_0", **ALIGNED)
    subject, off = NativeTarget.load(file, slots=2), NativeTarget.load(Off(file, "F32"), slots=2)
    assert not same_bits(results(subject)[0], results(off)[0])


def in_two_threads(run) -> None:
    """run(0) and run(1) at the same time."""
    workers = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def test_two_targets_in_two_threads_do_not_disturb_each_other():
    """They share the thread pool: whoever finds it taken computes alone, with the same bits."""
    subjects = [target("llama"), target("qwen2")]
    expected = [logits_of(subject, tokens(150, 1), random_tree(6, 1)) for subject in subjects]
    seen: list[list[np.ndarray]] = [[], []]

    def run(index: int) -> None:
        for _ in range(30):
            seen[index].append(logits_of(subjects[index], tokens(150, 1), random_tree(6, 1)))

    in_two_threads(run)
    for index in range(2):
        assert len(seen[index]) == 30
        assert all(same_bits(logits, expected[index]) for logits in seen[index])


@pytest.fixture(scope="module")
def smollm2():
    file = open_model(ensure("smollm2"))
    return file, NativeTarget.load(file, max_context=1024, slots=4)


def prompt_of(file, text: str) -> list[int]:
    return file.tokenizer().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_smollm2_answers(smollm2):
    file, subject = smollm2
    prompt = prompt_of(file, "What is the capital of France?")
    answer: list[int] = []
    slot = opened(subject, prompt[:-1])
    while not set(answer) & set(file.config.end_ids) and len(answer) < 20:
        last = (prompt + answer)[-1]
        answer.append(int(subject.forward([RowInput(slot, last)]).logits[0][0].argmax()))
        subject.commit([[]])
    subject.close(slot)
    assert "Paris" in file.tokenizer().decode(answer)


@pytest.mark.model
def test_smollm2_trees_and_chains_equal_plain_decoding(smollm2):
    file, subject = smollm2
    prompt = prompt_of(file, "Write one sentence about each month of the year, from January to December.") * 6
    assert len(prompt) > 128
    assert tree_faults(subject, prompt[:127], random_tree(6, 1, 40000)) == []
    plain = [logits_of(subject, prompt[: 100 + i])[0] for i in range(0, 32, 8)]
    drafted = logits_of(subject, prompt[:100], chain(prompt[100:131]))
    assert all(same_bits(drafted[8 * i], row) for i, row in enumerate(plain))


@pytest.mark.model
def test_a_second_pass_at_the_same_time_is_refused(smollm2):
    """Two threads on one target: whoever comes second gets an error, nobody ever another request's numbers."""
    _, subject = smollm2
    slots = [opened(subject, [1, 2]), opened(subject, [3, 4, 5])]
    expected = [subject.forward([RowInput(slot, 6)]).logits[0] for slot in slots]
    refused, wrong = [0, 0], [0, 0]

    def run(index: int) -> None:
        for _ in range(60):
            try:
                logits = subject.forward([RowInput(slots[index], 6)]).logits[0]
            except RuntimeError as error:
                refused[index] += "already running a pass" in str(error)
            else:
                wrong[index] += not same_bits(logits, expected[index])

    in_two_threads(run)
    assert 0 < sum(refused) < 120
    assert wrong == [0, 0]
    for slot in slots:
        subject.close(slot)


@pytest.mark.model
@pytest.mark.full
def test_smollm2_equals_its_fp32_unpacking(smollm2):
    """The GGUF file against the same weights in fp32: logits of 30 rows, every bit."""
    file, subject = smollm2
    plain = NativeTarget.load(Recoded(file, "F32"), max_context=1024, slots=1)
    prompt = prompt_of(file, "Explain why the sky is blue.")
    draft = random_tree(29, 3, 40000)
    assert same_bits(logits_of(subject, prompt, draft), logits_of(plain, prompt, draft))
    assert plain.weights_bytes > 5 * subject.weights_bytes
