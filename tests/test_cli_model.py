"""The installed command with the real SmolLM2: answers, JSON, a chat on a terminal, damaged input."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from slipstream.control.measure import FEWEST, ROWS
from slipstream.models.registry import ensure

pytestmark = pytest.mark.model
COMMAND = [sys.executable, "-m", "slipstream"]


@pytest.fixture(scope="module", autouse=True)
def model():
    """The model, fetched if it is not here yet."""
    return ensure("smollm2", quiet=True)


def run(*words: str, text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *words], input=text, capture_output=True, text=True, check=False)


def test_answers_are_the_same_by_every_way_in():
    words = ["generate", "--max-tokens", "12"]
    streamed = run(*words, text="Name two colours.")
    assert streamed.returncode == 0, streamed.stderr
    rows = run(*words, "Name two colours.", "Name two rivers.", "--json", "--draft", "lookup")
    found = [json.loads(line) for line in rows.stdout.splitlines()]
    assert streamed.stdout == found[0]["text"] + "\n"
    assert found[0]["usage"]["completion_tokens"] == len(found[0]["token_ids"])
    assert found[1]["text"] != found[0]["text"]
    assert run(*words, "Name two colours.", "--no-speculation", "-q").stdout == streamed.stdout


def test_info_tells_what_the_model_takes(model):
    result = run("info", "smollm2", "--json", "--max-context", "512")
    found = json.loads(result.stdout)
    assert found["architecture"] == "llama"
    assert found["file_bytes"] == pytest.approx(model.stat().st_size, rel=0.1)
    assert 0 < found["weights_bytes"] < 2 * found["file_bytes"], "quantised weights stay quantised"
    assert found["kv_bytes_per_token"] == 2 * 4 * found["num_layers"] * found["num_kv_heads"] * found["head_dim"]
    assert found["read_bandwidth_gb_s"] > 0
    sizes = [cost["rows"] for cost in found["pass_cost"]]
    assert sizes == list(ROWS[: len(sizes)])
    assert max(sizes) >= FEWEST, "measured however slow the machine is"
    assert "pass_cost" not in json.loads(run("info", "--json", "--no-measure").stdout)
    assert "MB in memory" in run("info", "--no-measure").stdout


def test_damaged_and_missing_models_are_one_line(tmp_path, model):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:2_000_000])
    for name in (str(cut), "nowhere.gguf", "smollm3"):
        result = run("generate", "x", "--model", name)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [*COMMAND, "chat", *words])
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """What was shown up to and with this text, which must come."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come after {self.seen!r}"
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.seen += os.read(self.terminal, 65536).decode(errors="replace")
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def interrupt(self, answer: str) -> None:
        """Ctrl-C until it is answered: a key that comes just before the wait for keys counts with the next one."""
        for _ in range(30):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.wait_for(answer, seconds=2)
                return
        raise AssertionError(f"Ctrl-C was not answered by {answer!r}")

    def end(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_chat_on_a_terminal_survives_ctrl_c():
    chat = Terminal("--max-tokens", "400", "--color-drafts")
    chat.wait_for("> ")
    chat.interrupt("Ctrl-D leaves")
    chat.wait_for("> ")
    chat.type("Write a very long story about a fox, and repeat each sentence.\n")
    chat.wait_for("fox")
    chat.wait_for("\r\n")
    time.sleep(0.5)
    chat.interrupt("(stopped)")
    chat.wait_for("> ")
    chat.type("Say hello.\n")
    chat.wait_for("of them cached")
    chat.wait_for("> ")
    chat.type("/stats\n")
    chat.wait_for("2 answers")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.end() == 0
