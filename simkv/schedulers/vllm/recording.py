"""Format of recorded vLLM decisions: one line per ``schedule`` call.

In each iteration, the recorder schedules a step. If ``pipeline_depth`` batches are in flight after
that, it delivers the results of the oldest one.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, cast

from simkv.core.recording_format import RecordingFormat, RecordingLine
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import (
    Batch,
    DiskTransfers,
    KvCopies,
    KvCopy,
    blocks_for,
)
from simkv.schedulers.vllm.config import COST_KNOBS, VllmConfig
from simkv.schedulers.vllm.versions import find_rules

if TYPE_CHECKING:
    from simkv.schedulers.vllm.scheduler import VllmScheduler
    from simkv.schedulers.vllm.transfer_scheduler import VllmTransferScheduler

#: Values of knobs that are missing in older recordings.
LATER_KNOBS = {
    "enable_lora": False,
    "max_loras": 1,
    "max_cpu_loras": None,
    "max_num_queued_reqs": None,
    "max_num_queued_tokens": None,
    "kv_cache_groups": [0],
    "mamba_cache_mode": None,
    "mamba_prefill_checkpoints": False,
    "prefix_cache_retention_interval": None,
    "num_speculative_tokens": 0,
    "speculative_method": "eagle",
    "eviction_policy": "lru",
    "secondary_tiers": [],
    "kv_connector": None,
    "kv_role": None,
    "request_retention": False,
    "pin_priority": None,
}


def _config(header: RecordingLine) -> VllmConfig:
    """Return the config of a recording without the checks of the engine's start-up."""
    # The recorder ran the scheduler without these checks.
    ours = {"name", "variant", "rule", "startup_check", *COST_KNOBS}
    knobs = {knob.name for knob in fields(VllmConfig)} - ours
    recorded = header["config"]
    variant = recorded.get("variant", header["variant"])
    if variant.startswith("v1-"):  # Named setups of 0.33.0, which have one layer group.
        variant, recorded = "0.33.0", {**recorded, "kv_cache_groups": [0]}
    # Defaults for knobs that the engine or an older recorder did not have.
    recorded = {"num_cpu_blocks": 0, **LATER_KNOBS, **recorded}
    given = {knob: recorded[knob] for knob in knobs}
    for knob in ("kv_cache_groups", "secondary_tiers"):
        given[knob] = tuple(given[knob])
    config = VllmConfig(startup_check=False, variant=variant, **given)
    rules = find_rules(variant)
    older = "prefix_cache_retention_interval" not in header["config"]
    if older and rules.caches_boundaries_only and config.retention_interval(rules) is None:
        return replace(config, prefix_cache_retention_interval=0)  # used by older recorders
    return config


def _knobs(config: VllmConfig) -> RecordingLine:
    ours = ("name", "rule", "startup_check", *COST_KNOBS)
    return {knob: value for knob, value in asdict(config).items() if knob not in ours}


def _prompt(request: RecordingLine) -> Prompt:
    return Prompt(
        id=request["id"],
        prompt_tokens=request["prompt_tokens"],
        max_tokens=request["max_tokens"],
        arrival=request["timestamp"],
        priority=request["priority"],
        segments=tuple(Segment(*segment) for segment in request.get("prompt_segments", ())),
        lora=request.get("lora"),
        client=request.get("client"),
    )


def _shown(prompt: Prompt) -> RecordingLine:
    return {
        "max_tokens": prompt.max_tokens,
        "timestamp": prompt.arrival,
        "priority": prompt.priority,
        "prompt_segments": [list(segment) for segment in prompt.segments],
        **({"lora": prompt.lora} if prompt.lora else {}),
        **({"client": prompt.client} if prompt.client else {}),
    }


def _decide(scheduler: VllmScheduler) -> tuple[Batch, RecordingLine]:
    running, blocks_of = set(scheduler.running_ids()), scheduler.memory.blocks_of
    held = {i: set(blocks_of(i)) for i in running}
    batch = scheduler.schedule()
    rows = batch.rows()
    new_blocks = [
        (row.id, [block for block in blocks_of(row.id) if block not in held.get(row.id, ())])
        for row in rows
    ]
    line = {
        "hits": [[row.id, row.context] for row in rows if row.id not in running],
        "new_blocks": [[i, blocks] for i, blocks in new_blocks if blocks],
        "running_after_schedule": scheduler.running_ids(),
        "free_blocks_after_schedule": scheduler.free_blocks,
    }
    if cache := scheduler.memory.cache:
        line["cached_blocks_after_schedule"] = cache.cached
    if (drafted := batch.drafted) and drafted.tokens:
        line["drafts"] = [[row.id, n] for row in rows if (n := drafted.tokens.get(row.id))]
        line["padding"] = sorted(drafted.padding)
    if scheduler.config.offloads:
        line |= _copies(scheduler.config, batch.moves or KvCopies([], [], []))
    if scheduler.config.kv_connector:
        line["loads"] = [[i, blocks_for(n, scheduler.config.block_size)] for i, n in batch.loads]
        line["sends"] = cast("VllmTransferScheduler", scheduler).sends
    return batch, line


def _copies(config: VllmConfig, moves: KvCopies) -> RecordingLine:
    """Return the KV copies of a batch as fields of a recording, in blocks."""
    # With a disk tier, each load also has the number of its blocks that were read from disk.
    size = config.block_size

    def blocks(copies: list[KvCopy]) -> list[list[int]]:
        return [[job, i, tokens // size] for job, i, tokens, _ in copies]

    line: RecordingLine = {
        "loads": blocks(moves.loads),
        "stores": blocks(moves.stores),
        "flush": moves.flush,
    }
    if config.secondary_tiers:
        disk = moves.disk or DiskTransfers([], [], None)
        for load, move in zip(line["loads"], moves.loads, strict=True):
            load.append(move.disk // size)
        line |= {"reads": blocks(disk.reads), "writes": blocks(disk.writes)}
        line["look"] = disk.look[1] if disk.look else 0
    return line


RECORDING = RecordingFormat(_config, _prompt, _knobs, _shown, decide=_decide)
