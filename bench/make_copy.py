"""An unpacked copy of a model: a Hugging Face folder in fp32 or bf16 out of a GGUF file or another folder.

    python bench/make_copy.py MODEL.gguf /tmp/smollm2-fp32 --dtype fp32
    python bench/make_copy.py /tmp/smollm2-fp32 /tmp/smollm2-bf16 --dtype bf16

Needs the extra `torch`. bf16 rounds the unpacked weights to nearest even.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slipstream.models.files import open_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DIGITS = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
"""How SmolLM2 splits text; transformers' reader of GGUF files forgets the digits."""


def where(source: Path) -> dict[str, Any]:
    if source.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    return {"pretrained_model_name_or_path": str(source)}


def copy(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the folder. Raises SystemExit when its tokenizer splits text otherwise than the source's."""
    loaded = AutoModelForCausalLM.from_pretrained(**where(source), dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # else the copy calls itself a GGUF
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where(source)).save_pretrained(out)
    repair(out, source)


def repair(out: Path, source: Path) -> None:
    """Make the copy's tokenizer split text as the source's does."""
    config = out / "tokenizer_config.json"  # a class name that only the newest transformers knows
    config.write_text(config.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    probe = "In 2024, 31 of 1789 people said: 'naïve' 日本 🙂"
    right = open_model(source).tokenizer().encode(probe)
    if open_model(out).tokenizer().encode(probe) != right:
        path = out / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": DIGITS}
        path.write_text(json.dumps(tokenizer, ensure_ascii=False))
    if open_model(out).tokenizer().encode(probe) != right:
        raise SystemExit(f"the tokenizer in {out} splits text otherwise than {source}; do not measure with it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    args = parser.parse_args()
    copy(args.source, args.out, DTYPES[args.dtype])


if __name__ == "__main__":
    main()
