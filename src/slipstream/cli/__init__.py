"""The command `slipstream`: its entry point, and how anything that goes wrong is said in one line."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence

__all__ = ["main"]

WRONG_INPUT = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for input that is wrong, 130 after Ctrl-C, 1 for a defect."""
    from slipstream.cli import bench, chat, convert, generate, info, serve, train  # noqa: F401  they add their commands
    from slipstream.cli.app import app
    from slipstream.core.errors import SlipstreamError

    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if word != "--debug"]
    debug = "--debug" in given or os.environ.get("SLIPSTREAM_DEBUG") == "1"
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open to the end
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = warn
            code = app(args=words, prog_name="slipstream", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (BrokenPipeError, SystemExit):
        # The reader has gone (`slipstream ... | head`), for which typer leaves with code 1: nothing is wrong, and
        # nothing can be said any more.
        drop_output()
        return 0
    except SlipstreamError as error:
        if debug:
            raise
        return complain(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return refused(error, debug)


def refused(error: Exception, debug: bool) -> int:
    """Exit code for what typer raises (wrong usage, Ctrl-C) and for defects."""
    import typer

    if isinstance(error, typer.Abort):
        return INTERRUPTED
    if hasattr(error, "format_message"):
        return complain(error.format_message())
    if debug:
        raise error
    if isinstance(error, OSError):
        drop_output()
        return complain(str(error))
    complain(f"{type(error).__name__}: {error} (this is a defect; --debug shows where it happened)")
    return 1


def drop_output() -> None:
    """What is still to be written to stdout goes nowhere, so that the exit cannot fail on it."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning is one line too, without the place in the code."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def complain(message: str) -> int:
    """One line on stderr."""
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    return WRONG_INPUT


if __name__ == "__main__":
    sys.exit(main())
