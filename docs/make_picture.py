"""docs/demo.svg: what `make demo` prints on this machine, as a picture (`make picture`)."""

from __future__ import annotations

import html
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 108
PLACE = Path(__file__).with_name("demo.svg")


def main() -> None:
    """Run the demo, coloured, and draw its output."""
    command = [sys.executable, "-m", "slipstream.cli.demo"]
    environment = {**os.environ, "FORCE_COLOR": "1"}
    shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make demo", style="bold"))
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="slipstream", unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # the reader's own monospace font will do
    PLACE.write_text(re.sub(r'x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>([^<]+)<', unpadded, svg), "utf-8")


def unpadded(element: re.Match[str]) -> str:
    """A piece of text without the spaces around it, which some viewers drop and make up for by stretching the rest."""
    x, y, length, rest, text = element.groups()
    size = float(length) / len(html.unescape(text))
    inner = text.replace("&#160;", " ")
    before, after = len(inner) - len(inner.lstrip()), len(inner) - len(inner.rstrip())
    if before == len(inner):
        return element[0]
    place, width = float(x) + before * size, float(length) - (before + after) * size
    return f'x="{place:g}" y="{y}" textLength="{width:g}"{rest}>{inner.strip().replace(" ", "&#160;")}<'


if __name__ == "__main__":
    main()
