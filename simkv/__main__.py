"""Entry point of ``simkv`` and ``python -m simkv``.

This module imports few modules at the top, because an interrupt (Ctrl-C) during these first imports
cannot be handled.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line; an interrupt (Ctrl-C) at any time prints one line and exits with code
    130.
    """
    code: object = INTERRUPTED
    sys.unraisablehook = _once_more
    try:
        _repeat_interrupts()
        code = _command()
    except KeyboardInterrupt:
        print("simkv: interrupted; nothing was written", file=sys.stderr)
    finally:
        ignore_interrupts()  # only the exit code is left to report
    sys.exit(code)  # type: ignore[arg-type]


def ignore_interrupts() -> None:
    """Ignore further interrupts, including the repeated ones from ``_once_more``."""
    import signal

    for name in ("SIGINT", "SIGALRM"):  # Windows has no SIGALRM
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _repeat_interrupts() -> None:
    """After the first interrupt, raise KeyboardInterrupt again every 3 s, in case a library caught
    it.
    """
    import signal

    def interrupt(number: int, frame: object) -> None:
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 3, 3)
        signal.default_int_handler(number, frame)  # type: ignore[arg-type]

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def _once_more(lost: sys.UnraisableHookArgs) -> None:
    """Unraisable hook: raise KeyboardInterrupt again if an import-system callback has swallowed it.

    It is raised after 1 ms and then every 3 s.
    """
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    import signal

    if not hasattr(signal, "SIGALRM"):
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 3)


def _command() -> object:
    """Run the command and return its exit code."""
    import gc
    import os

    # imported objects are never freed; with the default threshold, the garbage collector would scan
    # them 150 times
    gc.set_threshold(200_000)
    # By default, Pydantic searches all installed packages for plug-ins.
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
