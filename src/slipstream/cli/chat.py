"""The command `chat`: a conversation on the terminal (or line by line from a pipe)."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from slipstream.cli import options as o
from slipstream.cli.app import app
from slipstream.cli.report import prompt_progress, speculation_lines, statistics_line
from slipstream.core.errors import SlipstreamError
from slipstream.core.types import speculation_of

if TYPE_CHECKING:
    from slipstream.core.params import SamplingParams
    from slipstream.core.types import Piece, RequestOutput
    from slipstream.engine.request import Request
    from slipstream.llm import LLM

DRAFTED, PLAIN = "\033[36m", "\033[0m"
HELP = """/stats  what speculation did, in the last answer and in all of them
/reset  begin a new conversation
/help   this list
/exit   leave (Ctrl-D does too); Ctrl-C stops an answer"""


@app.command("chat")
@o.shared(o.SAMPLING, o.SPECULATION, o.LOADING, max_tokens=1024)
def chat(
    context: typer.Context,
    model: o.MaybeNamed = None,
    model_option: o.MaybeModel = None,
    system: o.System = None,
    color_drafts: Annotated[
        bool, typer.Option("--color-drafts", help="Show tokens that were drafted and accepted in another colour.")
    ] = False,
    no_speculation: o.NoSpeculation = False,
    quiet: o.Quiet = False,
    **options: Any,
) -> None:
    """Talk with a model. /help lists the commands inside."""
    params = o.sampling_params(context.params)
    with o.load({**context.params, "model": o.named_model(model, model_option)}) as llm:
        session = Session(llm, params, system, speculation=not no_speculation, color=color_drafts)
        session.quiet = quiet
        session.run()


class Session:
    """One conversation: messages so far, and the statistics of its answers."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, speculation: bool = True, color: bool = False
    ) -> None:
        self.llm, self.params, self.speculation, self.color = llm, params, speculation, color
        self.quiet = False
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._start)
        self.results: list[RequestOutput] = []

    def run(self) -> None:
        """Read lines until the input ends or /exit."""
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  gives input() a history and line editing

            print(f"{self.llm.describe()}\n/help for commands", file=sys.stderr)
        while True:
            try:
                line = input("> " if interactive else "").strip()
                if line.startswith("/"):
                    if not self.command(line):
                        return
                elif line:
                    self.say(line)
            except EOFError:
                if interactive:
                    print()  # the shell's own prompt begins on a line of its own
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)

    def command(self, line: str) -> bool:
        """Carry out a /command; False when it is time to leave."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/reset":
            self.messages = list(self._start)
            print("(new conversation)", file=sys.stderr)
        elif line == "/stats":
            print(self.statistics())
        else:
            print(HELP if line == "/help" else f"unknown command {line}\n{HELP}")
        return True

    def statistics(self) -> str:
        """The last answer, and all of them together."""
        if not self.results:
            return "no answers yet"
        last = self.results[-1].outputs[0].speculation
        tokens, whole = sum(result.usage["completion_tokens"] for result in self.results), speculation_of(self.results)
        seconds = sum(result.timing.decode_s for result in self.results)
        return "\n".join(
            [
                f"last answer: {statistics_line(self.results[-1])[1:-1]}",
                *speculation_lines(last),
                f"{len(self.results)} answers: {tokens} tokens in {seconds:.2f} s, "
                f"{whole.tokens_per_pass:.2f} tokens per pass",
                *speculation_lines(whole),
            ]
        )

    def say(self, text: str) -> None:
        """Put a message, stream the answer. What came before Ctrl-C stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        with StopSign() as stop:
            try:
                result = self.answer(stop)
            except SlipstreamError as error:
                print(f"error: {error}", file=sys.stderr)
                result = None
        answer = result.outputs[0].text if result else ""
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()
        if result is None:
            return
        self.results.append(result)
        if not self.quiet:
            print(statistics_line(result), file=sys.stderr)

    def answer(self, stop: StopSign) -> RequestOutput | None:
        """Stream the answer to the last message; None when it was stopped before its first token."""
        show_progress = prompt_progress(self.quiet)
        request: Request | None = None

        def progress(done: int, total: int) -> None:
            if show_progress is not None:
                show_progress(total if stop.seen else done, total)
            if stop.seen:
                raise KeyboardInterrupt

        try:
            request = self.llm.submit(self.messages, self.params, speculation=self.speculation, progress=progress)
            pieces = self.llm.follow(request)
            for piece in pieces:
                self.show(piece)
                if stop.seen:
                    break
            pieces.close()
        except KeyboardInterrupt:
            stop.seen = True
        result = request.result() if request else None
        print("\n(stopped)" if stop.seen else "", flush=True)
        return result if result and result.outputs[0].token_ids else None

    def show(self, piece: Piece) -> None:
        """Print a piece, drafted ones in colour if asked for."""
        drafted = self.color and any(piece.sources) and piece.text
        sys.stdout.write(f"{DRAFTED}{piece.text}{PLAIN}" if drafted else piece.text)
        sys.stdout.flush()


class StopSign:
    """Inside, the first Ctrl-C only sets `seen`, so that a pass is never torn; the second interrupts at once."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
