"""Replay of recorded SGLang decisions: the normal loop and the overlap loop, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from simkv.core.request import Prompt, Segment
from simkv.core.scheduler import Batch, Completion
from simkv.proof.conform.lockstep import Emitted, Standstill, arrivals_by_step
from simkv.proof.conform.trace import Line
from simkv.schedulers.sglang.scheduler import SglangConfig, SglangScheduler


def replay(header: Line, at_least: int) -> Iterator[Line]:
    """Step lines of simkv's scheduler on the recorded workload.

    Ends with the step in which the last request ends; with the overlap loop, with the first step
    after it that launches nothing. A closing line tells if the engine dies, or if its state
    repeats after ``at_least`` lines.
    """
    scheduler = SglangScheduler(config_from(header["config"]))
    arrivals = arrivals_by_step(header["requests"])
    alive = {request["id"] for request in header["requests"]}
    emitted, standstill = Emitted(header["requests"]), Standstill()
    in_flight = Batch()
    for step in count():
        for request in arrivals.pop(step, ()):
            scheduler.add(prompt_from(request))
            standstill.progress()
        batch = scheduler.schedule()
        if batch.fatal:
            yield {"truncated": True, "ending": "raised", "why": batch.fatal}
            return
        chunked = scheduler.chunked.id if scheduler.chunked else None
        done, in_flight = (
            (batch, in_flight) if scheduler.pipeline_depth == 1 else (in_flight, batch)
        )
        completion = scheduler.complete(done, emitted.ended(done))
        emitted.count(completion)
        yield _line(step, scheduler, batch, completion, chunked)
        alive -= {*completion.finished, *batch.ignored}
        if not alive and not in_flight.scheduled:
            return
        if completion.delivered:
            standstill.progress()
        elif not arrivals and standstill.repeats(scheduler.fingerprint()) and step + 1 >= at_least:
            waiting = scheduler.waiting_ids()
            yield {"truncated": True, "ending": "stall", "why": f"no progress; waiting: {waiting}"}
            return


def _line(
    step: int, scheduler: SglangScheduler, batch: Batch, completion: Completion, chunked: int | None
) -> Line:
    memory = scheduler.memory
    return {
        "step": step,
        "scheduled": [list(row) for row in batch.scheduled],
        "kind": batch.kind,
        "preempted": batch.preempted,
        "finished": completion.finished,
        "ignored": batch.ignored,
        "waiting": scheduler.waiting_ids(),
        "running": scheduler.decode_ids(),
        "chunked": chunked,
        "free_blocks": memory.free // memory.page_size,
        "new_token_ratio": scheduler.ratio,
        "batch_is_full": scheduler.running.full,
        "prefix_lens": batch.context,
        "evictable": memory.evictable,
        "processed_tokens": scheduler.processed_tokens,
    }


def config_from(recorded: Line) -> SglangConfig:
    """The configuration that a trace header records under its own names."""
    chunk = recorded["chunked_prefill_size"]
    return SglangConfig(
        variant=recorded.get("variant", "0.5.23"),
        lpm_aging_tokens_per_pass=recorded.get("lpm_aging_tokens_per_pass", 0),
        max_total_num_tokens=recorded["max_total_num_tokens"],
        page_size=recorded["page_size"],
        max_running_requests=recorded["max_running_requests"],
        chunked_prefill_size=-1 if chunk is None else chunk,
        max_prefill_tokens=recorded["max_prefill_tokens"],
        prefill_max_requests=recorded["prefill_max_requests"],
        schedule_policy=recorded["policy"],
        disable_radix_cache=not recorded["radix_cache"],
        disable_overlap_schedule=not recorded["overlap"],
        enable_mixed_chunk=recorded["enable_mixed_chunk"],
        prefill_decode_interval=recorded.get("prefill_decode_interval", 0),
        prefill_decode_interval_min_bs=recorded.get("prefill_decode_interval_min_bs", 0),
        schedule_conservativeness=recorded["schedule_conservativeness"],
        init_new_token_ratio=recorded["init_new_token_ratio_base"],
        min_new_token_ratio_factor=recorded["min_new_token_ratio_factor"],
        new_token_ratio_decay_steps=recorded["new_token_ratio_decay_steps"],
        retract_decode_steps=recorded["retract_decode_steps"],
        clip_max_new_tokens_estimation=recorded["clip_max_new_tokens"],
        in_batch_prefix_caching_check_threshold=recorded["in_batch_prefix_check_threshold"],
        in_batch_prefix_caching_deprioritize_threshold=recorded[
            "in_batch_prefix_deprioritize_threshold"
        ],
    )


def prompt_from(recorded: Line) -> Prompt:
    """A request of a trace header as a scheduler sees it, with the limit that the client asked."""
    return Prompt(
        id=recorded["id"],
        prompt_tokens=recorded["prompt_tokens"],
        max_tokens=recorded["max_tokens_requested"],
        arrival=float(recorded["arrival_step"]),
        ignore_eos=recorded.get("ignore_eos", False),
        segments=tuple(
            Segment(stream, start, start + tokens)
            for stream, start, tokens in recorded.get("segments", ())
        ),
    )
