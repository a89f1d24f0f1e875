"""The command line on a small fake model: what it prints, reads and refuses."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

import beds
from slipstream import LLM, SamplingParams
from slipstream import build as build_module
from slipstream.cli import main
from slipstream.cli.chat import Session, StopSign
from slipstream.kernels import native


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Every known model is the small one."""
    beds.small_models(monkeypatch, tmp_path / "home")


def run(capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def piped(monkeypatch, text: str | bytes) -> None:
    """Put this on stdin."""
    data = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


def expected(prompt: str, raw: bool = False, **params: object) -> str:
    with LLM("small") as llm:
        params = SamplingParams(**params)
        if raw:
            return llm.generate(prompt, params)[0].outputs[0].text
        return llm.chat([{"role": "user", "content": prompt}], params)[0].outputs[0].text


def test_generate_streams_the_answer_and_reports_on_stderr(capsys):
    code, out, err = run(capsys, "generate", "Hello", "--max-tokens", "30")
    assert (code, out) == (0, expected("Hello", max_tokens=30) + "\n")
    assert "tokens per pass" in err
    assert run(capsys, "generate", "Hello", "--max-tokens", "30", "--quiet") == (0, out, "")
    assert run(capsys, "generate", "Hello", "--max-tokens", "30", "--no-speculation")[1] == out
    assert run(capsys, "generate", "Hello", "--max-tokens", "30", "--raw", "-q")[1] != out


def test_prompts_come_from_stdin_and_files(capsys, monkeypatch, tmp_path):
    out = expected("Hello\nyou", max_tokens=9) + "\n"
    path = tmp_path / "prompt.txt"
    path.write_text("Hello\nyou")
    assert run(capsys, "generate", "--file", str(path), "--max-tokens", "9", "-q")[1] == out
    for words in (["-"], []):
        piped(monkeypatch, "Hello\nyou")
        assert run(capsys, "generate", *words, "--max-tokens", "9", "-q")[1] == out
    rows = [
        {"prompt": "Hello\nyou"},
        {"messages": [{"role": "user", "content": "Hello\nyou"}]},
        {"prompt_token_ids": [1]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    code, out_json, _ = run(capsys, "generate", "--jsonl", str(path), "--json", "--max-tokens", "9")
    found = [json.loads(line) for line in out_json.splitlines()]
    assert code == 0
    assert [row["index"] for row in found] == [0, 1, 2]
    assert found[0]["text"] == found[1]["text"] == out[:-1]


def test_json_holds_what_programs_need(capsys):
    words = ["generate", "One", "Two", "--json", "--max-tokens", "12", "--n", "2", "--seed", "4", "-t", "0.9"]
    code, out, _ = run(capsys, *words, "--logprobs", "1", "--top-p", "0.9", "--logit-bias", "5=1.5")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, len(rows)) == (0, 2)
    row = rows[0]
    assert {"index", "model", "text", "token_ids", "finish_reason", "stop_reason", "seed", "logprobs", "usage"} <= set(
        row
    )
    assert row["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in row["choices"])
    assert [choice["choice"] for choice in row["choices"]] == [0, 1]
    assert row["choices"][0]["text"] == row["text"]
    assert set(row["timing"]) == {"prefill_s", "decode_s", "tokens_per_second", "split", "reused_tokens"}
    assert set(row["timing"]["split"]) == {"draft", "pass", "verify", "rest"}
    assert row["speculation"]["num_steps"] > 0
    assert len(row["logprobs"]) == len(row["token_ids"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "x", "--temperature", "-1"], "temperature is -1"),
        (["generate", "x", "--temperature", "hot"], "--temperature"),
        (["generate", "x", "--wrong"], "--wrong"),
        (["generate", "x", "--draft", "magic"], "unknown drafter 'magic'"),
        (["generate", "x", "--verifier", "magic"], "unknown verifier 'magic'"),
        (["generate", "x", "--verifier", "block", "--shape", "tree"], "chains only"),
        (["generate", "x" * 500], "400"),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias is '5'"),
        (["generate", "x", "--logit-bias", "500=1"], "token 500"),
        (["generate", "x", "--file", "y"], "only one of them"),
        (["generate", "--file", "/nowhere/prompt.txt"], "cannot read /nowhere/prompt.txt"),
        (["generate", "x", "--raw", "--system", "y"], "--system needs a chat template"),
        (["chat", "one", "--model", "two"], "two models are named, one and --model two"),
        (["serve", "one", "-m", "two"], "two models are named, one and --model two"),
        (["generate", "x", "--max-tokens", "-4"], "max_tokens is -4"),
        (["teleport"], "teleport"),
        (["pull"], "name"),
        (["info", "--max-context", "x"], "x"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_and_code_2(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert message.lower() in err.lower()
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not JSON"),
        pytest.param("[" * 100_000, "line 1 is not JSON", id="deep"),
        ('{"prompt": "a"}\n[1]', "line 2 is not an object"),
        ('{"messages": "x"}', "line 1 needs"),
        ("", "no rows"),
    ],
)
def test_wrong_rows_are_named(capsys, tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    code, _, err = run(capsys, "generate", "--jsonl", str(path))
    assert code == 2
    assert message in err


def test_a_prompt_that_is_not_text_is_refused(capsys, monkeypatch):
    piped(monkeypatch, b"\xff\xfe")
    assert "not UTF-8" in run(capsys, "generate")[2]
    piped(monkeypatch, "")
    assert run(capsys, "generate", "--raw")[0] == 2


def test_defects_show_a_traceback_only_when_asked_for(capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(build_module, "load_target", broken)
    code, _, err = run(capsys, "generate", "x")
    assert (code, err.count("\n")) == (1, 1)
    assert "RuntimeError: a defect" in err
    with pytest.raises(RuntimeError, match="a defect"):
        main(["--debug", "generate", "x"])


def test_an_interrupt_is_code_130(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "load_target", interrupted)
    assert run(capsys, "generate", "x")[0] == 130


def test_version_and_help(capsys):
    assert run(capsys, "--version")[1].startswith("slipstream ")
    for words in ([], ["--help"]):
        code, out, _ = run(capsys, *words)
        assert code == 0
        assert all(name in out for name in ("generate", "chat", "pull", "models", "info"))


def start(*words: str, **settings) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **settings)


def test_help_starts_fast_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom slipstream.cli import main\ncode = main(['--help'])\n"
        "heavy = {'numpy', 'torch', 'gguf', 'tokenizers', 'jinja2', 'huggingface_hub', 'transformers', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\nsys.exit(code)"
    )
    result = start("-c", code)
    assert result.returncode == 0, result.stderr
    light = "import sys, slipstream; assert not {'numpy', 'typer', 'slipstream.llm'} & set(sys.modules)"
    assert start("-c", light).returncode == 0
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        start("-m", "slipstream", "--help")
        times.append(time.perf_counter() - begun)
        if times[-1] < 0.3:
            break
    assert min(times) < 0.3


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash; `slipstream` is this Python's."""
    line = f'slipstream() {{ "{sys.executable}" -m slipstream "$@"; }}; {command}'
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


def test_a_closed_pipe_is_quiet():
    result = shell("slipstream generate --help | (sleep .5; true); echo ${PIPESTATUS[0]}")
    assert (result.stdout, result.stderr) == ("0\n", "")
    result = shell("slipstream models | head -1; exit ${PIPESTATUS[0]}")
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1


def test_output_that_cannot_be_written_is_one_line_and_code_2():
    result = shell("slipstream models > /dev/full")
    assert (result.returncode, result.stderr) == (2, "error: [Errno 28] No space left on device\n")
    assert shell("slipstream models >&-").returncode == 0
    assert shell("slipstream nonsense 2>&-").returncode == 2


def chat(capsys, monkeypatch, text: str, *words: str) -> tuple[int, str, str]:
    piped(monkeypatch, text)
    return run(capsys, "chat", *words)


def test_chat_answers_line_by_line_from_a_pipe(capsys, monkeypatch):
    code, out, err = chat(capsys, monkeypatch, "Hello\n\n/stats\n", "--max-tokens", "20")
    assert code == 0
    assert out.startswith(expected("Hello", max_tokens=20) + "\n")
    assert "last answer: 20 tokens" in out
    assert "tokens per pass" in err
    again = chat(capsys, monkeypatch, "Hello\n/reset\nHello\n/exit\nHello\n", "--max-tokens", "20", "-q")
    assert again[1] == 2 * (expected("Hello", max_tokens=20) + "\n")


def test_chat_remembers_the_conversation(capsys, monkeypatch):
    _, out, _ = chat(capsys, monkeypatch, "Hello\nYou\n", "--max-tokens", "12", "-q", "--system", "Be.")
    with LLM("small") as llm:
        messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hello"}]
        first = llm.chat(messages, SamplingParams(max_tokens=12))[0].outputs[0].text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "You"}]
        result = llm.chat(messages, SamplingParams(max_tokens=12))[0]
    assert out == f"{first}\n{result.outputs[0].text}\n"
    assert result.timing.reused_tokens > 20


def test_chat_commands_and_errors(capsys, monkeypatch):
    code, out, err = chat(
        capsys, monkeypatch, f"/help\n/dance\n/stats\n{'x' * 500}\nHello\n", "--max-tokens", "3", "-q"
    )
    assert code == 0
    assert "/reset" in out
    assert "unknown command /dance" in out
    assert "no answers yet" in out
    assert "400" in err
    assert out.endswith(expected("Hello", max_tokens=3) + "\n"), "a message that was refused is not kept"


def test_chat_colours_what_was_drafted(capsys, monkeypatch):
    monkeypatch.setattr(
        beds.SmallFile, "target", lambda self, **s: beds.TableTarget(beds.cycle_table(range(1, 90), 99), **s)
    )
    words = ["--max-tokens", "200", "-q", "--draft", "suffix", "--controller", "fixed"]
    plain = chat(capsys, monkeypatch, "Hello\n", *words)[1]
    coloured = chat(capsys, monkeypatch, "Hello\n", *words, "--color-drafts")[1]
    assert "\033" not in plain
    assert "\033[36m" in coloured
    assert coloured.replace("\033[36m", "").replace("\033[0m", "") == plain


def test_ctrl_c_stops_the_answer_and_not_the_chat(capsys):
    with LLM("small") as llm:
        session = Session(llm, SamplingParams(max_tokens=300, ignore_eos=True), None)
        shown = []

        def show(piece):
            shown.append(piece)
            if len(shown) == 3:
                os.kill(os.getpid(), signal.SIGINT)

        session.show = show
        session.say("Hello")
        assert len(shown) == 3
        assert session.messages[-1]["role"] == "assistant"
        assert 0 < len(session.messages[-1]["content"]) < 300
        assert llm._engine.idle
        session.say("And?")
        assert len(session.results) == 2
    assert "(stopped)" in capsys.readouterr().out


def test_ctrl_c_stops_the_reading_of_a_prompt(capsys, monkeypatch):
    monkeypatch.setattr("slipstream.engine.reading.Pace.tokens", lambda *_: 4)
    monkeypatch.setattr("slipstream.engine.reader.FEWEST_TOKENS", 4)
    passes, original = [], beds.TableTarget.prefill

    def prefill(self, slot, tokens, last=None):
        passes.append(len(tokens))
        if len(passes) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        original(self, slot, tokens)

    with LLM("small") as llm:
        monkeypatch.setattr(beds.TableTarget, "prefill", prefill)
        session = Session(llm, SamplingParams(max_tokens=5), None)
        session.say("A message that takes many passes to read")
        assert len(passes) == 2
        assert (session.messages, session.results, llm._engine.idle) == ([], [], True)
        assert "(stopped)" in capsys.readouterr().out
        session.say("And?")
        assert len(session.results) == 1


def test_warnings_are_one_line(capsys, monkeypatch):
    load = build_module.load_target

    def load_slowly(*settings):
        native.warn_if_slow()
        return load(*settings)

    monkeypatch.setattr(build_module, "load_target", load_slowly)
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(native, "_warned", False)
    monkeypatch.delenv("SLIPSTREAM_KERNELS", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        err = run(capsys, "generate", "Hello", "--max-tokens", "3", "-q")[2]
    assert err.startswith("warning: slipstream was installed without its compiled kernels")
    assert err.count("\n") == 1


def test_a_second_ctrl_c_interrupts_at_once():
    with StopSign() as sign:
        os.kill(os.getpid(), signal.SIGINT)
        assert sign.seen
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_measured_pass_costs_name_their_rows():
    from slipstream.control.measure import pass_costs

    costs = pass_costs(beds.SmallFile().target(max_context=150, slots=1), rounds=2)
    assert [cost["rows"] for cost in costs][:4] == [1, 2, 3, 4]
    assert costs[-1]["rows"] == 32
    assert all(cost["ms"] > 0 for cost in costs)
