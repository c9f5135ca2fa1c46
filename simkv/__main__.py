"""``simkv`` and ``python -m simkv``: the process around the command line.

It is small and imports nothing at first, for an interrupt may come while the rest is imported.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Entry point: an interrupt at any moment ends in one line and exit code 130."""
    code: object = INTERRUPTED
    try:
        code = _command()
    except KeyboardInterrupt:
        print("simkv: interrupted; nothing was written", file=sys.stderr)
    finally:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to say how it ended
    sys.exit(code)  # type: ignore[arg-type]


def _command() -> object:
    """Run the command; returns its exit code."""
    from simkv.cli import main as command
    from simkv.cli.streams import closing, patient

    patient()
    code: object = 0
    try:
        command()
    except SystemExit as end:
        code = end.code
    return closing(code)


if __name__ == "__main__":
    main()
