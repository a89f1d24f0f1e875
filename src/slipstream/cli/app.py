"""The command table. Modules of commands add theirs; what is slow is imported only when a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli import models

app = typer.Typer(
    name="slipstream",
    help="Run large language models faster, with the same output.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"slipstream {version('slipstream')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error happened.")] = False,
) -> None:
    """Run large language models faster, with the same output."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("pull")(models.pull)
app.command("models")(models.models)
