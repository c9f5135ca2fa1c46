"""Small random workloads on which the scheduler of SGLang is recorded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from simkv.core.recording import Line
from simkv.proof.record.sglang import SglangCase
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.versions import RULES


def base_of(version: str) -> str:
    """The release whose knobs ``version`` has: itself, or the newest if it is not known yet."""
    return version if version in RULES else next(iter(RULES))


def sglang_case(version: str, name: str) -> SglangCase:
    """The case of this name, ``rand-`` or ``lora-`` and a number: a tight pool, short requests."""
    draw = random.Random(f"{version} {name}")
    base = base_of(version)
    page = draw.choice([1, 1, 1, 4, 16])
    pool = page * draw.randint(-(-40 // page), -(-400 // page))
    chunk = draw.choice([-1, page * draw.randint(1, -(-48 // page))])
    knobs: dict[str, Any] = {
        "variant": base,
        "max_running_requests": draw.randint(1, 16),
        "max_prefill_tokens": draw.choice([16384, 16384, draw.randint(8, 200)]),
        "prefill_max_requests": draw.choice([None, None, None, draw.randint(1, 4)]),
        "schedule_policy": draw.choice(["fcfs", "fcfs", "lpm", "hrrn"]),
        "disable_radix_cache": draw.random() < 0.5,
        "disable_overlap_schedule": draw.random() < 0.5,
        "enable_mixed_chunk": draw.random() < 0.4,
        "prefill_decode_interval": draw.choice([0, 0, 0, 1, 3]),
        "prefill_decode_interval_min_bs": draw.choice([0, 2]),
        "schedule_conservativeness": draw.choice([0.0, 0.1, 0.3, 1.0]),
        "min_new_token_ratio_factor": draw.choice([0.0, 0.14]),
        "new_token_ratio_decay_steps": draw.choice([5, 600]),
        "retract_decode_steps": draw.choice([0, 3, 20]),
        "clip_max_new_tokens_estimation": draw.choice([8, 4096]),
        "in_batch_prefix_caching_check_threshold": draw.choice([2, 32]),
        "in_batch_prefix_caching_deprioritize_threshold": draw.choice([2, 32]),
    }
    knobs = {knob: value for knob, value in knobs.items() if knob not in RULES[base].lacks}
    config = SglangConfig(
        page_size=page,
        max_total_num_tokens=pool,
        chunked_prefill_size=chunk,
        **knobs,
    )
    case = SglangCase(config, _requests(draw, pool - max(2 * page + 2, 7)))
    return _loras(case, draw) if name.startswith("lora") else case


def _loras(case: SglangCase, draw: random.Random) -> SglangCase:
    """Where most ask for one of a few adapters, of which not all can run at a time."""
    most = draw.randint(1, 3)
    drains = draw.random() < 0.5
    # With a drainer all ask for one: among equals it takes any, and None has no fixed place.
    names = ["abcdef"[i] for i in range(most + draw.randint(0, 2))]
    names += [] if drains else [""]
    requests = [
        {**request, **({"lora": name} if (name := draw.choice(names)) else {})}
        for request in case.requests
    ]
    config = replace(
        case.config,
        enable_lora=True,
        max_loras_per_batch=most,
        lora_drain_wait_threshold=draw.choice([0.5, 3.5, 10.5]) if drains else 0.0,
    )
    return SglangCase(config, requests)


def _requests(draw: random.Random, longest: int) -> list[Line]:
    """Prompts of which each leaves room for an output, some of them with common beginnings."""
    requests: list[Line] = []
    step = 0
    for i in range(draw.randint(2, 14)):
        step += draw.choice([0, 0, 0, 1, 2, draw.randint(0, 30)])
        prompt = draw.randint(1, min(longest, draw.choice([8, 40, 120])))
        outputs = draw.randint(1, draw.choice([4, 20, 60]))
        common, to_the_end = draw.choice([0, draw.randint(0, prompt)]), draw.random() < 0.15
        pieces = [[draw.choice(["g0", "g1"]), 0, common], [f"u{i}", 0, prompt - common]]
        requests.append(
            {
                "id": i,
                "arrival_step": step,
                "prompt_tokens": prompt,
                "output_tokens": outputs,
                "max_tokens_requested": outputs + (0 if to_the_end else draw.choice([0, 0, 5, 40])),
                "ignore_eos": to_the_end,
                "segments": [piece for piece in pieces if piece[2]],
            }
        )
    return requests
