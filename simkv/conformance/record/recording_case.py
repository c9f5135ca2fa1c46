"""A workload for recording an engine's released scheduler, and the settings of such workloads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from simkv.core.recording_format import RecordingLine


class RecordingCase(NamedTuple):
    """Configuration, requests and aborts of a recording.

    ``aborts`` are tuples (step, phase, request id). The lists of durations in steps are ``copies``
    for KV copies to and from host memory, ``disk`` for transfers to and from a disk, ``looks`` for
    lookups on the disk, and ``transfers`` for KV transfers between replicas. Operations use the
    durations in order and repeatedly.
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
        """The lists of durations that are not empty, by their field names in the header of a
        recording.
        """
        said = {"copies": self.copies, "disk": self.disk, "looks": self.looks}
        said["transfers"] = self.transfers
        return {name: steps for name, steps in said.items() if steps}


@dataclass(frozen=True)
class CaseSchema:
    """Settings of an engine's cases.

    Shrinking leaves the settings in ``kept`` unchanged and resets all others to ``plain`` or to
    their defaults. ``unnamed`` settings have other names in the engine. ``shown`` settings need
    recordings that depend on them. ``handmade(version)`` returns the names of handmade cases.
    """

    kept: Collection[str]
    plain: Mapping[str, Any]
    unnamed: Collection[str] = ()
    shown: Collection[str] = ()
    handmade: Callable[[str], list[str]] = lambda _: []
