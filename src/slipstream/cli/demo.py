"""`make demo`: a real model answers plainly and speculatively, token for token the same, faster."""

from __future__ import annotations

import os
import statistics
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.core.types import RequestOutput
    from slipstream.llm import LLM

MODEL = "smollm2"
RUNS = 3
NOTICE = (
    "The library opens at nine in the morning and closes at six in the evening from Monday to Friday. On Saturday it "
    "opens at ten and closes at two. It is closed on Sunday and on public holidays. Members may borrow up to eight "
    "books for three weeks, and renew each of them twice unless another member has asked for it."
)
PROMPTS = {
    "Copying a text": f"Write the following text again, word for word:\n\n{NOTICE}",
    "Open writing": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
}
DRAFTED, PLAIN = "\033[36m", "\033[39m"


def main() -> int:
    """Run the demo; exit code 1 when the answers differ."""
    from slipstream.core.errors import SlipstreamError

    color = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    try:
        with begin() as llm:
            print(llm.describe())
            verdicts = [compare(llm, title, prompt, color) for title, prompt in PROMPTS.items()]
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    same = all(verdicts)
    print(f"\nidentical: {'yes' if same else 'NO'}")
    return 0 if same else 1


def begin() -> LLM:
    """A new LLM, warm: its controller has measured this machine, its drafters have not seen the demo's prompts."""
    from slipstream.llm import LLM

    llm = LLM(MODEL)
    for speculation in (False, True):
        answer(llm, "Name the planets of the solar system.", speculation)
    return llm


def answer(llm: LLM, prompt: str, speculation: bool) -> RequestOutput:
    """One greedy answer from cold caches."""
    from slipstream.core.params import SamplingParams

    llm.forget()
    messages = [{"role": "user", "content": prompt}]
    return llm.chat(messages, SamplingParams(max_tokens=128), speculation=speculation)[0]


def compare(llm: LLM, title: str, prompt: str, color: bool) -> bool:
    """Answer `prompt` both ways, each time from cold caches, and print what it took; True when all tokens agree."""
    plain, speculative = [], []
    for _ in range(RUNS):
        speculative.append(answer(llm, prompt, speculation=True))
        plain.append(answer(llm, prompt, speculation=False))
    text = coloured(llm, speculative[-1]) if color else speculative[-1].outputs[0].text
    print(f"\n{title}{' (in colour: drafted, and right)' if color else ''}\n{text}")
    gain = show("plain", plain) / show("speculative", speculative)
    same = len({tuple(result.outputs[0].token_ids) for result in plain + speculative}) == 1
    print(f"  {gain:.2f}x the speed of plain decoding, same tokens: {'yes' if same else 'NO'}")
    return same


def coloured(llm: LLM, result: RequestOutput) -> str:
    """The answer with the tokens that drafters guessed in another colour."""
    output, text = result.outputs[0], ""
    for token, source in zip(output.token_ids, output.sources, strict=True):
        word = llm.tokenizer.decode([token])
        text += f"{DRAFTED}{word}{PLAIN}" if source and word else word
    return text


def show(name: str, results: list[RequestOutput]) -> float:
    """Print one line of measurements (medians over the runs) and return the decode seconds."""
    output = results[0].outputs[0]
    seconds = statistics.median(result.timing.decode_s for result in results)
    rate = len(output.token_ids) / seconds
    per_pass = output.speculation.tokens_per_pass
    print(f"  {name:<12} {len(output.token_ids):>4} tokens  {rate:7.1f} tokens/s  {per_pass:5.2f} tokens per pass")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
