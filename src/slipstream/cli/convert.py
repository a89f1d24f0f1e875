"""The command `convert`: a drafting head from one format to another, checked to draft the same before it is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.app import app

if TYPE_CHECKING:
    from slipstream.models.heads.head import Head
    from slipstream.models.heads.layout import Rows


@app.command("convert")
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="IN", help="Folder of a head, in any format that is read, or a shipped head's name."),
    ],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    to: Annotated[str, typer.Option("--to", help="slipstream, speculators, eagle3 or medusa.")] = "slipstream",
    storage: Annotated[str | None, typer.Option(help="F32, F16, BF16 or Q8_0 (default: as it is).")] = None,
    target: Annotated[str | None, typer.Option(help="The head's model, where its rows must be written out.")] = None,
) -> None:
    """Write a drafting head in another format, with every flag; it is read back and must draft the same."""
    from slipstream.models.heads.formats import read_head, write_head
    from slipstream.models.heads.head import restore
    from slipstream.models.heads.shipped import place_of

    place = place_of(source)
    head = read_head(place)
    for name in head.unused:
        say(f"tensor {name} is not known and is left out")
    if storage is not None:
        head = restore(head, storage)
    notices = write_head(destination, head, to, rows_of(target), {"converted_from": place.name}, require_same(head, to))
    for notice in [*head.notices, *notices]:
        say(notice)
    size = sum(file.stat().st_size for file in destination.iterdir())
    typer.echo(f"{destination}: {head.config.kind}, format {to}, {size / 1e6:.1f} MB, drafts as {source} does")


def rows_of(target: str | None) -> Rows | None:
    """The LM head of a model by name, for formats that must hold rows of it."""
    if target is None:
        return None
    from slipstream.build import open_named
    from slipstream.drafters.heads.parts import parts_of

    return parts_of(open_named(target)).head_rows


def require_same(head: Head, to: str) -> Callable[[Head], None]:
    """What checks a head that was read back. It raises ModelError unless that drafts as this one does."""
    from slipstream.core.errors import ModelError
    from slipstream.drafters.heads.same import same_drafts
    from slipstream.models.heads.layout import as_foreign

    expected = head if to == "slipstream" else as_foreign(head)

    def check(written: Head) -> None:
        if written.config.kind != head.config.kind or not same_drafts(expected, written):
            raise ModelError("what was written drafts otherwise when it is read back; nothing was kept")

    return check


def say(notice: str) -> None:
    """One line on stderr."""
    print(f"notice: {notice}", file=sys.stderr)
