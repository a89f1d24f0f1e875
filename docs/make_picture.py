"""docs/demo.svg: what `make demo` prints on this machine, as a picture (`make picture`)."""

from __future__ import annotations

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
    PLACE.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
