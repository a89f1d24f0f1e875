"""The commands `bench` and `bench serve`: settings of speculation on a model of yours, load on a server."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from slipstream.cli import options as o
from slipstream.cli.app import app
from slipstream.core.errors import InputError, ModelError
from slipstream.core.rows import PromptRow, read_rows

if TYPE_CHECKING:
    from slipstream.bench.load import Call, Load
    from slipstream.core.types import RequestOutput
    from slipstream.llm import LLM

INSTALL = "slipstream bench serve needs httpx: pip install 'slipstream[bench]'"
MOST_PORT = 65535
QUESTIONS = (
    "Explain in a few sentences why the sky is blue and sunsets are red.",
    "Repeat this text, but write Berlin instead of Paris: Paris is a large city on a river. Many people visit Paris "
    "in spring, when the parks of Paris are green, and in autumn, when the streets of Paris are quiet.",
    "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Show every step.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and three examples.",
)
"""Asked when there is no rows file."""
Rows = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        help='Lines of JSON: {"messages": [...]}, {"turns": [...]} or {"prompt": "..."}.',
        exists=True,
        dir_okay=False,
    ),
]
Out = Annotated[Path | None, typer.Option("--json", help="Write every number to this file.", dir_okay=False)]


class DefaultGroup(TyperGroup):
    """`bench MODEL` is `bench model MODEL`; `bench serve` is itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the first command's name in front where no command is named."""
        if not args or args[0] not in (*self.commands, "--help", "-h"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


group = typer.Typer(cls=DefaultGroup, rich_markup_mode=None)
app.add_typer(group, name="bench", help="Measure speculation on a model (`bench MODEL`), or a server (`bench serve`).")


@group.command("model")
@o.shared(o.LOADING)
def model(
    model: o.Named = o.DEFAULT_MODEL,
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", help="A setting to compare with plain decoding; repeatable.", metavar="HOW"),
    ] = None,
    rows: Rows = None,
    limit: Annotated[int | None, typer.Option("--limit", help="First rows only.", min=1)] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Times each row is answered per setting.", min=1)] = 5,
    json: Out = None,
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of every answer.")] = 0,
    max_nodes: o.MaxNodes = 16,
    quiet: o.Quiet = False,
    **options: Any,
) -> None:
    """Plain decoding against settings of speculation, interleaved on your own prompts. Ctrl-C ends it early."""
    from slipstream.bench import settings as bench
    from slipstream.core.params import SamplingParams
    from slipstream.llm import LLM

    prompts = rows_of(rows, limit)
    specs = {name: drafters_of(name) for name in draft or ["auto"]}
    every = ",".join(dict.fromkeys(word for words in specs.values() for word in words)) or "none"
    with LLM(model, every, max_nodes=max_nodes, **options) as llm:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        ask = asker(llm, specs, prompts, params)
        names = [bench.PLAIN, *specs]
        runs = bench.measure(ask, names, len(prompts), repeats, lambda done, of: show(done, of, quiet))
        found = bench.summary(runs)
        if not found:
            raise InputError(
                f"no row got {bench.MINIMUM} tokens from all settings; raise --max-tokens, give other --rows"
            )
        typer.echo(bench.table(found))
        if json is not None:
            head: dict[str, Any] = {
                "model": llm.name,
                "describe": llm.describe().splitlines(),
                "machine": bench.machine(),
            }
            head |= {"version": version(), "kernels": kernels(llm), "rows": len(prompts), "max_tokens": max_tokens}
            runs_made = [{name: getattr(run, name) for name in run.__slots__} for run in runs]
            write(json, json_format.dumps({**head, "summary": found, "runs": runs_made}, indent=1))


def drafters_of(setting: str) -> list[str]:
    """The drafters of a setting, each as a word of --draft."""
    from slipstream.drafters import parse

    return [str(spec) for spec in parse(setting)]


def asker(llm: LLM, specs: dict[str, list[str]], prompts: Sequence[PromptRow], params: Any) -> Any:
    """Answers a row under a setting from cold caches; all settings share the loaded model and drafters."""
    from slipstream.core.params import SpeculationSetting

    loaded = {name.partition(":")[0]: name for name in llm.drafters}

    def ask(setting: str, row: int) -> RequestOutput:
        llm.forget()
        words = [loaded[word.partition(":")[0]] for word in specs.get(setting, ())]
        how = SpeculationSetting(drafters=words) if words else False
        return llm.finish([llm.submit(prompts[row].content, params, speculation=how)])[0]

    return ask


def kernels(llm: LLM) -> dict[str, Any]:
    """What computed."""
    from slipstream.kernels import info

    return info() if llm.runtime.name == "native" else {"kernels": getattr(llm.target, "kernels", str)()}


@group.command("serve")
def serve(
    url: Annotated[str, typer.Option("--url", help="Address up to and with /v1.")] = "http://127.0.0.1:8000/v1",
    rows: Rows = None,
    requests: Annotated[int | None, typer.Option("--requests", help="In all; one per row if not given.", min=1)] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Requests at a time.", min=1)] = 4,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests per second, Poisson, instead of --concurrency.", min=1e-3)
    ] = None,
    name: Annotated[str | None, typer.Option("--model", "-m", help="The server's first if not given.")] = None,
    max_tokens: o.MaxTokens = 128,
    ttft_ms: Annotated[float | None, typer.Option("--ttft-ms", help="Objective: time to first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot-ms", help="Objective: time per token.")] = None,
    extra: Annotated[
        str | None, typer.Option("--extra", help='JSON added to requests, as {"speculation": false}.', metavar="JSON")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the arrivals.")] = 0,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY")] = None,
    json: Out = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a report with plots.", dir_okay=False)] = None,
    quiet: o.Quiet = False,
) -> None:
    """Load any OpenAI-compatible server with streamed chats: latencies, throughput, goodput. Ctrl-C ends it early."""
    from slipstream.bench.load import Load
    from slipstream.bench.load_report import as_text, summary
    from slipstream.bench.load_report import page as html

    messages = [row.messages for row in rows_of(rows)]
    load = Load(
        url.rstrip("/"), messages, requests or len(messages), concurrency, rate, name, max_tokens, api_key, seed,
        extra=_object(extra),
    )  # fmt: skip
    calls = run_load(load, lambda done: show(done, load.requests, quiet))
    limits = [None if value is None else value / 1e3 for value in (ttft_ms, tpot_ms)]
    found = summary(calls, *limits)
    typer.echo(as_text(found))
    names = ("url", "requests", "concurrency", "rate", "model", "max_tokens", "seed", "extra")
    settings = {key: getattr(load, key) for key in names} | {"client": version()}
    if json is not None:
        each = [{key: getattr(call, key) for key in call.__slots__} for call in calls]
        write(json, json_format.dumps({"settings": settings, **found, "calls": each}, indent=1))
    if page is not None:
        write(page, html(found, calls, settings))
    if not found["completed"]:
        raise typer.Exit(2)


def run_load(load: Load, progress: Any) -> list[Call]:
    """The calls of a run in an event loop of its own. Raises ModelError without httpx, InputError for a bad address."""
    import asyncio

    try:
        import httpx
    except ImportError:
        raise ModelError(INSTALL) from None
    from slipstream.bench.load import run

    try:
        address = httpx.URL(load.url)
    except httpx.InvalidURL:
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host or (address.port or 0) > MOST_PORT:
        raise InputError(f"--url is {load.url!r}; it must be like http://127.0.0.1:8000/v1")

    async def everything() -> list[Call]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits) as client:
            return await run(load, client, progress)

    return asyncio.run(everything())


def rows_of(path: Path | None, limit: int | None = None) -> list[PromptRow]:
    """Rows of a file, or the questions that are asked without one."""
    if path is None:
        return [PromptRow([{"role": "user", "content": text}]) for text in QUESTIONS][:limit]
    return read_rows(path, limit)


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json_format.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f'--extra is {text!r}; write a JSON object, such as {{"speculation": false}}')
    return found


def show(done: int, of: int, quiet: bool) -> None:
    """Progress on stderr, in place on a terminal."""
    if not quiet and sys.stderr.isatty():
        print(f"\r{done} of {of}", end="\n" if done == of else "", file=sys.stderr, flush=True)


def version() -> str:
    """Slipstream's version."""
    from importlib.metadata import version as version_of

    return f"slipstream {version_of('slipstream')}"


def write(path: Path, text: str) -> None:
    """Write a result, its folder made where missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
