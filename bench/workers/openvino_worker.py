"""OpenVINO GenAI. Settings: plain, prompt_lookup. Model: an exported OpenVINO folder."""

import importlib.metadata
import sys

import common
import openvino_genai as genai


def load(setting: str) -> common.Generate:
    options = {}
    if setting == "prompt_lookup":
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 2
        options = {"prompt_lookup": True, "scheduler_config": scheduler}
    pipeline = genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]), **options)
    tokenizer = pipeline.get_tokenizer()

    def generate(messages: list[dict], limit: int) -> tuple[int, str]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = limit, False, False
        if setting == "prompt_lookup":
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        result = pipeline.generate([prompt], config)
        return result.perf_metrics.get_num_generated_tokens(), result.texts[0]

    return generate


common.serve(importlib.metadata.version("openvino-genai"), load)
