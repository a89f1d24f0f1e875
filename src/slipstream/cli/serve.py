"""The command `serve`: one model behind OpenAI's HTTP interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.app import app
from slipstream.core.errors import InputError, install_hint

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.server.service import Served, Service

LOG_LEVELS = ("debug", "info", "warning", "error")
WORKER = {"max_waiting": "max_waiting", "shadow_share": "shadow", "alarm_stops": "shadow_stops"}
"""Options of the worker, and their words on the command line."""


@app.command("serve")
@o.shared(o.SPECULATION, o.LOADING)
def serve(
    context: typer.Context,
    model: o.MaybeNamed = None,
    model_option: o.MaybeModel = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="Name that clients use; MODEL if not given.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key that requests to /v1 must bring.", envvar="SLIPSTREAM_API_KEY")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            "--admin-key", help="Key for /admin; without one there is no /admin.", envvar="SLIPSTREAM_ADMIN_KEY"
        ),
    ] = None,
    max_waiting: Annotated[int, typer.Option("--max-waiting", help="Answers in the queue before 429.", min=1)] = 128,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Tokens of an answer at most, and of a chat that says nothing.", min=1),
    ] = None,
    max_body: Annotated[int, typer.Option("--max-body", help="Bytes of a request at most.", min=1)] = 8_000_000,
    deadline: Annotated[
        float, typer.Option("--deadline", help="Seconds a request may take; 0 for no limit.", min=0)
    ] = 600.0,
    drain: Annotated[
        float, typer.Option("--drain", help="Seconds that requests have to end after SIGTERM.", min=0)
    ] = 30.0,
    shadow: Annotated[
        float, typer.Option("--shadow", help="Share of requests decoded again plainly, 0 to 1.", min=0, max=1)
    ] = 0.0,
    shadow_stops: Annotated[
        bool, typer.Option("--shadow-stops", help="Switch speculation off when the shadow check finds a difference.")
    ] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Texts of prompts and answers in the log.")
    ] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    max_batch: o.MaxBatch = 8,
    **options: Any,
) -> int:
    """Serve a model over HTTP, with OpenAI's interface."""
    return run({**context.params, "model": o.named_model(model, model_option)})


def run(options: Mapping[str, Any]) -> int:
    """Serve until told to stop; returns the exit code."""
    try:
        from slipstream.server.logs import begin_logging
        from slipstream.server.run import serve as serve_forever
        from slipstream.server.service import Settings
    except ModuleNotFoundError as error:
        raise InputError(f"slipstream serve needs {error.name} and others: {install_hint('serve')}") from None
    if options["log_level"] not in LOG_LEVELS:
        raise InputError(f"--log-level is {options['log_level']!r}; choose one of: {', '.join(LOG_LEVELS)}")
    begin_logging(options["log_level"])
    settings = Settings(
        api_key=options["api_key"],
        admin_key=options["admin_key"],
        max_body=options["max_body"],
        max_tokens=options["max_tokens"],
        deadline_s=options["deadline"] or None,
        drain_s=options["drain"],
        log_prompts=options["log_prompts"],
    )

    def load(service: Service) -> Served:
        llm = o.load(options)
        called = names(options["name"], options["model"], llm.name)
        return served(llm, service, called, **{name: options[word] for name, word in WORKER.items()})

    return serve_forever(load, settings, options["host"], options["port"])


def names(given: str | None, model: str, own: str) -> tuple[str, ...]:
    """What clients may call the model; replies use the first. A path of the server's is nothing to tell them."""
    known = [given, None if "/" in model or "\\" in model else model, own]
    return tuple(dict.fromkeys(name for name in known if name))


def served(llm: LLM, service: Service, called: tuple[str, ...] = (), **options: Any) -> Served:
    """A loaded model as the server takes it, its engine running.

    called: its names, its own if there are none. options: of its worker.
    """
    from slipstream.server.service import GATHER_S, Served

    worker = llm.worker(on_fault=service.fail, gather_s=GATHER_S, **options)
    worker.start()
    return Served(
        names=called or (llm.name,),
        fingerprint=llm.fingerprint(),
        max_context=llm.max_context,
        vocabulary=llm.tokenizer,
        vocabulary_size=llm.target.vocab_size,
        encode=llm.encode,
        worker=worker,
        drafters=llm.drafters,
        reload=llm.reload,
        close=llm.close,
    )
