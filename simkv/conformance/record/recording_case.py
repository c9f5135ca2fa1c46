"""A workload for recording an engine's released scheduler, and the settings of such workloads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from simkv.core.recording_format import RecordingLine


class RecordingCase(NamedTuple):
    """Configuration, requests and aborts (step, phase, request id) of a recording.

    The other fields are durations in steps, used in turn: of KV copies to and from host memory, of
    disk transfers, of lookups on the disk, and of KV transfers between replicas.
    """

    config: Any
    requests: list[RecordingLine]
    aborts: Sequence[tuple[int, int, int]] = ()
    copies: Sequence[int] = ()
    disk: Sequence[int] = ()
    looks: Sequence[int] = ()
    transfers: Sequence[int] = ()

    @property
    def header_fields(self) -> RecordingLine:
        """The lists of durations that are not empty, by their names in the header."""
        names = ("copies", "disk", "looks", "transfers")
        return {name: steps for name in names if (steps := getattr(self, name))}


def default_settings(config: Any) -> dict[str, Any]:
    """Return the defaults of all settings of a config."""
    return {field.name: field.default for field in fields(config)}


def changed_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a config that differ from their defaults."""
    defaults = default_settings(config)
    return {k: value for k in defaults if (value := getattr(config, k)) != defaults[k]}


@dataclass(frozen=True)
class CaseSchema:
    """Random cases of an engine, and their settings.

    ``names(version, count)`` returns the names of random cases, ``make(version, name)`` builds a
    case, and ``handmade(version)`` returns the names of handmade cases. Shrinking leaves the
    settings in ``kept`` unchanged and resets all others to ``plain`` or to their defaults.
    ``unnamed`` settings have other names in the engine. ``shown`` settings need recordings that
    depend on them.
    """

    names: Callable[[str, int], list[str]]
    make: Callable[[str, str], RecordingCase]
    kept: Collection[str]
    plain: Mapping[str, Any]
    unnamed: Collection[str] = ()
    shown: Collection[str] = ()
    handmade: Callable[[str], list[str]] = lambda _: []
