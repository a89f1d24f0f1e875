"""The transformers runtime on one device: identity, the curve t(m), plain against speculative. Under four minutes.

    python bench/gpu.py --device cuda --model FOLDER --rows rows.jsonl     # a real model
    python bench/gpu.py --device cuda --size 1b --dtype bfloat16           # random weights, nothing to fetch
    python bench/gpu.py --device cpu --size tiny                           # smoke test

Prints what it finds and, with --out, writes it as JSON. Exit code 1 when an answer differs without a near-tie.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream import LLM, SamplingParams
from slipstream.control.measure import pass_costs
from slipstream.core.rows import read_rows
from slipstream.core.types import RequestOutput
from slipstream.models.files import open_model
from slipstream.targets.transformers.loading import Placement
from slipstream.targets.transformers.model import TransformersTarget

SIZES = {
    "tiny": (64, 2, 2, 400),
    "small": (768, 12, 12, 8000),
    "1b": (2048, 16, 32, 32000),
    "7b": (4096, 32, 32, 32000),
}
"""hidden size, layers, heads, vocabulary of models with random weights."""
SAMPLED = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; as in the weights when left out")
    parser.add_argument("--model", help="a Hugging Face folder; random weights when left out")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model with random weights")
    parser.add_argument("--rows", help="JSONL of messages, turns or a prompt, for a real model")
    parser.add_argument("--graphs", choices=("cuda", "eager"), help="also time passes as CUDA graphs")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--seconds", type=float, default=200, help="no new measurement begins after so long")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def random_model(size: str, folder: Path) -> Path:
    """A Llama with random weights and a tokenizer of numbered words, as a folder."""
    hidden, layers, heads, vocab = SIZES[size]
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), max_position_embeddings=4096,
        initializer_range=1.5 / hidden**0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    dtype = torch.float32 if size == "tiny" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    words = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(vocab)}, "unk_token": "t0"}
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "added_tokens": [], "model": words, "pre_tokenizer": kind, "decoder": kind}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


def prompts_of(llm: LLM, rows: str | None, count: int) -> list[Any]:
    """Conversations from a file, or token ids with repetitions."""
    if rows:
        return [row.messages for row in read_rows(Path(rows), count)]
    size = llm.target.vocab_size
    made = [[3 + (7 * i * i + 11 * seed) % (size - 3) for i in range(24)] for seed in range(count)]
    return [{"prompt_token_ids": tokens * 3} for tokens in made]


def answer(llm: LLM, prompts: list[Any], params: SamplingParams, speculation: bool) -> list[RequestOutput]:
    llm.forget()
    ask = llm.generate if isinstance(prompts[0], dict) else llm.chat
    return ask(prompts, params, speculation=speculation)


def identity(llm: LLM, prompts: list[Any], tokens: int) -> dict[str, Any]:
    """Plain against speculative, alone and in a batch."""
    found: dict[str, Any] = {"answers": 0, "different": 0, "without_near_tie": 0, "near_ties": 0, "accepted": 0}
    for name, extra in SAMPLED.items():
        params = SamplingParams(max_tokens=tokens, seed=5, **extra)
        plain = [answer(llm, [one], params, False)[0].outputs[0] for one in prompts]
        ways = [
            [answer(llm, [one], params, True)[0].outputs[0] for one in prompts],
            [result.outputs[0] for result in answer(llm, prompts, params, True)],
            [result.outputs[0] for result in answer(llm, prompts, params, False)],
        ]
        for way in ways:
            for ours, right in zip(way, plain, strict=True):
                ties = ours.speculation.near_ties + right.speculation.near_ties
                found["answers"] += 1
                found["near_ties"] += ours.speculation.near_ties
                found["accepted"] += ours.speculation.num_accepted_draft_tokens
                found["different"] += ours.token_ids != right.token_ids
                found["without_near_tie"] += ours.token_ids != right.token_ids and not ties
        print(f"identity, {name}: {found}", flush=True)
    return found


def race(llm: LLM, prompts: list[Any], tokens: int, until: float) -> dict[str, Any]:
    """Decode times of plain and speculative answers, interleaved, and the median of their ratios by prompt."""
    ratios, speeds = [], {False: [], True: []}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for one in prompts:
        if time.perf_counter() > until:
            break
        pairs = []
        for turn in range(4):
            for speculation in (False, True) if turn % 2 else (True, False):
                result = answer(llm, [one], params, speculation)[0]
                if turn:  # the first turn warms up
                    speeds[speculation].append(result.timing.tokens_per_second)
                    pairs.append((speculation, result.timing.decode_s))
        times = [statistics.median(s for spec, s in pairs if spec is wanted) for wanted in (False, True)]
        ratios.append(times[0] / times[1])
    found = {
        "plain_tokens_per_second": statistics.median(speeds[False]),
        "speculative_tokens_per_second": statistics.median(speeds[True]),
        "speedup_by_prompt": [round(ratio, 3) for ratio in ratios],
        "speedup": statistics.median(ratios),
    }
    print(f"race: {found}", flush=True)
    return found


def curves(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a pass by rows, for each way of running passes."""
    found = {}
    for graphs in (None, args.graphs) if args.graphs else (None,):
        placement = Placement(args.device, args.dtype, graphs=graphs)
        target = TransformersTarget.load(open_model(folder), slots=1, max_context=1024, placement=placement)
        name = f"{target.kernels()}{f', graphs {graphs}' if graphs else ''}"
        found[name] = {int(cost["rows"]): cost["ms"] for cost in pass_costs(target, rounds=9)}
        print(f"t(m) in ms, {name}: {found[name]}", flush=True)
        del target
    return found


def main() -> int:
    args, begun = arguments(), time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    until = begun + args.seconds
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or str(random_model(args.size, Path(scratch)))
        report: dict[str, Any] = {
            "machine": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor(),
            "torch": torch.__version__, "transformers": transformers.__version__, "model": args.model or args.size,
        }  # fmt: skip
        print(report, flush=True)
        report["curve_ms"] = curves(folder, args)
        settings = {"runtime": "transformers", "device": args.device, "dtype": args.dtype, "max_context": 2048}
        with LLM(folder, draft="suffix", controller="fixed", **settings) as llm:
            report["identity"] = identity(llm, prompts_of(llm, args.rows, 4), min(args.tokens, 48))
        with LLM(folder, draft="suffix", **settings) as llm:
            report["race"] = race(llm, prompts_of(llm, args.rows, 12), args.tokens, until)
    report["seconds"] = round(time.perf_counter() - begun, 1)
    print(f"{report['seconds']} s in all")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    return 1 if report["identity"]["without_near_tie"] else 0


if __name__ == "__main__":
    sys.exit(main())
