"""One error hierarchy. Every message names the value that is wrong and the remedy."""


class SlipstreamError(Exception):
    """Base of all errors this package raises on purpose; the command line prints it as one line, exit code 2."""


class InputError(SlipstreamError, ValueError):
    """A parameter, prompt or combination the caller can correct."""


class StaleBuildError(SlipstreamError):
    """The compiled core and the Python code are from different versions; building again helps."""


class ContextLengthError(InputError):
    """The prompt does not fit into the model's context."""


class CacheFullError(InputError):
    """No memory is left for further rows of the KV cache; what was in it is untouched."""


class QueueFullError(SlipstreamError):
    """More requests wait than may wait; the same request can be sent again later."""


class StoppedError(SlipstreamError):
    """Nothing new is taken: what would run it has stopped, is about to, or has failed."""


class ModelError(SlipstreamError):
    """A model that cannot be found, fetched, read or run, with the reason."""


class UnsupportedError(ModelError):
    """A model or combination that is well-formed but not supported; refused before anything is loaded."""


class NonFiniteError(SlipstreamError):
    """Nothing can be drawn at a node that verification visited: NaN or infinite logits, or everything is forbidden.

    Ends that request alone.
    """
