"""LLM: builds everything from settings, and answers prompts and conversations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slipstream.control.base import Controller
from slipstream.core.errors import InputError, NonFiniteError, UnsupportedError
from slipstream.core.params import SamplingParams, Speculating
from slipstream.core.types import Piece, RequestOutput
from slipstream.drafters import DraftSpec, Materials, build, drawing, parse
from slipstream.targets.runtime import Choice, choose, load

if TYPE_CHECKING:
    from slipstream.engine.request import Request
    from slipstream.engine.worker import Worker
    from slipstream.models.files import ModelFile
    from slipstream.models.tokenizer import Tokenizer
    from slipstream.targets.base import Target

__all__ = ["CONTROLLERS", "LLM"]

log = logging.getLogger(__name__)

CONTROLLERS = ("adaptive", "fixed")
KEPT_PREFIXES = 4
"""Finished answers whose cache rows stay for the next prompt that begins alike, such as the next turn of a chat."""

Prompt = str | Mapping[str, Any]
"""Raw text, or {"prompt_token_ids": [...]}; {"prompt": text} is the text."""
Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None]


class LLM:
    """A model with its drafters.

    model: a name (`slipstream models` lists them), a hub id, a GGUF file or a folder. draft: none, auto (suffix and
    recycling), lookup, suffix, recycling, lookahead, corpus:PATH, model:NAME, combined by commas; draft_model: the
    model that "auto" adds. max_nodes: draft nodes per row and pass, 0 for plain decoding. shape: chain or tree (None:
    tree where the verifier takes trees). verifier: coupled (the same tokens as plain decoding), rejection or block
    (the same distribution), typical (lossy). controller: adaptive drafts only as much as pays on this machine, fixed
    always max_nodes. max_context: None takes the model's own. recycling_table: file in which "recycling" keeps what it
    learned from one run to the next (None: nowhere). max_batch: rows per pass. threads: None chooses. runtime: native,
    transformers, or None for native where it can. device (cpu, cuda, mps, auto) and dtype (float32, bfloat16, float16)
    other than the CPU and the file's own are for transformers. Raises InputError, ModelError or UnsupportedError; what
    cannot work together is refused before any weight is read.
    """

    def __init__(
        self,
        model: str | Path,
        draft: str = "auto",
        *,
        draft_model: str | None = None,
        max_nodes: int = 8,
        shape: str | None = None,
        verifier: str = "coupled",
        controller: str = "adaptive",
        max_context: int | None = None,
        max_batch: int = 8,
        threads: int | None = None,
        runtime: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        recycling_table: str | Path | None = None,
    ) -> None:
        from slipstream.engine.engine import Engine
        from slipstream.verify import CLASSICAL, make_verifier

        specs = parse(draft, draft_model)
        check_drafts(draft, specs, draft_model, recycling_table)
        shape = shape or ("chain" if verifier == "block" else "tree")
        governor = make_controller(controller, max_nodes, shape)
        check_numbers(max_batch=max_batch, threads=threads, max_context=max_context)
        check_rules(verifier, shape, specs)
        file = open_named(model)
        draft_files = open_drafts(specs, file, verifier in CLASSICAL)
        self.runtime = choose(file, runtime, device, dtype)
        slots = max_batch + KEPT_PREFIXES
        target = load_target(file, max_context, slots, threads, self.runtime)

        def load_draft(name: str) -> Target:
            drafted, _ = draft_files[name]
            context = min(target.max_context, drafted.config.max_context)
            return load_target(drafted, context, slots, threads, choose(drafted, runtime, device, dtype))

        self._file, self._closed = file, False
        self.draft = ",".join(map(str, specs)) or "none"
        self.max_nodes, self.shape, self.verifier, self.controller = max_nodes, shape, verifier, controller
        self.target = target
        self.tokenizer: Tokenizer = file.tokenizer()
        if specs and max_nodes:
            start_measured(governor, target, cost_key(file, self.runtime))
        foreign = {name: drafted.tokenizer() for name, (drafted, differs) in draft_files.items() if differs}
        given = Materials(
            target.vocab_size, load_draft, verifier in CLASSICAL, self.tokenizer, foreign, recycling_table
        )
        self._drafters = build(specs, given)
        self._engine = Engine(
            target,
            self.tokenizer,
            make_verifier(verifier, count_near_ties=not target.row_invariant),
            governor,
            self._drafters,
            max_batch=max_batch,
            keep_prefixes=KEPT_PREFIXES,
        )

    @property
    def name(self) -> str:
        """The model's name."""
        return self._file.name

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.target.max_context

    @property
    def has_chat_template(self) -> bool:
        """True when `chat` can render conversations for this model."""
        return self._file.chat_template is not None

    def describe(self) -> str:
        """Three lines: the model, the runtime and why it, how it drafts."""
        config, megabytes = self._file.config, self._file.weights_bytes / 1e6
        drafting = f"draft {self.draft}, {self.controller}, up to {self.max_nodes} nodes, {self.verifier}"
        model = f"{self.name} ({config.architecture}, {self._file.weight_types}, {megabytes:.0f} MB)"
        where = f"{self.runtime.name} on {self.runtime.device or 'cpu'} ({self.runtime.reason})"
        return f"{model}\n{where}\n{drafting}"

    def fingerprint(self) -> str:
        """What answers depend on besides the request: version, weights, kernels, noise. Reads all weights."""
        from importlib.metadata import version

        from slipstream.kernels import native
        from slipstream.models.fingerprint import weights_fingerprint
        from slipstream.sampling.noise import NOISE_VERSION

        kernels = native.active() if self.runtime.name == "native" else f"torch-{self.runtime.device or 'cpu'}"
        weights = weights_fingerprint(self._file.path)
        return f"slipstream-{version('slipstream')}-{weights}-{kernels}-noise{NOISE_VERSION}"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculating = True,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answers to raw prompts, in order; one prompt or several, one set of parameters or one per prompt.

        progress: called with (tokens read, tokens in all) while a prompt is read. A single prompt that fails raises
        NonFiniteError; among several, its answers carry finish_reason "error" and the others are not affected.
        """
        several = list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, str) else [prompts]
        return self._run([self._raw(prompt) for prompt in several], sampling_params, speculation, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculating = True,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, through the model's chat template; otherwise as `generate`."""
        one = not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)
        several: Sequence[Any] = [messages] if one else messages
        return self._run([self._conversation(each) for each in several], sampling_params, speculation, progress)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: Speculating = True,
        progress: Progress | None = None,
    ) -> Generator[Piece, None, None]:
        """Pieces of the answers to one raw prompt (text or token ids) or one conversation (messages), as they come.

        Everything wrong with the prompt is raised here, before the first piece. Leaving the iteration cancels.
        """
        request = self.submit(prompt, sampling_params, speculation=speculation, progress=progress)
        return self.follow(request)

    def submit(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: Speculating = True,
        progress: Progress | None = None,
    ) -> Request:
        """Queue one prompt or conversation without running it: `follow` yields its pieces, `finish` all of it."""
        text, tokens = self.encode(prompt)
        return self._add(text, tokens, sampling_params, speculation, progress)

    def encode(
        self, prompt: Prompt | Messages, variables: Mapping[str, Any] | None = None
    ) -> tuple[str | None, list[int]]:
        """Text and token ids of a raw prompt, or of a conversation rendered by the chat template.

        variables: further names for the template, such as enable_thinking.
        """
        return self._raw(prompt) if isinstance(prompt, (str, Mapping)) else self._conversation(prompt, variables)

    def follow(self, request: Request) -> Generator[Piece, None, None]:
        """Run a submitted request and yield its pieces; dropping the iterator cancels. Raises NonFiniteError."""

        def pieces() -> Generator[Piece, None, None]:
            try:
                yield Piece(0, "", [])
                yield from self._engine.stream(request)
            finally:
                self._engine.cancel(request)
            if request.error:
                raise NonFiniteError(request.error)

        # Only a generator that has begun is told when it is dropped.
        begun = pieces()
        next(begun)
        return begun

    def finish(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run submitted requests side by side to their ends; results in their order, failures as in `generate`."""
        results = self._engine.run(requests)
        if len(requests) == 1 and requests[0].error:
            raise NonFiniteError(requests[0].error)
        return results

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        speculation: Speculating,
        progress: Progress | None,
    ) -> list[RequestOutput]:
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one or one each")
        requests: list[Request] = []
        try:
            for (text, tokens), one in zip(prompts, each, strict=True):
                requests.append(self._add(text, tokens, one, speculation, progress))
        except BaseException:
            for request in requests:
                self._engine.cancel(request)
            raise
        return self.finish(requests)

    def _add(
        self,
        text: str | None,
        tokens: list[int],
        params: SamplingParams | None,
        speculation: Speculating,
        progress: Progress | None,
    ) -> Request:
        if self._closed:
            raise InputError("this LLM is closed; make a new one")
        if params is not None and not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params is a {type(params).__name__}; it must be SamplingParams")
        request = self._engine.add(tokens, params, speculation=speculation, progress=progress)
        request.prompt = text
        return request

    def _raw(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special=True)
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
            return self._raw(prompt["prompt"])
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            from slipstream.engine.prompt import whole_numbers

            return None, whole_numbers(prompt["prompt_token_ids"])
        raise InputError(f"a prompt is {prompt!r:.80}; it must be a text or {{'prompt_token_ids': [...]}}")

    def _conversation(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> tuple[str, list[int]]:
        from slipstream.models.chat import chat_prompt

        prompt = chat_prompt(self._file, messages, variables=variables)
        return prompt.text, prompt.token_ids

    def worker(self, **options: Any) -> Worker:
        """A thread, not started yet, that runs this model's requests; options as in `Worker`.

        While it works, leave `generate` and the like alone: they would take turns with it.
        """
        from slipstream.engine.worker import Worker

        return Worker(self._engine, **options)

    def forget(self) -> None:
        """Drop what earlier answers left, cached prefixes and recycled tokens, as if the next prompt were the first."""
        self._engine.forget()
        for drafter in self._drafters:
            getattr(drafter, "forget", lambda: None)()

    def close(self) -> None:
        """Free the cache, save what drafters keep; the object is of no use after it.

        Raises InputError when the recycling table cannot be written.
        """
        self._engine.forget()
        if not self._closed:
            for drafter in self._drafters:
                getattr(drafter, "close", lambda: None)()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_controller(name: str, max_nodes: int, shape: str) -> Controller:
    """The controller of this name. Raises InputError for an unknown name, shape or number of nodes."""
    from slipstream.control.adaptive import Adaptive
    from slipstream.control.fixed import Fixed

    if name not in CONTROLLERS:
        raise InputError(f"unknown controller {name!r}; choose one of: {', '.join(CONTROLLERS)}")
    return Fixed(max_nodes, shape) if name == "fixed" else Adaptive(max_nodes, shape)


def check_drafts(
    draft: str, specs: Sequence[DraftSpec], draft_model: str | None, recycling_table: str | Path | None
) -> None:
    """Refuse settings of drafters that are not asked for."""
    if draft_model is not None and DraftSpec("model", draft_model) not in specs:
        raise InputError(f"draft_model is {draft_model!r} but draft is {draft!r}; say draft='auto'")
    if recycling_table is not None and DraftSpec("recycling") not in specs:
        raise InputError(f"recycling_table is given but draft is {draft!r}; add recycling to it")


def start_measured(governor: Controller, target: Target, key: Sequence[object]) -> None:
    """Let a controller that judges by costs know those of this target from the beginning."""
    from slipstream.control.adaptive import Adaptive
    from slipstream.control.measure import start_costs

    if isinstance(governor, Adaptive):
        governor.start_from(start_costs(target, key))


def cost_key(file: ModelFile, runtime: Choice) -> tuple[object, ...]:
    """What the cost of a pass depends on, the machine taken for granted."""
    from importlib.metadata import version

    from slipstream.kernels import native

    model = (file.name, str(file.config), file.weight_types, file.weights_bytes)
    return (
        *model,
        runtime.name,
        runtime.device,
        runtime.dtype,
        native.active(),
        native.threads(),
        version("slipstream"),
    )


def check_rules(verifier: str, shape: str, specs: Sequence[DraftSpec]) -> None:
    """Refuse what the verifier cannot do exactly."""
    from slipstream.verify import CLASSICAL, check_combination

    names = [spec.kind for spec in specs]
    check_combination(verifier, shape, names, drawing(specs, verifier in CLASSICAL))


def check_numbers(**settings: int | None) -> None:
    """Raise InputError unless each setting is None or a whole number of 1 or more."""
    for name, value in settings.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} is {value!r}; it must be a whole number, 1 or more")


def open_named(model: str | Path) -> ModelFile:
    """A model by name or path, opened but not loaded; short names that are not here yet are fetched."""
    from slipstream.models.files import open_model
    from slipstream.models.registry import ensure

    return open_model(ensure(model))


def load_target(
    file: ModelFile, max_context: int | None, slots: int, threads: int | None, choice: Choice | None = None
) -> Target:
    """An opened model, loaded by the runtime chosen for it (None: chosen here)."""
    return load(file, choice or choose(file), max_context, slots, threads)


def open_drafts(specs: Sequence[DraftSpec], target: ModelFile, classical: bool) -> dict[str, tuple[ModelFile, bool]]:
    """The draft models by name, as `open_draft` gives them."""
    names = [spec.argument for spec in specs if spec.kind == "model"]
    return {name: open_draft(name, target, classical) for name in names}


def open_draft(name: str, target: ModelFile, classical: bool = False) -> tuple[ModelFile, bool]:
    """A draft model, opened, and whether its text must be translated because its tokens are not the target's.

    Raises InputError where translation is no option: the classical verifiers need the draft model's own distribution.
    """
    from slipstream.drafters.small_model import check_vocabulary

    file = open_named(name)
    ours, theirs = target.tokenizer(), file.tokenizer()
    if ours.fingerprint() == theirs.fingerprint():
        return file, False
    if classical:
        texts = [[maker.token_text(index) for index in range(maker.vocab_size)] for maker in (ours, theirs)]
        check_vocabulary(texts[0], texts[1], target.name, file.name)
        raise UnsupportedError(f"draft model {file.name} and target {target.name} differ in the bytes of some tokens")
    log.warning("%s and %s have different vocabularies: drafts are translated through text", file.name, target.name)
    return file, True
