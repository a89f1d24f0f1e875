"""llama.cpp through llama-cpp-python. Settings: plain, prompt_lookup. Model: a GGUF file."""

import sys

import common
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def load(setting: str) -> common.Generate:
    draft = LlamaPromptLookupDecoding(num_pred_tokens=5) if setting == "prompt_lookup" else None
    threads = int(sys.argv[2])
    llm = llama_cpp.Llama(
        sys.argv[1],
        n_ctx=4096,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        draft_model=draft,
        logits_all=draft is not None,
    )

    def generate(messages: list[dict], limit: int) -> tuple[int, str]:
        llm.reset()  # else the prefix of the last run is reused and the prefill vanishes
        llm._ctx.kv_cache_clear()
        out = llm.create_chat_completion(messages, max_tokens=limit, temperature=0.0, repeat_penalty=1.0)
        return out["usage"]["completion_tokens"], out["choices"][0]["message"]["content"]

    return generate


common.serve(llama_cpp.__version__, load)
