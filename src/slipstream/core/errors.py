"""One error hierarchy. Every message names the value that is wrong and the remedy."""


class SlipstreamError(Exception):
    """Base of all errors this package raises on purpose; the command line prints it as one line, exit code 2."""


class InputError(SlipstreamError, ValueError):
    """A parameter, prompt or combination the caller can correct."""


class ContextLengthError(InputError):
    """The prompt does not fit into the model's context."""


class CacheFullError(InputError):
    """No memory is left for further rows of the KV cache; what was in it is untouched."""


class ModelError(SlipstreamError):
    """A model that cannot be found, fetched, read or run, with the reason."""


class UnsupportedError(ModelError):
    """A model or combination that is well-formed but not supported; refused before anything is loaded."""


class NonFiniteError(SlipstreamError):
    """NaN or infinity among the logits of a node that verification visited; ends that request alone."""
