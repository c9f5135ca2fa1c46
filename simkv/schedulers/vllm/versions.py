"""What sets the versions of vLLM's V1 scheduler apart, as data.

Read from the wheels on PyPI: ``vllm/v1/core/sched/scheduler.py`` and ``async_scheduler.py``,
``vllm/v1/core/kv_cache_manager.py``, ``block_pool.py`` and ``single_type_kv_cache_manager.py``,
``vllm/config/scheduler.py`` and ``vllm/engine/arg_utils.py``. What is not named here is the same in
all of them: running requests first and in order, one token budget for both loops, nobody admitted
in a step that preempted, the last one preempted under fcfs and put back at the very front, at
least one token computed again after a hit, of equal blocks the one registered first is hit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from simkv.core.scheduler import Variant

#: Why a knob cannot be set, for knobs that a version does not have.
LATER = "came later than vLLM {version}; leave it out"


class Fixed(NamedTuple):
    """The only value of a knob that a version can be given, and why."""

    value: object
    why: str = LATER


@dataclass(frozen=True)
class Rules:
    """The rules that differ between versions; the defaults are those of 0.33.0.

    Defaults of knobs: ``async_scheduling``, ``enable_prefix_caching`` and
    ``scheduler_reserve_full_isl`` (the whole sequence must fit at admission, #37307; before, its
    first chunk). ``fixed`` are the knobs that a version
    does not have, or that are not modelled for it.

    ``keyless_first``: freed blocks without a key of the prefix cache are taken again before all
    others (#42656); else all queue up behind, the tail of a request before its head.
    ``threshold_spares_lone``: ``long_prefill_token_threshold`` does not cap who is alone.
    ``spares_null_block``: start-up asks whether a sequence of ``max_model_len`` fits beside the
    null block; else a cache is accepted that such a sequence outgrows by one block.
    ``skip_blocked``: one without blocks does not stop those that wait behind it. ``swaps``: the KV
    of the preempted goes to host memory; see swap.py.

    Under priority: ``goes_on`` with those behind a running request that has preempted itself;
    else they sit the step out (#26765). ``finds_next`` when a victim before the current request
    had not been scheduled; else the one behind the current request is passed over (issue #49097).

    Asynchronous: ``sees_the_end`` of a request whose last token by ``max_tokens`` is under way;
    else it computes one token more, which is thrown away.
    """

    async_scheduling: bool = True
    scheduler_reserve_full_isl: bool = True
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    keyless_first: bool = True
    threshold_spares_lone: bool = True
    spares_null_block: bool = True
    skip_blocked: bool = False
    swaps: bool = False
    enable_prefix_caching: bool = True
    goes_on: bool = True
    finds_next: bool = True
    sees_the_end: bool = True

    def refuse(self, version: str, config: object) -> None:
        """Raise ValueError if ``config`` sets a knob that ``version`` cannot be given."""
        for knob, fixed in self.fixed.items():
            if getattr(config, knob) not in (fixed.value, None):
                raise ValueError(f"{knob}: {fixed.why.format(version=version)}")


_NO_SWAP = {"num_cpu_blocks": Fixed(0, "vLLM {version} does not swap; leave it out")}
_V33 = Rules(fixed=_NO_SWAP)
_V19 = Rules(
    fixed={
        **_NO_SWAP,
        "watermark": Fixed(0.0),
        "max_num_active_seqs": Fixed(None),
        "prefill_schedule_interval": Fixed(1),
        "long_prefill_token_threshold_adaptive": Fixed(value=False),
    },
    keyless_first=False,
    threshold_spares_lone=False,
    spares_null_block=False,
    goes_on=False,
    finds_next=False,
)
_V11 = replace(
    _V19,
    async_scheduling=False,
    scheduler_reserve_full_isl=False,
    fixed={
        **_V19.fixed,
        "scheduler_reserve_full_isl": Fixed(value=False),
        "max_num_scheduled_tokens": Fixed(None),
        "enable_chunked_prefill": Fixed(
            value=True, why="vLLM {version} always chunks prefills on a GPU; leave it out"
        ),
        "policy": Fixed(
            "fcfs",
            "under priority vLLM {version} may compute a request in the step that preempts it, "
            "which is not modelled; only fcfs",
        ),
    },
    sees_the_end=False,
)

RULES: Mapping[str, Rules] = {
    "0.33.0": _V33,
    "0.33.0-skip-blocked": replace(_V33, skip_blocked=True),
    "0.33.0-swap": replace(
        _V33,
        swaps=True,
        enable_prefix_caching=False,
        fixed={
            "enable_prefix_caching": Fixed(
                value=False, why="{version} has no prefix cache; leave it out"
            )
        },
    ),
    "0.19.0": _V19,
    "0.11.0": _V11,
}

VARIANTS: Mapping[str, Variant] = {
    "0.33.0": Variant(
        "vllm-project/vllm@4ba787ec9 (0.33.0), vllm/v1/core/sched",
        "chunked prefill, decodes first; the whole sequence must fit when it is admitted",
    ),
    "0.33.0-skip-blocked": Variant(
        "0.33.0 with vllm-project/vllm#33499 (2026-02-01, open; also in #35852 and #36390)",
        "0.33.0; a waiting request for which there are no blocks does not stop those behind it",
    ),
    "0.33.0-swap": Variant(
        "0.33.0 with the swapping of vLLM V0 (up to 0.9, vllm/core/scheduler.py); ours, not vLLM's",
        "0.33.0; the KV of the preempted goes to host memory and comes back, as far as it has room",
    ),
    "0.19.0": Variant(
        "vllm-project/vllm@2a69949bd (0.19.0, wheel), vllm/v1/core",
        "0.33.0, but freed blocks queue up whether cached or not, and no watermark or interval",
    ),
    "0.11.0": Variant(
        "vllm-project/vllm@f71952c1c (0.11.0, wheel), vllm/v1/core",
        "0.19.0, but the first chunk must fit, not the whole sequence; synchronous; fcfs only",
    ),
}
