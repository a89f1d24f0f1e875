"""The commands `pull` and `models`: fetch a model, list what is here."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence

import typer


def pull(
    name: str = typer.Argument(help="A short name (smollm2, qwen2.5-coder-0.5b, ...), a hub id (org/name), or a path."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress bar."),
) -> None:
    """Fetch a model, or go on with a fetch that was interrupted; prints where it is."""
    from slipstream.models.registry import pull as fetch

    try:
        typer.echo(fetch(name, quiet))
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise


def models(json: bool = typer.Option(False, "--json", help="One JSON object a line.")) -> None:
    """List the models on this machine, and the short names that can be pulled."""
    from slipstream.models.packages import PACKAGED
    from slipstream.models.registry import installed

    found = installed()
    if json:
        for entry in found:
            typer.echo(json_format.dumps(entry.as_dict()))
        return
    missing = [model for name, model in PACKAGED.items() if name not in {entry.name for entry in found}]
    lines = [(entry.name, f"{entry.size / 1e6:.0f} MB", entry.type, entry.licence, str(entry.path)) for entry in found]
    lines += [
        (model.name, f"{model.size / 1e6:.0f} MB", "not fetched", model.licence, f"slipstream pull {model.name}")
        for model in missing
    ]
    _table(("NAME", "SIZE", "TYPE", "LICENCE", "PATH"), lines)


def _table(heads: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest entry; plain text, so that other programs can read it."""
    widths = [max(len(line[column]) for line in (heads, *lines)) for column in range(len(heads))]
    for line in (heads, *lines):
        row = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(row.rstrip() + "\n")
