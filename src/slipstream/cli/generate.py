"""The command `generate`: prompts from arguments, files or stdin; text as it comes, or JSON."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.app import app
from slipstream.cli.report import as_json, prompt_progress, statistics_line
from slipstream.core.errors import InputError
from slipstream.core.rows import read_rows, read_text

if TYPE_CHECKING:
    from slipstream.core.params import SamplingParams
    from slipstream.core.types import RequestOutput
    from slipstream.llm import LLM


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt: raw text, token ids, or a conversation; `conversation` says which way it goes."""

    content: Any
    conversation: bool


@app.command("generate")
@o.shared(o.SAMPLING, o.SPECULATION, o.LOADING)
def generate(
    context: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(help="One prompt or several; - reads stdin.")] = None,
    model: o.Model = o.DEFAULT_MODEL,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file that is one prompt.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option("--jsonl", help="Rows with messages, turns, prompt, question or prompt_token_ids; - for stdin."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    system: o.System = None,
    n: Annotated[int, typer.Option("--n", help="Answers per prompt.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Log-probabilities in --json, with this many rivals.")
    ] = None,
    max_batch: o.MaxBatch = 8,
    no_speculation: o.NoSpeculation = False,
    quiet: o.Quiet = False,
    **options: Any,
) -> None:
    """Answer prompts. Uses the model's chat template unless --raw is given."""
    carry_out(read_tasks(prompts, file, jsonl), context.params)


def carry_out(tasks: Sequence[Task], options: Mapping[str, Any]) -> None:
    """Load the model and answer."""
    params = o.sampling_params(options)
    speculation, quiet, json = not options["no_speculation"], options["quiet"], options["json"]
    with o.load(options) as llm:
        tasks = [prepare(task, options["system"], options["raw"] or not llm.has_chat_template) for task in tasks]
        if len(tasks) == 1 and params.n == 1 and not json:
            stream(llm, tasks[0], params, speculation=speculation, quiet=quiet)
            return
        results = answer(llm, tasks, params, speculation=speculation, quiet=quiet)
        for index, result in enumerate(results):
            if json:
                typer.echo(json_format.dumps(as_json(result, index, llm.name), ensure_ascii=False))
            else:
                show(index, result, many=len(tasks) > 1, quiet=quiet)
    if any(output.finish_reason == "error" for result in results for output in result.outputs):
        raise typer.Exit(2)


def read_tasks(prompts: Sequence[str] | None, file: Path | None, jsonl: Path | None) -> list[Task]:
    """The prompts that the command line names, from exactly one kind of place."""
    given = [bool(prompts), file is not None, jsonl is not None]
    if sum(given) > 1:
        raise InputError("prompts come from arguments, from --file or from --jsonl; give only one of them")
    if jsonl is not None:
        return [Task(row.content, isinstance(row.content, list)) for row in read_rows(jsonl)]
    if file is not None:
        return [Task(read_text(file), False)]
    if not prompts and sys.stdin.isatty():
        raise InputError("there is no prompt; give it as an argument, with --file, or on stdin")
    return [Task(read_text(Path("-")) if prompt == "-" else prompt, False) for prompt in prompts or ["-"]]


def prepare(task: Task, system: str | None, raw: bool) -> Task:
    """Plain text becomes a conversation where the chat template is to be used."""
    if isinstance(task.content, str) and not raw:
        task = Task([{"role": "user", "content": task.content}], True)
    if system is None:
        return task
    if not task.conversation:
        raise InputError("--system needs a chat template; it cannot be used with --raw or token ids")
    return Task([{"role": "system", "content": system}, *task.content], True)


def stream(llm: LLM, task: Task, params: SamplingParams, *, speculation: bool, quiet: bool) -> None:
    """Print one answer as it comes."""
    progress = prompt_progress(quiet)
    request = llm.submit(task.content, params, speculation=speculation, progress=progress)
    try:
        for piece in llm.follow(request):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if not quiet:
        print(statistics_line(request.result()), file=sys.stderr)


def answer(
    llm: LLM, tasks: Sequence[Task], params: SamplingParams, *, speculation: bool, quiet: bool
) -> list[RequestOutput]:
    """All answers at once, side by side."""
    progress = prompt_progress(quiet)
    requests = [llm.submit(task.content, params, speculation=speculation, progress=progress) for task in tasks]
    return llm.finish(requests)


def show(index: int, result: RequestOutput, *, many: bool, quiet: bool) -> None:
    """Print the answers to one prompt."""
    for output in result.outputs:
        if many or len(result.outputs) > 1:
            typer.echo(f"--- prompt {index}, answer {output.index}")
        typer.echo(output.text)
        if output.finish_reason == "error":
            print(f"error: {output.stop_reason}", file=sys.stderr)
    if not quiet:
        print(statistics_line(result, alone=not many), file=sys.stderr)
