"""Options that several commands share, and what they become: settings of an LLM, sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.llm import LLM

DEFAULT_MODEL = "smollm2"

Model = Annotated[str, typer.Option("--model", "-m", help="Name, hub id, GGUF file or folder.")]
System = Annotated[str | None, typer.Option("--system", help="System message put before the conversation.")]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        help="none, auto, lookup, suffix, recycling, lookahead, corpus:PATH, model:NAME, head:PATH; commas combine.",
        metavar="HOW",
    ),
]
DraftModel = Annotated[str | None, typer.Option("--draft-model", help="Model that --draft auto adds.")]
RecyclingTable = Annotated[
    str | None, typer.Option("--recycling-table", help="File in which recycling keeps what it learned.", metavar="PATH")
]
MaxNodes = Annotated[int, typer.Option("--max-nodes", help="Draft nodes per pass at most; 0 is plain decoding.")]
Shape = Annotated[str | None, typer.Option("--shape", help="chain or tree.", metavar="SHAPE")]
Verifier = Annotated[str, typer.Option("--verifier", help="coupled, rejection, block or typical (lossy).")]
Controller = Annotated[str, typer.Option("--controller", help="adaptive or fixed.", metavar="HOW")]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Plain decoding, one token per pass.")]
MaxContext = Annotated[int | None, typer.Option("--max-context", help="Tokens of prompt and answer together.")]
MaxBatch = Annotated[int, typer.Option("--max-batch", help="Answers decoded side by side at most.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads; chosen by itself when not given.")]
Runtime = Annotated[
    str | None, typer.Option("--runtime", help="native or transformers; native where it can.", metavar="NAME")
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, mps or auto (transformers runtime).", metavar="NAME")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16 (transformers runtime).", metavar="TYPE")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens of the answer at most.")]
MinTokens = Annotated[int, typer.Option("--min-tokens", help="No end before this many tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Likeliest tokens up to this mass; 1 is off.")]
TopK = Annotated[int, typer.Option("--top-k", help="Likeliest tokens; 0 is off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Least probability beside the likeliest; 0 is off.")]
Presence = Annotated[float, typer.Option("--presence-penalty", help="Taken from tokens that came before.")]
Frequency = Annotated[float, typer.Option("--frequency-penalty", help="Taken per time a token came before.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="Divides tokens seen; 1 is off.")]
LogitBias = Annotated[list[str] | None, typer.Option("--logit-bias", help="ID=VALUE; repeatable.", metavar="ID=VALUE")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer; repeatable.", metavar="TEXT")
]
StopIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="Token that ends the answer; repeatable.", metavar="ID")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer.")]
Choices = Annotated[int, typer.Option("--n", help="Answers per prompt.")]
Logprobs = Annotated[int | None, typer.Option("--logprobs", help="Log-probabilities in --json, with this many rivals.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No statistics and no progress on stderr.")]


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters out of a command's options."""
    same = (
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "stop", "ignore_eos", "seed",
    )  # fmt: skip
    return SamplingParams(
        **{name: options[name] for name in same},
        n=options.get("n", 1),
        logprobs=options.get("logprobs"),
        stop_token_ids=options["stop_token_id"],
        logit_bias=dict(map(bias, options["logit_bias"] or ())),
    )


def bias(text: str) -> tuple[int, float]:
    """ID=VALUE as numbers."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"--logit-bias is {text!r}; write it as ID=VALUE, for example 42=-100") from None


def load(options: Mapping[str, Any]) -> LLM:
    """The LLM that a command's options ask for."""
    from slipstream.llm import LLM

    names = (
        "draft_model",
        "max_nodes",
        "shape",
        "verifier",
        "controller",
        "max_context",
        "threads",
        "runtime",
        "device",
        "dtype",
    )
    settings = {name: options[name] for name in names}
    settings["recycling_table"] = options.get("recycling_table")
    settings["max_batch"] = options.get("max_batch", 1)
    return LLM(options["model"], options["draft"], **settings)
