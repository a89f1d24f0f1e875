"""The table of commands. Commands import what is slow only when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli import chat, generate, info, models

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
        import slipstream

        typer.echo(f"slipstream {slipstream.__version__}")
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


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("pull")(models.pull)
app.command("models")(models.models)
app.command("info")(info.info)
