"""Finding, fetching and reading models: packages and hub, GGUF and safetensors, tokenizers, chat templates.

Nothing is imported here, so that naming the package costs nothing; import the module that is needed.
"""
