"""docs/playground.png: the page of `slipstream serve` with SmolLM2, as it looks on this machine.

    python docs/make_playground.py

Needs the extra `serve` and Chromium. Take it while nothing else runs: the picture shows speeds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import chromium  # noqa: E402
import serve_beds  # noqa: E402

WIDTH, HEIGHT = 1200, 1090
BEFORE = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain in three sentences how a bicycle stays upright.",
    "Write a poem about the sea.",
)
"""Conversations that have gone before, so that the charts have something to show."""
QUESTIONS = (
    "Name five fruits and say in one sentence what is good about each.",
    "Now repeat that list, but in capital letters.",
)


def ask(browser: chromium.Browser, text: str) -> None:
    """Send a message and wait for the end of the answer."""
    browser.run(f"document.getElementById('prompt').value = {json.dumps(text)}")
    browser.run("document.getElementById('send').click()")
    browser.wait("document.getElementById('stop').disabled")


def rest(browser: chromium.Browser, seconds: float) -> None:
    """Let the charts go on for a while."""
    browser.run(f"new Promise(done => setTimeout(done, {1000 * seconds}))")


def main() -> None:
    """A conversation, its last answer compared with plain decoding, and the picture."""
    executable = chromium.find()
    if executable is None:
        raise SystemExit("no Chromium here (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, serve_beds.process() as server:
        browser = chromium.Browser(executable, Path(folder))
        browser.open(f"{server.url}/", WIDTH, HEIGHT)
        browser.wait("document.querySelector('#drafters input')")
        for question in BEFORE:
            ask(browser, question)
            browser.run("document.getElementById('clear').click()")
            rest(browser, 3)
        for question in QUESTIONS:
            ask(browser, question)
            rest(browser, 2)
        browser.run("document.activeElement.blur()")
        browser.run("[...document.querySelectorAll('.message.assistant button')].at(-1).click()")
        browser.wait("document.querySelector('.message table') && document.getElementById('stop').disabled")
        rest(browser, 2.5)
        browser.picture(HERE / "playground.png")
        browser.close()


if __name__ == "__main__":
    main()
