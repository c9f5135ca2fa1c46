"""Old names of commands and options. simkv accepts them for one version, and prints a notice.

To rename a command or an option, change it where it is defined and add a line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

#: First version that rejects the old names.
REMOVED_IN = "0.4"

#: New command by old command.
COMMANDS = {
    "profile build sync": "profile build single-request",
    "profiles": "profile list",
    "validate gpu": "gpu validate",
}

_RAY = {"--address": "--ray-address"}
_JOBS = {"--workers": "--jobs"}

#: Old and new options by command (new name); options of a group apply to all of its commands.
OPTIONS = {
    "bisect": _JOBS,
    "diagnose": {**_JOBS, "--flags": "--try-flags", "--no-flags": "--no-try-flags"},
    "evolve": {**_RAY, "--final": "--validation", "--random": "--random-search"},
    "gpu validate": {
        "--again": "--repeat-run",
        "--only-plan": "--plan-only",
        "--other-gpu": "--allow-other-gpu",
    },
    "plan": {**_RAY, "--held-back": "--held-out"},
    "profile build": {"--expert-ranks": "--ep"},
    "serve": {"--model-name": "--served-model-name", "--ports": "--port-per-replica"},
    "shrink": _JOBS,
    "sweep": _RAY,
    "trace inspect": {"--picture": "--plot"},
    "validate": {
        "--calibration": "--kernel-tables",
        "--steps": "--host-times",
    },
    "whatif": {**_JOBS, "--by": "--rank-by"},
}


def use_new_names(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Replace old names in the arguments; return the arguments and a notice.

    The notice is empty if no name is old.

    Words after ``--`` stay as they are.
    """
    words, notices = list(arguments), []
    for old, new in COMMANDS.items():
        if _starts(words, old):
            words[: len(old.split())] = new.split()
            notices.append(f"'simkv {old}' is now 'simkv {new}'")
            break
    names = dict(_options(words))
    last = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:last]):
        name, equals, value = word.partition("=")
        if name in names:
            words[place] = names[name] + equals + value
            notices.append(f"{name} is now {names[name]}")
    notice = ", ".join(dict.fromkeys(notices))
    return words, f"{notice}; version {REMOVED_IN} removes the old name" if notice else ""


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the old and new option names of the command and of the groups that contain it."""
    for command, names in OPTIONS.items():
        if _starts(words, command):
            yield from names.items()


def _starts(words: Sequence[str], command: str) -> bool:
    """Return whether ``words`` start with the words of ``command``."""
    named = command.split()
    return list(words[: len(named)]) == named
