"""OpenVINO GenAI. Settings: plain, prompt_lookup, and with _f32 behind them. Model: an exported OpenVINO folder.

On CPUs with bf16 instructions OpenVINO computes fp32 models in bf16 by default; the _f32 settings ask for fp32.
"""

import importlib.metadata
import sys

import common
import openvino_genai as genai


def load(setting: str) -> common.Generate:
    options = {"INFERENCE_PRECISION_HINT": "f32"} if setting.endswith("_f32") else {}
    lookup = setting.startswith("prompt_lookup")
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # else the prompt of the last run is not read again
    scheduler.cache_size = 2
    options |= {"scheduler_config": scheduler}
    if lookup:
        options |= {"prompt_lookup": True}
    pipeline = genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]), **options)
    tokenizer = pipeline.get_tokenizer()

    def generate(messages: list[dict], limit: int) -> tuple[int, str]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = limit, False, False
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        result = pipeline.generate([prompt], config)
        return result.perf_metrics.get_num_generated_tokens(), result.texts[0]

    return generate


common.serve(importlib.metadata.version("openvino-genai"), load)
