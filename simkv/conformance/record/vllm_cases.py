"""Small random workloads on which the schedulers of vLLM are recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from simkv.conformance.record.recording_case import CaseSchema, RecordingCase, field_column
from simkv.conformance.record.vllm_handmade_cases import HANDMADE_CASES
from simkv.core.engine_version import is_since
from simkv.core.recording_format import RecordingLine
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.layer_group_parser import CHUNKED
from simkv.schedulers.vllm.release_knobs import ALL_GROUPS_SINCE
from simkv.schedulers.vllm.versions import MINORS, find_rules, find_variant

#: Number of the first random case.
FIRST_CASE = 200

#: Fraction of random cases with a token budget of about one block.
SMALL = 0.25


def _random(version: str, seed: int) -> RecordingCase:
    """Return a random case with a small KV cache and short requests, some with a common prefix."""
    draw, variant = random.Random(f"{version} {seed}"), base_release(version)
    fixed = find_rules(variant).fixed
    block_size, usable = draw.choice([1, 2, 4, 4, 8]), draw.randint(6, 40)
    most = block_size * usable - draw.randint(0, block_size - 1)
    seqs = draw.randint(1, 12)
    chunked = "enable_chunked_prefill" in fixed or draw.random() < 0.85
    budget = draw.randint(seqs if chunked else max(seqs, most), most + 2 * seqs)
    knobs: dict[str, Any] = {
        "enable_chunked_prefill": chunked,
        "policy": draw.choice(["fcfs", "fcfs", "priority"]),
        "scheduler_reserve_full_isl": draw.random() < 0.8,
        "long_prefill_token_threshold": draw.choice([0, 0, 0, draw.randint(1, most)]),
    }
    caching = draw.random() < 0.6
    knobs["async_scheduling"] = draw.random() < 0.5
    config = VllmConfig(
        variant=variant,
        block_size=block_size,
        num_gpu_blocks=usable + 1,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=most,
        enable_prefix_caching=caching,
        **{k: v for k, v in knobs.items() if k not in fixed},
    )
    requests, step = [], 0
    for i in range(draw.randint(2, 14)):
        step += draw.choice([0, 0, 0, 1, 2, draw.randint(0, 30)])
        prompt = draw.randint(1, min(most - 1, draw.choice([8, 40, 400])))
        outputs = draw.randint(1, draw.choice([4, 20, 60]))
        common = draw.choice([0, draw.randint(0, prompt)])
        pieces = [[draw.choice(["g0", "g1"]), 0, common], [f"u{i}", 0, prompt - common]]
        stop = min(outputs, most - prompt)
        requests.append(
            {
                "id": i,
                "arrival_step": step,
                "prompt_tokens": prompt,
                "output_tokens": stop,
                "max_tokens": outputs + draw.choice([0, 0, 5]),
                "priority": draw.randint(0, 2),
                "timestamp": float(step) if draw.random() < 0.7 else draw.random() * step,
                "prompt_segments": [piece for piece in pieces if piece[2]],
            }
        )
    return RecordingCase(config, requests)


def base_release(version: str) -> str:
    """Return the release whose settings are used for ``version``.

    This is ``version`` if it is known, and the newest known release if it is not.
    """
    try:
        find_variant(version)
    except ValueError:
        return next(iter(MINORS.values()))
    return version


def case_names(version: str, count: int) -> list[str]:
    """Return the names of random cases of a release.

    ``count`` is the total number of plain cases, cases with aborts and cases with LoRA adapters.
    The number of cases with layer groups (sliding windows or recurrent states) is half of
    ``count``. Five other features have a quarter of ``count`` cases each: other layer groups, draft
    tokens, blocks in host memory, disks, and KV transfers. Features that the release does not
    support are left out.
    """
    rules = find_rules(base_release(version))
    dies_of_ties = not rules.breaks_ties_by_id and "policy" not in rules.fixed
    kinds = ("rand", "gone", "lora", *(("tied",) if dies_of_ties else ()))
    names = [f"{kinds[i % len(kinds)]}-{FIRST_CASE + i // len(kinds):03}" for i in range(count)]
    if "kv_cache_groups" not in rules.fixed and not has_all_groups(version):
        names += [
            f"{('win', 'wingone')[i % 2]}-{FIRST_CASE + i // 2:03}" for i in range(count // 2)
        ]
    elif "kv_cache_groups" not in rules.fixed:
        groups = ("win", "mamba", "wingone", "mambagone")
        names += [f"{groups[i % 4]}-{FIRST_CASE + i // 4:03}" for i in range(count // 2)]
        odd = ("chunk", "sizegone", "chunkgone", "size")
        names += [f"{odd[i % 4]}-{FIRST_CASE + i // 4:03}" for i in range(count // 4)]
    if "num_speculative_tokens" not in rules.fixed:
        drafts: tuple[str, ...] = ("spec", "specgone")
        if "kv_cache_groups" not in rules.fixed and has_all_groups(version):
            drafts += ("winspec", "winspecgone")
        if rules.drafts_with_states:
            drafts += ("mambaspecgone", "mambaspec")
        if rules.keys_cover_next_token:
            drafts += ("sizespec", "sizespecgone")
        each = len(drafts)
        names += [f"{drafts[i % each]}-{FIRST_CASE + i // each:03}" for i in range(count // 4)]
    if "num_cpu_blocks" not in rules.fixed:
        tiers = ("tier", "tiergone")
        names += [f"{tiers[i % 2]}-{FIRST_CASE + i // 2:03}" for i in range(count // 4)]
    if "secondary_tiers" not in rules.fixed:
        disks = ("disk", "diskgone")
        names += [f"{disks[i % 2]}-{FIRST_CASE + i // 2:03}" for i in range(count // 4)]
    if "kv_connector" not in rules.fixed:
        halves = ("pdload", "pdsend", "pdloadgone", "pdsendgone")
        names += [f"{halves[i % 4]}-{FIRST_CASE + i // 4:03}" for i in range(count // 4)]
    return names


def handmade_names(version: str) -> list[str]:
    """Return the names of the ``HANDMADE_CASES`` whose settings the release accepts."""
    rules = find_rules(base_release(version))
    return [name for name, made in HANDMADE_CASES.items() if made.starts(rules)]


def _newer_knobs(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with random values for settings that later releases introduced.

    Settings that this release does not have are left out.
    """
    config = case.config
    seqs, budget, most = config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len
    knobs: dict[str, Any] = {
        "watermark": draw.choice([0.0, 0.0, 0.05, 0.3]),
        "max_num_scheduled_tokens": draw.choice([None, None, draw.randint(1, budget + most)]),
        "max_num_active_seqs": draw.choice([None, None, draw.randint(1, seqs)]),
        "long_prefill_token_threshold_adaptive": draw.random() < 0.5,
        "prefill_schedule_interval": draw.choice([1, 1, 2, 4]),
    }
    fixed = find_rules(config.variant).fixed
    known = {knob: value for knob, value in knobs.items() if knob not in fixed}
    return case._replace(config=replace(config, **known))


def has_all_groups(version: str) -> bool:
    """Return whether layer groups of all kinds are modelled for a release."""
    return is_since(version, ALL_GROUPS_SINCE)


def _windows(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with layer groups, at least one of them with a sliding window, and a scaled
    KV cache.
    """
    config = case.config
    windows = [draw.randint(2, 6 * config.block_size) for _ in range(2)]
    several = draw.randint(1, 3)
    choices = [(0, windows[0]), (0, *windows[:1] * several), (windows[0],), (0, *windows)]
    groups = draw.choice(choices if has_all_groups(config.variant) else choices[:2])
    blocks = 1 + (config.num_gpu_blocks - 1) * draw.randint(len(groups), 2 * len(groups)) // 2
    return case._replace(
        config=replace(config, kv_cache_groups=groups, num_gpu_blocks=blocks, startup_check=False)
    )


def _come_back(case: RecordingCase, draw: random.Random) -> list[RecordingLine]:
    """Return the requests and follow-up requests that continue some of them."""
    requests, most = [*case.requests], case.config.max_model_len
    for r in draw.sample(case.requests, draw.randint(0, len(case.requests))):
        prompt = r["prompt_tokens"] + r["output_tokens"]
        if not 0 < prompt < most - 1:
            continue
        outputs = draw.randint(1, min(12, most - prompt - 1))
        again = {
            **r,
            "id": len(requests),
            "arrival_step": r["arrival_step"] + draw.randint(0, 60),
            "prompt_tokens": prompt + 1,
            "output_tokens": outputs,
            "max_tokens": outputs,
            "prompt_segments": [
                *r["prompt_segments"],
                [f"o{r['id']}", 0, r["output_tokens"]],
                [f"u{len(requests)}", 0, 1],
            ],
        }
        requests.append({**again, "timestamp": float(again["arrival_step"])})
    return sorted(requests, key=lambda r: (r["arrival_step"], r["id"]))


def _sizes(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with layer groups, some with larger blocks, and follow-up requests."""
    config = _windows(case, draw).config
    size = draw.choice([1, 1, 2, config.block_size])
    groups = [*config.kv_cache_groups]
    groups = [0, *groups] if len(groups) == 1 else groups
    times = {group: draw.choice([2, 2, 3, 4]) for group in dict.fromkeys(groups)}
    times[draw.choice(groups)] = 1
    sized = [f"{group}/{size * times[group]}" if times[group] > 1 else group for group in groups]
    blocks = config.num_gpu_blocks * max(config.block_size // size // 2, 1)
    sizes = {"block_size": size, "num_gpu_blocks": blocks, "kv_cache_groups": tuple(sized)}
    caching = draw.random() < 0.8
    config = replace(config, **sizes, enable_prefix_caching=caching)
    return case._replace(config=config, requests=_come_back(case, draw))


def _chunked(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with layer groups, at least one of them with chunked attention."""
    case = _windows(case, draw)
    chunk = f"{CHUNKED}{case.config.block_size * draw.randint(1, 6)}"
    window = draw.randint(2, 6 * case.config.block_size)
    groups = draw.choice([(0, chunk), (0, chunk, chunk, chunk), (chunk,), (0, chunk, window)])
    blocks = 1 + (case.config.num_gpu_blocks - 1) * draw.randint(2, 4) // 2
    return case._replace(config=replace(case.config, kv_cache_groups=groups, num_gpu_blocks=blocks))


def _states(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with layer groups, at least one of them with recurrent states, and a scaled
    KV cache.
    """
    config, fixed = case.config, find_rules(case.config.variant).fixed
    window, several = draw.randint(2, 6 * config.block_size), draw.randint(1, 3)
    groups = draw.choice(
        [(0, *["mamba"] * several), (0, *["mamba"] * several), ("mamba",), (0, "mamba", window)]
    )
    size = config.block_size
    knobs: dict[str, Any] = {}
    if "mamba_cache_mode" not in fixed:
        knobs["mamba_cache_mode"] = draw.choice([None, None, "all"])
    if config.enable_prefix_caching and not knobs.get("mamba_cache_mode"):
        if "enable_chunked_prefill" not in fixed:
            knobs["enable_chunked_prefill"] = True
        if not find_rules(config.variant).allows_large_state_blocks:
            threshold = config.long_prefill_token_threshold
            knobs["long_prefill_token_threshold"] = max(threshold, size) if threshold else 0
            knobs["max_num_batched_tokens"] = max(config.max_num_batched_tokens, size)
    if "mamba_prefill_checkpoints" not in fixed:
        knobs["mamba_prefill_checkpoints"] = random.Random(f"{case.requests}").random() < 0.5
    most = max(config.max_model_len // size, 1)
    blocks = 1 + draw.randint(most, 2 * most) + draw.randint(1, 2 * len(groups) + most)
    return case._replace(
        config=replace(
            config, kv_cache_groups=groups, num_gpu_blocks=blocks, startup_check=False, **knobs
        )
    )


def _drafts(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with a drafter; the field ``accepts`` of a request lists its numbers of
    accepted drafts.
    """
    config, rules = case.config, find_rules(case.config.variant)
    # the same method as eagle
    method = draw.choice([name for name in rules.draft_methods if name != "mtp"])
    drafts = draw.randint(1, min(draw.choice([1, 3, 8]), config.max_model_len))
    slots = config.max_num_seqs if method == "draft_model" else 0
    threshold = config.long_prefill_token_threshold
    knobs: dict[str, Any] = {
        "num_speculative_tokens": drafts,
        "speculative_method": method,
        "max_num_batched_tokens": config.max_num_batched_tokens + draw.randint(slots, 2 * slots),
        "long_prefill_token_threshold": threshold
        and min(max(threshold, drafts + 1), config.max_model_len),
    }
    if knobs["long_prefill_token_threshold"] <= drafts:
        knobs["long_prefill_token_threshold"] = 0
    if method not in rules.async_draft_methods:
        knobs["async_scheduling"] = False
    if config.has_states:
        if config.mamba_cache_mode == "all":
            knobs |= {"mamba_cache_mode": None, "enable_prefix_caching": False}
        within = config.mamba_prefill_checkpoints and (
            method != "eagle" or rules.keys_cover_next_token
        )
        knobs["mamba_prefill_checkpoints"] = within
    if rules.reserves_draft_slots and "max_num_scheduled_tokens" not in rules.fixed:
        knobs["max_num_scheduled_tokens"] = None
    requests = [
        {**request, "accepts": [draw.randint(0, drafts) for _ in range(draw.randint(1, 9))]}
        for request in case.requests
    ]
    return case._replace(config=replace(config, **knobs), requests=requests)


def _small_budget(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case; in a fraction ``SMALL`` of cases, its token budget is at most two blocks
    above the minimum.
    """
    config, rules = case.config, find_rules(case.config.variant)
    if draw.random() >= SMALL or not config.enable_chunked_prefill:
        return case
    slots = config.draft_slots * (config.max_num_seqs if rules.reserves_draft_slots else 1)
    keeps_states = config.has_states and config.states(rules) == "align"
    whole = config.block_size if keeps_states and not rules.allows_large_state_blocks else 1
    least = max(config.max_num_seqs, slots + 1, whole)
    budget = draw.randint(least, least + 2 * config.block_size)
    knobs: dict[str, Any] = {"max_num_batched_tokens": budget}
    if "max_num_scheduled_tokens" not in rules.fixed:
        drafts = config.num_speculative_tokens and rules.reserves_draft_slots
        most = budget - slots if drafts else budget + config.block_size
        knobs["max_num_scheduled_tokens"] = draw.choice([None, None, draw.randint(1, most)])
    return case._replace(config=replace(config, **knobs))


def _tiers(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with KV blocks in host memory and with follow-up requests."""
    knobs: dict[str, Any] = {
        "block_size": max(case.config.block_size, 2),
        "num_cpu_blocks": draw.choice([draw.randint(1, 8), draw.randint(4, 40), 200]),
        "eviction_policy": draw.choice(["lru", "lru", "arc"]),
        "enable_prefix_caching": True,
    }
    requests = _come_back(case, draw)
    copies = [draw.choice([0, 0, 1, 2, draw.randint(0, 15)]) for _ in range(draw.randint(1, 7))]
    config = replace(case.config, **knobs)
    return case._replace(config=config, requests=requests, copies=copies)


def _disk(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with a disk, with too little host memory, and with more follow-up
    requests.
    """
    for _ in range(3):
        case = _tiers(case, draw)
    blocks = draw.choice([draw.randint(1, 12), draw.randint(4, 24), draw.randint(8, 40)])
    config = replace(case.config, num_cpu_blocks=blocks, secondary_tiers=("fs",))
    disk = [draw.choice([0, 0, 1, 3, draw.randint(0, 20)]) for _ in range(draw.randint(1, 7))]
    looks = [draw.choice([0, 0, 0, 1, draw.randint(0, 6)]) for _ in range(draw.randint(1, 4))]
    return case._replace(config=config, disk=disk, looks=looks)


def _apart(case: RecordingCase, draw: random.Random, kv: str) -> RecordingCase:
    """Return the case for a prefill or decode replica; most requests ``send`` or ``load`` KV."""
    config, fixed = case.config, find_rules(case.config.variant).fixed
    role = {"send": "kv_producer", "load": "kv_consumer"}[kv]
    knobs: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": draw.choice([role, role, "kv_both"]),
    }
    if not find_rules(config.variant).skips_last_token_in_flight:
        knobs |= {"async_scheduling": False} if kv == "send" else {"kv_role": role}
    requests = []
    for request in case.requests:
        r = {**request, **({"kv": kv} if draw.random() < 0.8 else {})}
        if kv == "send" and "kv" in r and draw.random() < 0.9:
            r |= {"output_tokens": 1}
        if kv == "send" and "kv" in r:
            r |= {"max_tokens": r["output_tokens"]}
        requests.append(r)
    steps = [draw.choice([0, 0, 1, 2, draw.randint(0, 15)]) for _ in range(draw.randint(1, 7))]
    known = {knob: value for knob, value in knobs.items() if knob not in fixed}
    return case._replace(config=replace(config, **known), requests=requests, transfers=steps)


def _aborts(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with aborts of some requests, about half of them while they are served."""
    aborts = [
        (
            max(r["arrival_step"] + draw.randint(-1, 3 * r["output_tokens"]), 0),
            draw.randint(0, 2),
            r["id"],
        )
        for r in case.requests
        if draw.random() < 0.6
    ]
    return case._replace(aborts=sorted(aborts))


def _loras(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with LoRA adapters for most requests; there are more adapters than can run at
    a time.
    """
    most = draw.randint(1, 3)
    names = [None, *("abcde"[: most + draw.randint(0, 2)])]
    requests = [
        {**request, **({"lora": name} if (name := draw.choice(names)) else {})}
        for request in case.requests
    ]
    config = replace(case.config, enable_lora=True, max_loras=most)
    return case._replace(config=config, requests=requests)


#: Functions that add layer groups to a case, by the prefix of the case name.
LAYER_GROUP_CASES = {"win": _windows, "chunk": _chunked, "mamba": _states, "size": _sizes}


#: Functions that add KV outside the GPU to a case, by the prefix of the case name.
EXTERNAL_KV_CASES: dict[str, Callable[[RecordingCase, random.Random], RecordingCase]] = {
    "tier": _tiers,
    "disk": _disk,
    "pdsend": partial(_apart, kv="send"),
    "pdload": partial(_apart, kv="load"),
}


def make_case(version: str, name: str) -> RecordingCase:
    """Build the case with this name: a handmade case, or a kind and a number.

    - ``rand-``: plain; ``gone-``: with aborts; ``lora-``: with LoRA adapters.
    - ``win-``: with layer groups; ``mamba-``: with groups that have recurrent states.
    - ``chunk-``: with chunked attention; ``size-``: with blocks of several sizes.
    - ``spec-``: with draft tokens; ``winspec-``, ``mambaspec-`` and so on also have layer groups.
    - ``tier-``: with blocks in host memory; ``disk-``: also with a disk.
    - ``pdsend-``, ``pdload-``: on a replica that only prefills or only decodes.

    If the kind in a name ends with ``gone``, such as ``wingone-``, the case has aborts. A kind
    exists only if the release supports it. Some releases do not order requests of equal priority
    and arrival; for these releases, only ``tied-`` cases contain such requests.
    """
    base = base_release(version)
    if name in HANDMADE_CASES:
        return HANDMADE_CASES[name].make(base)
    kind, seed = name.split("-")
    draw = random.Random(f"{version} {name}")
    case = _newer_knobs(_random(version, int(seed)), draw)
    if kind != "tied" and not find_rules(base).breaks_ties_by_id:
        for request in case.requests:
            request["timestamp"] += request["id"] / 1000
    if kind == "lora":
        return _aborts(_loras(case, draw), draw) if draw.random() < 0.3 else _loras(case, draw)
    for layers, add in LAYER_GROUP_CASES.items():
        if kind.startswith(layers):
            case = add(case, draw)
    if "spec" in kind:
        case = _drafts(case, draw)
    for elsewhere, change in EXTERNAL_KV_CASES.items():
        if kind.startswith(elsewhere):
            case = change(case, draw)
    case = _small_budget(case, random.Random(f"{version} {name} budget"))
    return _aborts(case, draw) if kind.endswith("gone") else case


def _cut(request: RecordingLine, tokens: int) -> RecordingLine:
    """Return the segments of a prompt that is shortened to ``tokens``."""
    segments = []
    for stream, start, end in request["prompt_segments"]:
        if tokens > 0:
            segments.append([stream, start, min(end, start + tokens)])
        tokens -= end - start
    return {"prompt_segments": segments}


def _made_of(request: RecordingLine) -> str:
    return " ".join(f"{stream}[{a}:{b}]" for stream, a, b in request["prompt_segments"])


CASE_SCHEMA = CaseSchema(
    kept={"name", "variant", "block_size", "num_gpu_blocks", "max_model_len"}
    # without these fields, requests cannot name the destination of their KV
    | {"kv_connector", "kv_role"},
    plain={"enable_prefix_caching": False, "async_scheduling": False},
    cut=_cut,
    limit="max_tokens",
    unnamed={"enable_lora", "max_cpu_loras", "speculative_method", "mamba_prefill_checkpoints"}
    | {"startup_check"},
    idle=("arrival_step", "priority"),
    columns={
        "request": field_column("id"),
        "before step": field_column("arrival_step"),
        "prompt": field_column("prompt_tokens"),
        "output": field_column("output_tokens"),
        "priority": field_column("priority"),
        "arrival": lambda request: f"{request['timestamp']:g}",
        "prompt is made of": _made_of,
    },
)
