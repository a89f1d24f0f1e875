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

WIDTH, HEIGHT = 1280, 1080
QUESTIONS = (
    "Name five fruits and say in one sentence what is good about each.",
    "Now repeat that list, but in capital letters.",
)


def ask(browser: chromium.Browser, text: str) -> None:
    """Send a message and wait for the end of the answer."""
    browser.run(f"document.getElementById('prompt').value = {json.dumps(text)}")
    browser.run("document.getElementById('send').click()")
    browser.wait("document.getElementById('stop').disabled")


def main() -> None:
    """A conversation, its last answer compared with plain decoding, and the picture."""
    executable = chromium.find()
    if executable is None:
        raise SystemExit("no Chromium here (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, serve_beds.process() as server:
        browser = chromium.Browser(executable, Path(folder))
        browser.open(f"{server.url}/", WIDTH, HEIGHT)
        browser.wait("document.querySelector('#drafters input')")
        for question in QUESTIONS:
            ask(browser, question)
        browser.run("[...document.querySelectorAll('.message.assistant button')].at(-1).click()")
        browser.wait("document.querySelector('.message table') && document.getElementById('stop').disabled")
        browser.run("new Promise(done => setTimeout(done, 2500))")  # the charts take in the last numbers
        browser.picture(HERE / "playground.png")
        browser.close()


if __name__ == "__main__":
    main()
