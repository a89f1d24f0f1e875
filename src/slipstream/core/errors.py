"""One error hierarchy. Every message names the value that is wrong and the remedy."""

from __future__ import annotations

import shlex
import sys

WITH_TORCH = ("torch", "train")
"""Extras that bring torch."""
TORCH = "torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu"
"""The release that is tested, built for the CPU; without the index pip may take the build for CUDA, of gigabytes."""


def install_hint(extra: str) -> str:
    """The command that adds an extra to the environment that runs this, be it of a checkout or not.

    pip reads what the extra brings from the installed package, so nothing of this package is fetched or compiled.
    """
    command = f"{shlex.quote(sys.executable or 'python')} -m pip install 'slipstream[{extra}]'"
    return f"{command} {TORCH} (for a GPU leave out the index)" if extra in WITH_TORCH else command


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
