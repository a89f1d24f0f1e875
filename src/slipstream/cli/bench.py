"""The commands `bench` and `bench serve`: settings of speculation on a model of yours, load on a server."""

from __future__ import annotations

import json as json_format
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from slipstream.cli import options as o
from slipstream.cli.app import app
from slipstream.core.errors import InputError, ModelError, install_hint
from slipstream.core.rows import PromptRow, read_rows

if TYPE_CHECKING:
    from slipstream.bench.load import Call, Load
    from slipstream.engine.engine import Engine
    from slipstream.llm import LLM

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
NODES = re.compile(r"(.*?)(?:@(\d+)(t?))?", re.DOTALL)
"""A value of --draft, and the number of nodes behind it."""
Temperatures = Annotated[
    list[float] | None,
    typer.Option("--temperature", "-t", help="0 is greedy, and the default; rows take several by turns."),
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
        typer.Option(
            "--draft",
            help="A setting to compare with plain decoding; repeatable. With @N behind it always N nodes in a chain, "
            "with @Nt in a tree.",
            metavar="HOW",
        ),
    ] = None,
    rows: Rows = None,
    random_tokens: Annotated[
        int, typer.Option("--random-tokens", help="So many prompts of random tokens, besides --rows.", min=0)
    ] = 0,
    limit: Annotated[int | None, typer.Option("--limit", help="First rows only.", min=1)] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Rows decoded side by side.", min=1)] = 1,
    repeats: Annotated[int, typer.Option("--repeats", help="Times each row is answered per setting.", min=1)] = 5,
    json: Out = None,
    max_tokens: o.MaxTokens = 128,
    temperature: Temperatures = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of --max-tokens tokens, all of them.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of every answer.")] = 0,
    max_nodes: o.MaxNodes = 8,
    quiet: o.Quiet = False,
    **options: Any,
) -> None:
    """Plain decoding against settings of speculation, interleaved on your own prompts. Ctrl-C ends it early."""
    from slipstream.bench import settings as bench
    from slipstream.bench.machine import machine
    from slipstream.core.params import SamplingParams
    from slipstream.llm import LLM

    prompts = [] if random_tokens and rows is None else rows_of(rows, limit)
    settings = [Setting.of(name) for name in dict.fromkeys(draft or ["auto"])]
    heat = temperature or [0.0]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=each, seed=seed, ignore_eos=ignore_eos) for each in heat
    ]
    with LLM(model, all_of(settings), max_nodes=max_nodes, max_batch=concurrency, **options) as llm:
        tasks = [bench.Task(row.category, [llm.encode(row.content)[1]]) for row in prompts]
        tasks = bench.side_by_side(tasks + bench.random_tasks(random_tokens, llm.target.vocab_size), concurrency)
        engines = {bench.PLAIN: llm.beside([])} | {each.name: each.engine(llm, max_nodes) for each in settings}
        ask, categories = bench.asker(engines, tasks, params), [task.category for task in tasks]
        runs = bench.measure(ask, list(engines), categories, repeats, lambda done, of: show(done, of, quiet))
        found = bench.summary(runs)
        if not found:
            raise InputError(
                f"no row got {bench.MINIMUM} tokens from all settings; raise --max-tokens, give other --rows"
            )
        typer.echo(bench.table(found))
        if json is not None:
            head: dict[str, Any] = {"model": llm.name, "describe": llm.describe().splitlines(), "machine": machine()}
            head |= {"version": version(), "kernels": kernels(llm), "rows": len(tasks), "max_tokens": max_tokens}
            head |= {"temperature": heat, "ignore_eos": ignore_eos, "seed": seed, "concurrency": concurrency}
            write(json, json_format.dumps({**head, "summary": found, "runs": list(map(asdict, runs))}, indent=1))


@dataclass(frozen=True, slots=True)
class Setting:
    """One --draft: what is asked, and the nodes that are drafted whatever they cost, where it says so."""

    name: str
    draft: str
    nodes: int | None
    shape: str
    kinds: frozenset[str]

    @classmethod
    def of(cls, name: str) -> Setting:
        """Out of HOW, HOW@N or HOW@Nt. Raises InputError."""
        from slipstream.drafters import parse

        draft, nodes, tree = NODES.fullmatch(name).groups()  # type: ignore[union-attr]  # it matches any text
        kinds = frozenset(spec.kind for spec in parse(draft))
        return cls(name, draft, int(nodes) if nodes else None, "chain" if nodes and not tree else "tree", kinds)

    def engine(self, llm: LLM, max_nodes: int) -> Engine:
        """An engine of its own, which shares the loaded model and drafters with the others."""
        kinds = self.kinds | {"head"} if "auto" in words_of(self.draft) else self.kinds
        if self.nodes is None:
            return llm.beside(kinds, "adaptive", max_nodes, self.shape)
        return llm.beside(kinds, "fixed", self.nodes, self.shape)


def words_of(draft: str) -> list[str]:
    """The words of a value of --draft."""
    return [word.strip() for word in draft.split(",")]


def all_of(settings: Sequence[Setting]) -> str:
    """A value of --draft that loads the drafters of all settings, one of each kind. Raises InputError."""
    words = dict.fromkeys(word for setting in settings for word in words_of(setting.draft) if word != "none")
    if "auto" in words:
        if any(word.startswith("head:") for word in words):
            raise InputError(
                "auto may bring a head of its own; beside head:PATH write suffix,recycling instead of auto"
            )
        words = {word: None for word in words if word not in ("suffix", "recycling")}
    return ",".join(words) or "none"


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
        each = list(map(asdict, calls))
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
        raise ModelError(f"slipstream bench serve needs httpx: {install_hint('bench')}") from None
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
