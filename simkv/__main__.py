"""Entry point of ``simkv`` and ``python -m simkv``.

It imports as little as possible at the top, so that an interrupt during the remaining imports is
handled as well.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line; an interrupt at any moment ends with one line and exit code 130."""
    code: object = INTERRUPTED
    sys.unraisablehook = _once_more
    try:
        _repeat_interrupts()
        code = _command()
    except KeyboardInterrupt:
        print("simkv: interrupted; nothing was written", file=sys.stderr)
    finally:
        ignore_interrupts()  # nothing is left to do except report the exit code
    sys.exit(code)  # type: ignore[arg-type]


def ignore_interrupts() -> None:
    """Ignore further interrupts, also those that ``_once_more`` has scheduled."""
    import signal

    for name in ("SIGINT", "SIGALRM"):  # Windows has no SIGALRM
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _repeat_interrupts() -> None:
    """Raise KeyboardInterrupt again every 3 s, in case a library has caught the first one."""
    import signal

    def interrupt(number: int, frame: object) -> None:
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 3, 3)
        signal.default_int_handler(number, frame)  # type: ignore[arg-type]

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def _once_more(lost: sys.UnraisableHookArgs) -> None:
    """Raise KeyboardInterrupt after 1 ms and every 3 s; import-system callbacks swallow it."""
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

    # imported objects stay alive; the default threshold scans them 150 times
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
