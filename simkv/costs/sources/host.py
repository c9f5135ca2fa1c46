"""Host time of steps, which no table of kernels has."""

from __future__ import annotations

from simkv.costs.profile import Profile

#: What terms of host time are called.
NAME = "host"


def without_host(profile: Profile) -> Profile:
    """The profile with its kernels only."""
    kept = [term for term in profile.terms if not term.name.startswith(NAME)]
    return (
        profile if len(kept) == len(profile.terms) else profile.model_copy(update={"terms": kept})
    )
