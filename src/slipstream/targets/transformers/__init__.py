"""The transformers runtime: any causal language model of Hugging Face, on CPU or GPU. Needs the extra [torch]."""
