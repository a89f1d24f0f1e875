"""vLLM on the CPU. Settings: plain, prompt_lookup (its ngram method); one per process. Model: a Hugging Face folder."""

import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_CPU_OMP_THREADS_BIND=f"0-{int(sys.argv[2]) - 1}",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)

import common
import vllm


def load(setting: str) -> common.Generate:
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    llm = vllm.LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=8,
        speculative_config=ngram if setting == "prompt_lookup" else None,
        enforce_eager=True,
        enable_prefix_caching=False,
    )

    def generate(messages: list[dict], limit: int) -> tuple[int, str]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=limit)
        out = llm.chat(messages, params, use_tqdm=False)[0].outputs[0]
        return len(out.token_ids), out.text

    return generate


common.serve(vllm.__version__, load)
