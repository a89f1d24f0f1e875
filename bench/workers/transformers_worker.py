"""transformers' own `generate`. Settings: plain, prompt_lookup; prompt_lookup3 and so on for
other numbers of guesses. Model: a Hugging Face folder, run in fp32."""

import sys

import common
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(int(sys.argv[2]))
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


def load(setting: str) -> common.Generate:
    options = {}
    if setting.startswith("prompt_lookup"):
        options = {"prompt_lookup_num_tokens": int(setting.removeprefix("prompt_lookup") or 5)}

    def generate(messages: list[dict], limit: int) -> tuple[int, str]:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=limit, do_sample=False, **(options if limit > 1 else {}))
        new = out[0][inputs["input_ids"].shape[1] :]
        return len(new), tokenizer.decode(new, skip_special_tokens=True)

    return generate


common.serve(transformers.__version__, load)
