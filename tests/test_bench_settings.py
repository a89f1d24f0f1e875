"""Measurements of settings and of peers: what is timed, paired and left out; the command `bench`."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import textwrap
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path

import pytest

import beds
from slipstream.bench import paired
from slipstream.bench.settings import PLAIN, Answers, Task, asker, measure, side_by_side, summary, table
from slipstream.cli import main
from slipstream.core.params import SamplingParams
from slipstream.core.stats import Speculation
from slipstream.core.types import CompletionOutput, RequestOutput, Timing

TWO = ["", ""]
"""Two tasks without a category."""
BENCH = Path(__file__).resolve().parent.parent / "bench"


def answer(decode_s: float, tokens: int = 41, prefill_s: float = 0.5, word: int = 7) -> Answers:
    stats = Speculation(num_steps=10, tokens_before_trimming=tokens)
    output = CompletionOutput(0, "", [word] * tokens, "length", speculation=stats)
    return [RequestOutput(None, [1], [output], Timing(prefill_s=prefill_s))], decode_s


def quiet(done: int, of: int) -> None:
    pass


def noisy_machine(seed: int = 1):
    """Answers of a machine whose speed drifts between repeats by far more than the settings differ."""
    chance, asked = random.Random(seed), []
    drift = [1.0, 3.0, 0.4, 2.0, 1.0]

    def ask(setting: str, row: int) -> Answers:
        asked.append((setting, row))
        repeat = min(4, max(0, (len(asked) - 3) // 4))
        seconds = {PLAIN: 1.0, "auto": 0.8}[setting] * drift[repeat] * chance.uniform(0.99, 1.01)
        return answer(seconds)

    return ask, asked


def test_ratios_are_paired_so_that_a_drifting_machine_does_not_matter():
    ask, asked = noisy_machine()
    runs = measure(ask, [PLAIN, "auto"], TWO, 5, quiet)
    assert len(runs) == 20
    assert len(asked) == 22  # each setting is warmed up once
    plain, auto = summary(runs)
    assert (plain["setting"], auto["setting"]) == (PLAIN, "auto")
    value, low, high = auto["decode_ratio"]
    assert low <= value <= high
    assert value == pytest.approx(1.25, rel=0.02)
    assert plain["decode_ratio"] == [1.0, 1.0, 1.0]
    assert auto["prefill_s"] == 0.5
    assert auto["tokens_per_pass"] == 4.1
    assert "1.25x" in table([plain, auto])


def test_settings_take_turns():
    ask, asked = noisy_machine()
    measure(ask, [PLAIN, "auto"], TWO, 2, quiet)
    assert asked[2:6] == [(PLAIN, 0), ("auto", 0), ("auto", 1), (PLAIN, 1)]
    assert asked[6:] == [("auto", 0), (PLAIN, 0), (PLAIN, 1), ("auto", 1)]


def test_planted_other_tokens_and_short_answers_are_seen():
    def ask(setting: str, row: int) -> Answers:
        return answer(1.0, tokens=20 if row else 40, word=8 if setting == "auto" else 7)

    plain, auto = summary(measure(ask, [PLAIN, "auto"], TWO, 2, quiet))
    assert (plain["rows"], plain["same_tokens"]) == (1, True)
    assert not auto["same_tokens"]
    assert "OTHER TOKENS" in table([plain, auto])


def test_categories_are_compared_with_plain_and_with_the_fastest_other_setting():
    seconds = {"code": {PLAIN: 1.0, "auto": 0.5, "suffix": 0.4}, "chat": {PLAIN: 1.0, "auto": 0.8, "suffix": 1.25}}
    tasks = ["code", "chat"]
    found = summary(
        measure(lambda name, row: answer(seconds[tasks[row]][name]), list(seconds["code"]), tasks, 2, quiet)
    )
    auto = next(row for row in found if row["setting"] == "auto")["categories"]
    assert auto["code"]["decode_ratio"][0] == pytest.approx(2.0)
    assert (auto["code"]["best_other"], auto["chat"]["best_other"]) == ("suffix", PLAIN)
    assert auto["code"]["best_other_ratio"][0] == pytest.approx(0.8)
    assert auto["chat"]["best_other_ratio"][0] == pytest.approx(1.25)
    shown = table(found)
    assert "0.80x (0.80-0.80) suffix" in shown
    assert "1.25x (1.25-1.25) plain" in shown


def test_prompts_side_by_side_make_one_task():
    tasks = [Task(category, [[number]]) for number, category in enumerate(["a", "a", "b"])]
    made = side_by_side(tasks, 2)
    assert [(task.category, task.prompts) for task in made] == [("a", [[0], [1]]), ("mixed", [[2], [0]])]
    assert side_by_side(tasks, 1) == tasks


def test_prompts_take_their_parameters_by_turns():
    class Recorder:
        def __init__(self):
            self.asked = []

        def add(self, prompt, params):
            self.asked.append((prompt, params.temperature))
            return Namespace(error=None)

        def run(self, requests):
            return [answer(1.0)[0][0] for _ in requests]

        def forget(self):
            pass

    engine, params = Recorder(), [SamplingParams(temperature=each) for each in (0.0, 0.5, 1.0)]
    tasks = side_by_side([Task("", [[number]]) for number in range(4)], 2)
    ask = asker({PLAIN: engine}, tasks, params)
    for number in range(2):
        ask(PLAIN, number)
    assert engine.asked == [([0], 0.0), ([1], 0.5), ([2], 1.0), ([3], 0.0)]


def test_an_interruption_keeps_what_there_is():
    def ask(setting: str, row: int) -> Answers:
        if row == 2:
            raise KeyboardInterrupt
        return answer(1.0)

    assert len(measure(ask, [PLAIN], [""] * 5, 3, quiet)) == 2


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    chance, held = random.Random(5), 0
    for trial in range(100):
        values = [1.2 * chance.lognormvariate(0.0, 0.1) for _ in range(15)]
        found = paired.median(values, seed=trial)
        held += found.low <= 1.2 <= found.high
    assert held >= 85


@pytest.fixture
def small(monkeypatch, tmp_path):
    beds.small_models(monkeypatch, tmp_path / "home")


def test_the_command_compares_settings_on_rows_of_ones_own(small, tmp_path, capsys):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    rows.write_text('{"prompt": "abcabcabc"}\n{"prompt": "b"}\n')
    words = ["bench", "small", "--draft", "suffix", "--draft", "lookup,recycling", "--rows", str(rows)]
    assert main([*words, "--repeats", "2", "--max-tokens", "40", "--json", str(out)]) == 0
    assert "lookup,recycling" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [row["setting"] for row in found["summary"]] == [PLAIN, "suffix", "lookup,recycling"]
    assert all(row["same_tokens"] for row in found["summary"])
    assert len(found["runs"]) == 3 * 2 * 2
    assert {"machine", "version", "kernels"} <= set(found)
    assert [run["row"] for run in found["runs"][:3]] == [0, 0, 0]
    assert main(["bench", "small", "--draft", "sufix"]) == 2
    assert "sufix" in capsys.readouterr().err
    assert main(["bench", "small", "--draft", "auto", "--draft", "head:x"]) == 2
    assert "instead of auto" in capsys.readouterr().err


def test_fixed_nodes_random_prompts_and_rows_side_by_side(small, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = [
        "bench",
        "small",
        "--draft",
        "auto",
        "--draft",
        "suffix@3",
        "--draft",
        "suffix,lookup@4t",
        "--json",
        str(out),
    ]
    heat = ["--temperature", "0", "-t", "0.7", "--ignore-eos"]
    assert main([*words, "--random-tokens", "3", "-c", "2", "--repeats", "1", "--max-tokens", "40", *heat]) == 0
    assert capsys.readouterr().out.count("x (") == 3
    found = json.loads(out.read_text())
    assert (found["temperature"], found["ignore_eos"]) == ([0, 0.7], True)
    runs = [run for run in found["runs"] if run["setting"] == "suffix@3"]
    assert [(run["answers"], run["category"], run["tokens"]) for run in runs] == [(2, "random", 80)] * 2
    assert all(row["same_tokens"] for row in found["summary"])


WORKER = """
    import json, sys
    print(json.dumps({"version": "1"}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        speed = {"plain": 100.0, "lookup": 200.0}[ask["setting"]] * float(sys.argv[1])
        tokens = ask["max_tokens"]
        print(json.dumps({"seconds": 0.1 + (tokens - 1) / speed, "tokens": tokens, "text": "x"}), flush=True)
"""


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """bench/compare.py with workers that answer from a table."""
    spec = importlib.util.spec_from_file_location("compare_script", BENCH / "compare.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_script", module)
    spec.loader.exec_module(module)
    for name in ("slipstream", "peer"):
        (tmp_path / f"{name}_worker.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(module, "WORKERS", tmp_path)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    return module


@contextmanager
def comparison(compare, tmp_path, **changes):
    settings = {"out": str(tmp_path / "out"), "threads": 1, "max_tokens": 51, "repeat": 3, "minutes": None}
    args = Namespace(**{**settings, "minimum": 32, **changes})
    rows = [[{"role": "user", "content": text}] for text in "ab"]
    specs = [f"slipstream:plain,lookup={sys.executable}:2", f"peer:plain,lookup={sys.executable}:1"]
    engines = [compare.Engine(spec, 1) for spec in specs]
    try:
        yield compare.Comparison(args, rows, engines)
    finally:
        for engine in engines:
            engine.close()


def test_engines_are_compared_and_an_interrupted_run_goes_on(compare, tmp_path, capsys):
    with comparison(compare, tmp_path, minutes=1e-9) as first:
        first.measure()
        assert len(first.runs) == 4  # one row, then the time was over
    with comparison(compare, tmp_path) as again:
        again.measure()
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["runs"]) == 2 * 2 * 2 * 3
    decode = result["ratios"]["decode"]
    assert decode["plain / peer plain"]["ratio"] == pytest.approx(2.0)
    assert decode["plain / peer best per row"]["ratio"] == pytest.approx(1.0)
    assert decode["lookup / peer best per row"]["least_row"] == pytest.approx(2.0)
    assert result["ratios"]["prefill"]["plain / peer plain"]["ratio"] == pytest.approx(1.0)
    assert "medians of 3 interleaved repeats" in (tmp_path / "out.md").read_text()
    with pytest.raises(SystemExit, match="other conditions"), comparison(compare, tmp_path, max_tokens=60):
        pass


def test_rows_with_short_answers_are_left_out_for_all(compare):
    def run(engine: str, row: int, tokens: int) -> dict:
        return {"engine": engine, "setting": "plain", "row": row, "repeat": 0, "prefill_s": 0.1, "total_s": 1.1,
                "tokens": tokens, "text": ""}  # fmt: skip

    runs = [run("slipstream", 0, 41), run("peer", 0, 41), run("slipstream", 1, 41), run("peer", 1, 31)]
    found = compare.report(runs, 32)
    assert found["left_out"] == [1]
    assert [row["rows"] for row in found["summary"]] == [1, 1]
