"""Options that several commands share, and what they become: settings of an LLM, sampling parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.llm import LLM

DEFAULT_MODEL = "smollm2"
MODEL_HELP = "Name, hub id, GGUF file or folder."

Command = TypeVar("Command", bound=Callable[..., Any])
Group = Mapping[str, tuple[Any, Any]]
"""Options by the name of their parameter: how they are declared, and their default."""

Named = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
MaybeNamed = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} {DEFAULT_MODEL} if not given.", show_default=False)
]
MaybeModel = Annotated[str | None, typer.Option("--model", "-m", help="MODEL, as `generate` takes it.")]
System = Annotated[str | None, typer.Option("--system", help="System message put before the conversation.")]
MaxBatch = Annotated[int, typer.Option("--max-batch", help="Answers decoded side by side at most.")]
MaxNodes = Annotated[int, typer.Option("--max-nodes", help="Draft nodes per pass at most; 0 is plain decoding.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens of the answer at most.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Plain decoding, one token per pass.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No statistics and no progress on stderr.")]


def option(kind: Any, name: str, text: str, default: Any = None, metavar: str | None = None) -> tuple[Any, Any]:
    """One option of a group; kind: its Python type."""
    return Annotated[kind, typer.Option(name, help=text, metavar=metavar)], default


SAMPLING: Group = {
    "max_tokens": (MaxTokens, 256),
    "temperature": (Temperature, 0.0),
    "top_p": option(float, "--top-p", "Likeliest tokens up to this mass; 1 is off.", 1.0),
    "top_k": option(int, "--top-k", "Likeliest tokens; 0 is off.", 0),
    "min_p": option(float, "--min-p", "Least probability beside the likeliest; 0 is off.", 0.0),
    "seed": option(int | None, "--seed", "Same seed, same answer."),
    "stop": option(list[str] | None, "--stop", "Text that ends the answer; repeatable.", metavar="TEXT"),
    "stop_token_ids": option(
        list[int] | None, "--stop-token-id", "Token that ends the answer; repeatable.", metavar="ID"
    ),
    "min_tokens": option(int, "--min-tokens", "No end before this many tokens.", 0),
    "ignore_eos": option(bool, "--ignore-eos", "Go on past the model's own end.", False),
    "presence_penalty": option(float, "--presence-penalty", "Taken from tokens that came before.", 0.0),
    "frequency_penalty": option(float, "--frequency-penalty", "Taken per time a token came before.", 0.0),
    "repetition_penalty": option(float, "--repetition-penalty", "Divides tokens seen; 1 is off.", 1.0),
    "logit_bias": option(list[str] | None, "--logit-bias", "ID=VALUE; repeatable.", metavar="ID=VALUE"),
}
"""Named as in SamplingParams."""

SPECULATION: Group = {
    "draft": option(
        str,
        "--draft",
        "none, auto, lookup, suffix, recycling, lookahead, corpus:PATH, model:NAME, head:PATH; commas combine.",
        "auto",
        "HOW",
    ),
    "draft_model": option(str | None, "--draft-model", "Model that --draft auto adds."),
    "max_nodes": (MaxNodes, 8),
    "shape": option(str | None, "--shape", "chain or tree.", metavar="SHAPE"),
    "verifier": option(str, "--verifier", "coupled, rejection, block or typical (lossy).", "coupled"),
    "controller": option(str, "--controller", "adaptive or fixed.", "adaptive", "HOW"),
    "recycling_table": option(
        str | None, "--recycling-table", "File in which recycling keeps what it learned.", metavar="PATH"
    ),
}
LOADING: Group = {
    "max_context": option(int | None, "--max-context", "Tokens of prompt and answer together."),
    "threads": option(int | None, "--threads", "Threads; chosen by itself when not given."),
    "runtime": option(str | None, "--runtime", "native or transformers; native where it can.", metavar="NAME"),
    "device": option(str | None, "--device", "cpu, cuda, mps or auto (transformers runtime).", metavar="NAME"),
    "dtype": option(str | None, "--dtype", "float32, bfloat16 or float16 (transformers runtime).", metavar="TYPE"),
}
"""These two are named as in LLM."""


def shared(*groups: Group, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command the options of groups, which it finds in `typer.Context.params`. defaults: where it has its own.

    The command's last parameter, `**options`, stands for them.
    """

    def widen(command: Command) -> Command:
        declared = inspect.signature(command, eval_str=True)
        own = [each for each in declared.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, default), annotation=kind
            )
            for group in groups
            for name, (kind, default) in group.items()
        ]
        command.__dict__["__signature__"] = declared.replace(parameters=[*own, *more])
        return command

    return widen


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters out of a command's options."""
    given = {name: options[name] for name in SAMPLING}
    given["logit_bias"] = dict(map(bias, options["logit_bias"] or ()))
    return SamplingParams(**given, n=options.get("n", 1), logprobs=options.get("logprobs"))


def bias(text: str) -> tuple[int, float]:
    """ID=VALUE as numbers."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"--logit-bias is {text!r}; write it as ID=VALUE, for example 42=-100") from None


def named_model(argument: str | None, option: str | None) -> str:
    """The model of a command that takes it either way. Raises InputError for two of them."""
    if argument and option and argument != option:
        raise InputError(f"two models are named, {argument} and --model {option}; name one")
    return argument or option or DEFAULT_MODEL


def load(options: Mapping[str, Any]) -> LLM:
    """The LLM that a command's options ask for."""
    from slipstream.llm import LLM

    settings = {name: options[name] for name in (*SPECULATION, *LOADING)}
    return LLM(options["model"], max_batch=options.get("max_batch", 1), **settings)
