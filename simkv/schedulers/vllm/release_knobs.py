"""Settings of vLLM that some releases do not have, or that simkv models only for some releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from simkv.core.engine_version import is_since
from simkv.schedulers.vllm.release_rules import FixedKnob

ADDED = "not available in vLLM {{version}}, added in {since}; remove it"
MODELLED = "not modelled for vLLM {{version}}, only since {since}; remove it"


class ReleasedKnob(NamedTuple):
    """A setting that is available from release ``since`` on and before release ``until``.

    - ``value``: only value that other releases accept.
    - ``why``: error message for releases before ``since``.
    - ``why_ended``: error message for releases from ``until`` on.
    - ``gap``: first release without the setting, and first release that has it again.
    - ``why_gap``: error message for releases in the gap.
    """

    since: str
    value: object
    why: str = ADDED
    until: str | None = None
    why_ended: str = ""
    gap: tuple[str, str] | None = None
    why_gap: str = ""


#: First release for which groups of all kinds are modelled. For earlier releases, only full
#: attention together with one length of sliding windows is modelled.
ALL_GROUPS_SINCE = "0.21"

#: Knobs by the release that introduced them, oldest first.
RELEASED_KNOBS: Mapping[str, ReleasedKnob] = {
    "async_scheduling": ReleasedKnob("0.10", False, MODELLED),
    "policy": ReleasedKnob(
        "0.10",
        "fcfs",
        "not modelled for vLLM {{version}}, which crashes with priority when it preempts a request "
        "that it scheduled in the same step; use fcfs, or vLLM {since}",
    ),
    "kv_cache_groups": ReleasedKnob(
        "0.10",
        (0,),
        MODELLED,
        gap=("0.20", "0.21"),
        why_gap="not modelled for vLLM {version}, which crashes because it counts fewer blocks "
        "than it allocates (get_num_blocks_to_allocate); remove it",
    ),
    "kv_connector": ReleasedKnob("0.11", None, MODELLED),
    "kv_role": ReleasedKnob("0.11", None, MODELLED),
    "enable_chunked_prefill": ReleasedKnob(
        "0.12",
        True,
        "vLLM {{version}} always chunks prefills on a GPU; it can be false since {since}; "
        "remove it",
    ),
    "num_speculative_tokens": ReleasedKnob("0.12", 0, MODELLED),
    "scheduler_reserve_full_isl": ReleasedKnob("0.19", False),
    "mamba_cache_mode": ReleasedKnob(
        "0.21",
        None,
        MODELLED,
        until="0.32",
        why_ended="not available in vLLM {{version}}, which always uses align since {until}; "
        "remove it",
    ),
    "watermark": ReleasedKnob("0.24", 0.0),
    "num_cpu_blocks": ReleasedKnob("0.24", 0, MODELLED),
    "eviction_policy": ReleasedKnob("0.24", "lru", MODELLED),
    "max_num_scheduled_tokens": ReleasedKnob("0.26", None),
    "max_num_queued_reqs": ReleasedKnob("0.29", None),
    "max_num_queued_tokens": ReleasedKnob("0.29", None),
    "prefix_cache_retention_interval": ReleasedKnob(
        "0.29",
        None,
        "not an option of vLLM {{version}}, added in {since}; remove it (the variable "
        "VLLM_PREFIX_CACHE_RETENTION_INTERVAL of older releases is not modelled)",
    ),
    "max_num_active_seqs": ReleasedKnob("0.31", None),
    "long_prefill_token_threshold_adaptive": ReleasedKnob("0.31", False),
    "mamba_prefill_checkpoints": ReleasedKnob("0.32", False),
    "prefill_schedule_interval": ReleasedKnob(
        "0.33",
        1,
        "vLLM {{version}} does not have it or applies it to data-parallel ranks only; honored "
        "outside data-parallel mode since {since}; remove it",
    ),
    "secondary_tiers": ReleasedKnob("0.33", (), MODELLED),
}


def fixed_knobs(release: str) -> dict[str, FixedKnob]:
    """Return the settings that cannot be changed in a release, by name."""
    fixed: dict[str, FixedKnob] = {}
    for knob, (since, value, why, until, why_ended, gap, why_gap) in RELEASED_KNOBS.items():
        if not is_since(release, since):
            fixed[knob] = FixedKnob(value, why.format(since=since))
        elif gap is not None and is_since(release, gap[0]) and not is_since(release, gap[1]):
            fixed[knob] = FixedKnob(value, why_gap)
        elif until is not None and is_since(release, until):
            fixed[knob] = FixedKnob("align", why_ended.format(until=until))
    return fixed
