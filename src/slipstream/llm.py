"""LLM: prompts and conversations in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slipstream.build import Settings, build_model, make_controller
from slipstream.core.errors import InputError, NonFiniteError
from slipstream.core.params import SamplingParams, Speculating
from slipstream.core.types import Piece, RequestOutput

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.request import Request
    from slipstream.engine.worker import Worker
    from slipstream.models.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""Raw text, or {"prompt_token_ids": [...]}; {"prompt": text} is the text."""
Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None]


class LLM:
    """A model with its drafters.

    model: a name (`slipstream models` lists them), a hub id, a GGUF file or a folder. draft: none, auto (suffix and
    recycling, and the head that comes with a model), lookup, suffix, recycling, lookahead, corpus:PATH, model:NAME,
    head:PATH, combined by commas; draft_model: the model that "auto" adds. max_nodes: draft nodes per row and pass, 0
    for plain decoding. shape: chain or tree (None: tree where the verifier takes trees). verifier: coupled (the same
    tokens as plain decoding), rejection or block (the same distribution), typical (lossy). controller: adaptive drafts
    only as much as pays on this machine, fixed always max_nodes. max_context: None takes the model's own.
    recycling_table: file in which "recycling" keeps what it learned from one run to the next (None: nowhere).
    max_batch: rows per pass. threads: None chooses. runtime: native, transformers, or None for native where it can.
    device (cpu, cuda, mps, auto) and dtype (float32, bfloat16, float16) other than the CPU and the file's own are for
    transformers. Raises InputError, ModelError or UnsupportedError; what cannot work together is refused before any
    weight is read.
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
        self.settings = Settings(
            draft=draft,
            draft_model=draft_model,
            max_nodes=max_nodes,
            shape=shape,
            verifier=verifier,
            controller=controller,
            max_context=max_context,
            max_batch=max_batch,
            threads=threads,
            runtime=runtime,
            device=device,
            dtype=dtype,
            recycling_table=recycling_table,
        )
        self._built, self._closed = build_model(model, self.settings), False
        self._file, self._engine = self._built.file, self._built.engine
        self.runtime, self.target = self._built.runtime, self._built.target
        self.tokenizer: Tokenizer = self._built.tokenizer

    @property
    def name(self) -> str:
        """The model's name."""
        return self._file.name

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that are loaded."""
        return self._engine.drafting.names

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
        how = self.settings
        drafting = f"draft {self._built.draft}, {how.controller}, up to {how.max_nodes} nodes, {how.verifier}"
        drafting += "".join(f"; {text}" for text in self._built.head_sizes())
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

    def beside(
        self, kinds: Collection[str], controller: str = "adaptive", max_nodes: int = 8, shape: str = "tree"
    ) -> Engine:
        """Another engine over the loaded model, with some of the loaded drafters and a controller of its own.

        kinds: of the drafters, as `draft` says them, without what stands behind a colon. For comparisons: only one
        engine may be at work, and whoever ran last forgets before another one begins. Raises InputError.
        """
        governor = make_controller(controller, max_nodes, shape)
        return self._built.beside(kinds, governor, self.settings.max_batch)

    def worker(self, **options: Any) -> Worker:
        """A thread, not started yet, that runs this model's requests; options as in `Worker`.

        While it works, leave `generate` and the like alone: they would take turns with it.
        """
        from slipstream.engine.worker import Worker

        return Worker(self._engine, **options)

    def reload(self, drafter: str) -> None:
        """Load a drafter anew from where it came from, such as a head that was trained on; it is used from the next
        step on, and `previous` of the engine goes back to the one before. Raises InputError for a name not loaded.
        """
        self._engine.exchange(self._built.drafter(drafter))

    def forget(self) -> None:
        """Drop what earlier answers left, cached prefixes and recycled tokens, as if the next prompt were the first."""
        self._engine.forget()

    def close(self) -> None:
        """Free the cache, save what drafters keep; the object is of no use after it.

        Raises InputError when the recycling table cannot be written.
        """
        if not self._closed:
            self._engine.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
