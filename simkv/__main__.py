"""``simkv`` and ``python -m simkv``: the process around the command line.

It is small and imports nothing at first, for an interrupt may come while the rest is imported.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Entry point: an interrupt at any moment ends in one line and exit code 130."""
    code: object = INTERRUPTED
    sys.unraisablehook = _once_more
    try:
        code = _command()
    except KeyboardInterrupt:
        print("simkv: interrupted; nothing was written", file=sys.stderr)
    finally:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to say how it ended
    sys.exit(code)  # type: ignore[arg-type]


def _once_more(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt in a callback of the import system is lost; it comes again a moment later."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    import signal

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001)


def _command() -> object:
    """Run the command; returns its exit code."""
    import gc
    import os

    gc.set_threshold(200_000)  # what is imported stays, and is gone through 150 times by default
    # Pydantic would look for plug-ins in every package that is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from simkv.cli import main as command
    from simkv.cli.output_streams import close_streams, tolerate_write_errors

    tolerate_write_errors()
    code: object = 0
    try:
        command()
    except SystemExit as end:
        code = end.code
    return close_streams(code)


if __name__ == "__main__":
    main()
