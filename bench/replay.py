"""Controllers and drafters on recorded answers and modelled costs: no clock, no model, the same numbers every time.

    python bench/replay.py record smollm2 rows.jsonl answers.jsonl [--temperature 1.5]
    python bench/replay.py run answers.jsonl suffix recycling auto --costs q4

`record` keeps each answer's tokens and the likeliest tokens at every position. `run` lets the real drafters and the
adaptive controller draft along these answers; a pass over m rows costs what the curve says, a step in which drafters
were asked ASKING more. Recycling learns from emitted positions only (the recording has no others), so its figures are a
little low. Printed by category: speed against plain decoding, nodes per pass, and of the last setting the optimum: the
same trees with the number of nodes that hindsight would choose.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.bench import paired
from slipstream.control.adaptive import Adaptive
from slipstream.control.asking import Rest
from slipstream.control.base import StepCost
from slipstream.control.merge import Ranked
from slipstream.core.params import SamplingParams
from slipstream.core.rows import read_rows
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Limit, Observation, Offers, Row, Verdict
from slipstream.drafters import Materials, build, parse
from slipstream.sampling import RowSampler

CURVES = {
    "q4": {1: 3.12, 2: 3.26, 3: 3.41, 4: 3.76, 5: 4.23, 6: 4.85, 8: 6.0, 12: 8.19, 16: 11.85},
    "fp32": {1: 8.25, 2: 8.87, 3: 9.12, 4: 9.31, 6: 9.74, 8: 10.1, 12: 11.2, 16: 16.5},
}
"""Milliseconds of a pass of SmolLM2 by token rows (Zen 5, two cores)."""
ASKING, OFFER = 5e-5, 1e-5
"""Seconds of a step that asks, beyond a plain one; seconds an offer says it took."""
KEPT = 8
"""Likeliest tokens recorded per position."""


@dataclass
class Answer:
    """A recorded answer: likeliest ids and logits [tokens, KEPT] at every position."""

    category: str
    prompt: list[int]
    tokens: list[int]
    ids: list[list[int]]
    logits: list[list[float]]
    vocab_size: int
    temperature: float
    seed: int

    def dense(self, position: int, out: NDArray[np.float32]) -> None:
        """The logits at one position of the answer, -inf where they were not kept."""
        out[self.ids[position]] = self.logits[position]


class Optimum(Adaptive):
    """Hindsight: of every tree as many nodes as are best for the tokens to come."""

    truth: Sequence[int] = ()

    def _rest(self, row: Row) -> Rest:
        return Rest()  # no row rests

    def _best(
        self, trees: Sequence[Ranked], limits: Sequence[Limit], drafting: float
    ) -> tuple[list[int], float, float]:
        tree = trees[0]
        passes = self.passes.table(1 + len(tree))
        rates = []
        for count in range(min(len(tree), limits[0].nodes) + 1):
            path = walk(Draft(tree.tokens[:count], tree.parents[:count]), self.truth)
            rates.append((len(path) + 1) / (passes[1 + count] + drafting))
        best = rates.index(max(rates))
        return [best], rates[best] * (passes[1 + best] + drafting), passes[1 + best] + drafting


def walk(draft: Draft, truth: Sequence[int]) -> list[int]:
    """The nodes on the path of the true tokens; one token stays for the bonus."""
    path: list[int] = []
    node: int | None = ANCHOR
    while node is not None and len(path) + 1 < len(truth):
        node = draft.child(node, truth[len(path)])
        if node is not None:
            path.append(node)
    return path


@dataclass
class Replay:
    """One setting: a controller that lives through all answers, drafters that forget after each."""

    controller: Adaptive
    drafters: list[Any]
    costs: NDArray[np.float64]

    def answer(self, number: int, given: Answer) -> tuple[float, int]:
        """Modelled seconds and verified nodes of one answer."""
        params = SamplingParams(temperature=given.temperature, seed=given.seed, max_tokens=len(given.tokens))
        sampler = RowSampler(params, given.seed, given.vocab_size, given.prompt)
        row = Row(number, [*given.prompt, given.tokens[0]], len(given.prompt), params, given.seed, sampler)
        sampler.append(given.tokens[:1])
        for drafter in self.drafters:
            drafter.forget()
            drafter.begin(row)
        seconds, nodes = 0.0, 0
        while len(row.tokens) - row.prompt_length < len(given.tokens):
            spent, count = self._step(row, given)
            seconds, nodes = seconds + spent, nodes + count
        for drafter in self.drafters:
            drafter.end(row)
        self.controller.end(row)
        return seconds, nodes

    def _step(self, row: Row, given: Answer) -> tuple[float, int]:
        at = len(row.tokens) - row.prompt_length
        truth = given.tokens[at:]
        if isinstance(self.controller, Optimum):
            self.controller.truth = truth
        limit = self.controller.limits([row])[0].within(len(truth) - 1)
        draft = Draft()
        if limit.nodes:
            offers: list[Offers] = []
            for drafter in (drafter for drafter in self.drafters if drafter.wants(row)):
                own = limit.of(drafter.name)
                offers.append(drafter.propose([row], [own])[0] if own.nodes else Offers(drafter.name))
                offers[-1].seconds = OFFER if own.nodes else 0.0
            draft = self.controller.choose([row], [offers], [limit])[0]
        path = walk(draft, truth)
        verdict = Verdict(list(truth[: len(path) + 1]), path)
        logits = np.full((1 + len(draft), given.vocab_size), -np.inf, np.float32)
        for depth, node in enumerate([ANCHOR, *path]):
            given.dense(at + depth, logits[node + 1])
        row.tokens += verdict.tokens
        row.sampler.append(verdict.tokens)
        seen = Observation(row, draft, verdict, logits)
        for drafter in self.drafters:
            drafter.observe([seen])
        spent = float(self.costs[1 + len(draft)])
        self.controller.observe([seen], StepCost(1 + len(draft), spent, 1e-4))
        return spent + (ASKING if limit.nodes else 0.0), len(draft)


def curve(points: Mapping[int, float]) -> NDArray[np.float64]:
    """Seconds by token rows from milliseconds at some of them."""
    sizes = np.arange(max(points) + 1)
    found: NDArray[np.float64] = np.interp(sizes, list(points), list(points.values())) / 1e3
    return found


def run(args: argparse.Namespace) -> None:
    """Replay all settings and print a line for each."""
    answers = [Answer(**json.loads(line)) for line in Path(args.answers).read_text().splitlines()]
    costs = curve(CURVES[args.costs])
    points = {size: seconds / 1e3 for size, seconds in CURVES[args.costs].items()}
    for setting in [*args.settings, "optimum"]:
        draft = args.settings[-1] if setting == "optimum" else setting
        made = (Optimum if setting == "optimum" else Adaptive)(args.max_nodes)
        made.start_from(points)
        drafters = build(parse(draft), Materials(answers[0].vocab_size, lambda name: None))  # type: ignore[arg-type, return-value]
        replay, gains, nodes = Replay(made, drafters, costs), dict[str, list[float]](), 0
        for number, answer in enumerate(answers):
            seconds, count = replay.answer(number, answer)
            gains.setdefault(answer.category, []).append((len(answer.tokens) - 1) * costs[1] / seconds)
            nodes += count
        cells = " ".join(f"{name[:8]} {paired.geometric_mean(values):.3f}" for name, values in gains.items())
        overall = paired.geometric_mean([paired.geometric_mean(values) for values in gains.values()])
        print(f"{setting:18} {overall:.4f} | {cells} | {nodes / sum(len(a.tokens) for a in answers):.2f} nodes a token")


def record(args: argparse.Namespace) -> None:
    """Write the model's plain answers to rows of conversations or prompts."""
    from slipstream import LLM
    from slipstream.kernels.sampling import top

    llm, made = LLM(args.model, "none"), []
    keep: list[NDArray[np.float32]] = []
    forward = llm.target.forward

    def watched(inputs: Any) -> Any:
        output = forward(inputs)
        keep.append(output.logits[0][:1].copy())
        return output

    llm.target.forward = watched  # type: ignore[method-assign]
    for number, row in enumerate(read_rows(Path(args.rows))):
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=number)
        keep.clear()
        result = llm.chat(row.messages, params)[0]
        ids, values = top(np.concatenate(keep), KEPT)
        tokens = result.outputs[0].token_ids
        if len(tokens) > 1:
            made.append({
                "category": row.category or "rows", "prompt": result.prompt_token_ids, "tokens": tokens,
                "ids": ids.tolist(), "logits": values.tolist(), "vocab_size": llm.target.vocab_size,
                "temperature": args.temperature, "seed": result.outputs[0].seed,
            })  # fmt: skip
    Path(args.answers).write_text("".join(json.dumps(answer) + "\n" for answer in made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("model")
    recording.add_argument("rows", help="JSONL of messages, turns or a prompt, and a category")
    recording.add_argument("answers")
    recording.add_argument("--temperature", type=float, default=0.0)
    recording.add_argument("--max-tokens", type=int, default=128)
    recording.set_defaults(action=record)
    running = commands.add_parser("run")
    running.add_argument("answers")
    running.add_argument("settings", nargs="+")
    running.add_argument("--costs", choices=list(CURVES), default="q4")
    running.add_argument("--max-nodes", type=int, default=8)
    running.set_defaults(action=run)
    args = parser.parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
