"""Draws where the logits lie: the torch twin equals the sampler, and a step brings over nothing but tokens."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.core.params import SamplingParams
from slipstream.core.tree import Draft
from slipstream.core.types import Row
from slipstream.engine.ledger import Ledger
from slipstream.kernels import reference_sampling as reference
from slipstream.sampling import RowSampler
from slipstream.sampling import noise as noise_rule

torch_beds = pytest.importorskip("torch_beds", reason="needs torch: pip install 'slipstream[torch]'")
torch, VOCAB = torch_beds.torch, torch_beds.VOCAB

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from slipstream.sampling import device  # noqa: E402
from slipstream.targets.transformers.logits import Drawer, OnDevice, Rows  # noqa: E402
from slipstream.targets.transformers.model import TransformersTarget  # noqa: E402
from torch_beds import answers, engine_of, prompt  # noqa: E402

SETTINGS = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.5},
    "greedy, bias and bans": {"logit_bias": {5: 9.0, 7: -100.0}, "min_tokens": 6, "stop_token_ids": [3]},
    "sampled": {"temperature": 0.9},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 3.0},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "all cuts": {"temperature": 1.4, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    "all of it": {
        "temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4,
        "presence_penalty": 0.3, "logit_bias": {2: 1.5}, "min_tokens": 8,
    },
}  # fmt: skip
DRAFT = Draft([5, 6, 7, 5, 5, 9], [-1, -1, 1, 2, 3, 0])


def sampler(vocab: int, grammar=None, seed: int = 5, **params) -> RowSampler:
    made = RowSampler(SamplingParams(**params), seed, vocab, [4, 5, 6, 5], end_ids=[1, 2], grammar=grammar)
    made.append([5, 8, 5])
    return made


def both(subject: RowSampler, matrix: np.ndarray) -> tuple[list[int], list[int], list[bool], list[bool]]:
    """Tokens and near-ties of the twin and of the sampler itself, over the nodes of DRAFT."""
    paths = [[], *(DRAFT.path_tokens(node) for node in range(len(DRAFT)))]
    found = device.draw(torch.from_numpy(matrix), subject.rule, [subject.question(path) for path in paths]).tolist()
    right = [subject.draw(row, path) for row, path in zip(matrix, paths, strict=True)]
    close = [subject.near_tie(row, path) for row, path in zip(matrix, paths, strict=True)]
    return [token for token, _ in found], right, [bool(flag) for _, flag in found], close


@pytest.mark.parametrize("vocab", [12, 100, 8193])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_twin_draws_what_the_sampler_draws(name, vocab):
    params = SETTINGS[name]
    rng = np.random.default_rng(vocab)
    for seed in range(20):
        matrix = rng.normal(scale=2.5, size=(7, vocab)).astype(np.float32)
        matrix[rng.random(matrix.shape) < 0.1] = 1.5  # ties
        tokens, right, close, also = both(sampler(vocab, seed=seed, **params), matrix)
        assert tokens == right
        assert close == also


def test_the_twin_follows_a_grammar():
    class Even:
        error = ""

        def allowed(self, path):
            return (np.arange(50) + len(path)) % 2 == 0

        def append(self, tokens):
            pass

    matrix = np.random.default_rng(0).normal(size=(7, 50)).astype(np.float32)
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4}):
        tokens, right, _, _ = both(sampler(50, Even(), **params), matrix)
        assert tokens == right
        assert [token % 2 for token in tokens[:3]] == [0, 1, 1]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_fault_06_broken_rows_are_marked(params, value):
    matrix = np.zeros((7, 20), np.float32)
    matrix[2, 4] = value
    matrix[3, :] = -np.inf
    subject = sampler(20, **params)
    found = device.draw(torch.from_numpy(matrix), subject.rule, [subject.question([])] * 7)[:, 0].tolist()
    assert [token < 0 for token in found] == [False, False, True, True, False, False, False]


def test_noise_has_the_same_bits():
    ids = np.arange(3000)
    for seed, t in ((1, 5), (2**64 - 1, 0), (2**63, 10**6)):
        key = noise_rule.key(seed, t)
        found = device.gumbel(torch.tensor([[device._signed(key)]]), torch.from_numpy(ids))[0].numpy()
        assert np.array_equal(found, reference.gumbel(key, ids))
    x = -np.logspace(-12, 3, 2000)
    assert np.array_equal(device.exp(torch.from_numpy(x)).numpy(), reference.exp(x))


def test_planted_twin_with_other_noise_is_seen(monkeypatch):
    gumbel = device.gumbel
    monkeypatch.setattr(device, "gumbel", lambda keys, ids: gumbel(keys + 1, ids))
    matrix = np.random.default_rng(0).normal(size=(7, 100)).astype(np.float32)
    tokens, right, _, _ = both(sampler(100, temperature=1.0), matrix)
    assert tokens != right


def test_rows_look_like_arrays_and_come_over_once():
    matrix = np.random.default_rng(0).normal(size=(6, 9)).astype(np.float32)
    rows = Rows(OnDevice(torch.from_numpy(matrix)), 2, 5)
    assert len(rows) == 3
    assert rows.shape == (3, 9)
    assert np.array_equal(np.asarray(rows), matrix[2:5])
    assert np.array_equal(rows[-1], matrix[4])
    assert np.array_equal(rows[0][[1, 2]], matrix[2, [1, 2]])


class Transfers(TorchDispatchMode):
    """Counts what would bring data to the host: reading a scalar, and copies that name the CPU."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class CountedHost:
    """Stands for the way to the host in the device code: every use is counted."""

    def __init__(self, monkeypatch):
        self.count = 0
        for name in ("cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
            self._wrap(monkeypatch, name)

    def _wrap(self, monkeypatch, name):
        original = getattr(torch.Tensor, name)

        def counted(tensor, *args, **kwargs):
            self.count += name != "tolist" or not getattr(tensor, "_was_brought", False)
            made = original(tensor, *args, **kwargs)
            if name == "cpu":
                made._was_brought = True
            return made

        monkeypatch.setattr(torch.Tensor, name, counted)


def transfers_by_step(engine, requests, monkeypatch) -> list[tuple[int, int]]:
    """Per step after the prompts: ways to the host that were used, and how often whole logits went."""
    engine.step()
    counts = []
    while not all(request.done for request in requests):
        with Transfers() as seen, monkeypatch.context() as patch:
            counted, whole = CountedHost(patch), []
            # What an answer's end measures when no plain step was seen is no part of a step.
            patch.setattr(Ledger, "calibrate", lambda self, target, row: None)
            patch.setattr(OnDevice, "host", lambda self, h=OnDevice.host, w=whole: w.append(1) or h(self))
            engine.step()
        counts.append((counted.count + len(seen.names), len(whole)))
    return counts


def start(engine, prompts, params):
    return [engine.add(tokens, params) for tokens in prompts]


@pytest.mark.parametrize("settings", ["greedy", "sampled", "all of it"])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_step_brings_over_one_small_tensor(settings, max_batch, monkeypatch):
    """Plain and speculative steps: one transfer, of two numbers per node; the logits stay where they are."""
    params = SamplingParams(max_tokens=16, seed=4, **SETTINGS[settings])
    prompts = [[*prompt(5) * 3], prompt(9, 1), prompt(3, 2)][:max_batch]
    host = TransformersTarget(torch_beds.tiny("llama"), slots=6)
    expected = [
        output.token_ids for output in answers(engine_of(host, "suffix tree", None, max_batch), prompts, params)
    ]
    target = TransformersTarget(torch_beds.tiny("llama"), slots=6, on_device=True, pack=False)
    for draft in ("", "suffix tree"):
        engine = engine_of(target, draft, None, max_batch)
        requests = start(engine, prompts, params)
        counts = transfers_by_step(engine, requests, monkeypatch)
        assert counts
        assert set(counts) == {(1, 0)}
        assert [request.answers[0].row.output for request in requests] == expected
        drafted = sum(request.answers[0].stats.num_draft_tokens for request in requests)
        assert (drafted > 0) == bool(draft)


def test_planted_reading_of_logits_is_seen(monkeypatch):
    monkeypatch.setattr(Drawer, "__call__", lambda self, rows, drafts: None)
    target = TransformersTarget(torch_beds.tiny("llama"), on_device=True, pack=False)
    engine = engine_of(target, "suffix")
    counts = transfers_by_step(engine, start(engine, [prompt(9)], SamplingParams(max_tokens=8)), monkeypatch)
    assert all(used > 1 and whole for used, whole in counts)


def test_logprobs_bring_the_logits_over_once_a_step(monkeypatch):
    params = SamplingParams(max_tokens=8, logprobs=2)
    host = answers(engine_of(TransformersTarget(torch_beds.tiny("llama"))), [prompt(9)], params)[0]
    target = TransformersTarget(torch_beds.tiny("llama"), on_device=True, pack=False)
    found = answers(engine_of(target, "suffix"), [prompt(9)], params)[0]
    assert found.token_ids == host.token_ids
    assert np.allclose([one.logprob for one in found.logprobs], [one.logprob for one in host.logprobs], atol=1e-4)


def test_a_sampler_of_another_kind_is_asked_itself():
    row = Row(0, [1], 1, SamplingParams(), 0, sampler=object())
    assert Drawer(torch.zeros(1, 4), [slice(0, 1)])([row], [Draft()]) is None
