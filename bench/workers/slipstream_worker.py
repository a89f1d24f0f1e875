"""Slipstream. Settings: plain, or any value of --draft with + for its commas (auto, suffix+recycling, ...), natively;
auto@transformers and so on: on that runtime. Model: a GGUF file or a folder.
"""

import sys

import common

import slipstream
from slipstream import LLM, SamplingParams


def load(setting: str) -> common.Generate:
    draft, _, runtime = setting.partition("@")
    draft = "none" if draft == "plain" else draft.replace("+", ",")
    llm = LLM(sys.argv[1], draft=draft, threads=int(sys.argv[2]), max_context=4096, runtime=runtime or None)

    def generate(messages: list[dict], limit: int) -> tuple[int, str]:
        llm.forget()  # cold caches: neither prefixes nor recycled tokens of an earlier run
        output = llm.chat(messages, SamplingParams(max_tokens=limit))[0].outputs[0]
        return len(output.token_ids), output.text

    return generate


common.serve(slipstream.__version__, load)
