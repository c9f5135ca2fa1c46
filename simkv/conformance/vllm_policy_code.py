"""Export a policy of ``simkv.core.policy_language`` as a scheduler class for vLLM.

A policy of this kind makes decisions in the middle of a step, but the class needs no copy of vLLM's
``schedule`` method. The class replaces the waiting queue by one that evaluates to false while the
policy does not admit the first request. Priorities are replaced by ranks while vLLM selects a
request to preempt. The prefill threshold is set before each step.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from simkv.core.engine_spec import EngineSpec
from simkv.core.errors import InputError
from simkv.core.policy_language import parse_policy
from simkv.scenario.scenario_loader import load
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.policy_hooks import POLICY_HOOKS
from simkv.schedulers.vllm.spec import VLLM

_TEXT = '''"""A scheduling policy for vLLM {release}, exported by simkv from {file}.

{lines}

SHA-256 of the policy: {digest}

    vllm serve MODEL --scheduler-cls {module}.EvolvedScheduler

EvolvedSyncScheduler is the same without asynchronous scheduling. The scheduling policy stays fcfs.
"""

from __future__ import annotations

from bisect import bisect_left

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

# The policy.

RULE = {{
{rule}
}}


def _over(a, b):
    return a / b if b else 0.0


def _value(seam, view):
    value = RULE[seam](view)
    return value if value == value else 0.0


# Values that it uses.


class _View:
    """Values of a request and of the engine, or of the engine alone."""

    def __init__(self, scheduler, request=None):
        self._of, self._r = scheduler, request

    @property
    def age(self):
        return self._of.newest - self._r.arrival_time

    @property
    def prompt_tokens(self):
        return float(self._r.num_prompt_tokens)

    @property
    def tokens(self):
        return float(self._r.num_tokens)

    @property
    def blocks(self):
        return float(-(-self._r.num_computed_tokens // self._of.block_size))

    @property
    def preemptions(self):
        return float(self._r.num_preemptions)

    @property
    def priority(self):
        return float(self._r.priority)

    @property
    def bucket(self):
        return float(self._r.num_tokens.bit_length())

    @property
    def free(self):
        pool = self._of.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() / (pool.num_gpu_blocks - 1)

    @property
    def running(self):
        return float(len(self._of.running))

    @property
    def waiting(self):
        return float(len(self._of.waiting))


# Connection to vLLM.


class _Queue(FCFSRequestQueue):
    """Waiting requests in the order of the policy; false while it admits none."""

    def __init__(self, scheduler):
        super().__init__()
        self._of = scheduler
        self._places = {{}}

    def __bool__(self):
        if not len(self):
            return False
        of = self._of
        return "admit" not in RULE or not of.running or _value("admit", _View(of, self[0])) > 0

    def add_request(self, request):
        if "waiting_order" not in RULE:
            return super().add_request(request)
        self._places[request.request_id] = self._of.place("waiting_order", request)
        self.insert(bisect_left(self, self._place(request), key=self._place), request)

    def prepend_request(self, request):
        if "waiting_order" not in RULE:
            return super().prepend_request(request)
        self.add_request(request)

    def prepend_requests(self, requests):
        if "waiting_order" not in RULE:
            return super().prepend_requests(requests)
        for request in requests:
            self.add_request(request)

    def look_again(self):
        """Sort again by the current values."""
        requests = list(self)
        self.clear()
        for request in requests:
            self.add_request(request)

    def _place(self, request):
        return self._places[request.request_id]


class _Asks:
    """Applies the policy where it defines a decision; vLLM decides the rest."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.newest, self._older, self._numbers = 0.0, False, {{}}
        self.waiting = _Queue(self)
        if "victim" in RULE:
            self.policy = SchedulingPolicy.PRIORITY
        if "chunk" in RULE:
            self.adaptive_long_prefill_threshold = False

    def place(self, seam, request):
        """Rank of a request; ties are broken by arrival, then by order of addition."""
        number = self._numbers[request.request_id]
        return _value(seam, _View(self, request)), request.arrival_time, number

    def add_request(self, request):
        self._numbers.setdefault(request.request_id, len(self._numbers))
        self._older |= request.arrival_time > self.newest
        self.newest = max(self.newest, request.arrival_time)
        return super().add_request(request)

    def schedule(self, *args, **kwargs):
        if self._older and {by_age}:
            self.waiting.look_again()
        self._older = False
        if "chunk" in RULE:
            limit = min(max(_value("chunk", _View(self)), 0), self.max_model_len)
            self.scheduler_config.long_prefill_token_threshold = int(limit)
        if "victim" not in RULE:
            return super().schedule(*args, **kwargs)
        ranked = sorted(self.running, key=lambda request: self.place("victim", request))
        own = [(request, request.priority) for request in ranked]
        for rank, request in enumerate(ranked):
            request.priority = rank
        try:
            return super().schedule(*args, **kwargs)
        finally:
            for request, priority in own:
                request.priority = priority


class EvolvedScheduler(_Asks, AsyncScheduler):
    """The policy with asynchronous scheduling."""


class EvolvedSyncScheduler(_Asks, Scheduler):
    """The policy without asynchronous scheduling."""
'''


def read_policy(file: Path) -> str:
    """Return the policy text of the last variant that has a policy in a scenario file.

    Raises InputError if no variant has a policy for vLLM.
    """
    engines = [scenario.engine for scenario in load(file).values()]
    ruled = [one for one in engines if isinstance(one, VllmConfig) and one.rule]
    if not ruled:
        raise InputError(
            f"{file}: no variant with engine vllm sets engine.rule; only policies for vLLM can "
            "be exported"
        )
    return str(ruled[-1].rule)


def render_policy_class(file: Path, release: str, module: str) -> str:
    """Return the source of a Python module with the scheduler class for vLLM.

    Raises InputError if the scenario has no policy for vLLM.
    """
    text = read_policy(file)
    rule = parse_policy(text, POLICY_HOOKS)
    order = rule.get("waiting_order")
    return _TEXT.format(
        release=release,
        file=file.name,
        lines="\n".join(f"    {name} = {one.text}" for name, one in rule.items()),
        digest=hashlib.sha256(text.encode()).hexdigest(),
        module=module,
        rule="\n".join(f'    "{name}": lambda r: {one.python},' for name, one in rule.items()),
        by_age=order is not None and "age" in order.names,
    )


def policy_spec(file: Path) -> EngineSpec:
    """Return a specification of vLLM that uses the policy of a scenario, to replay a recording."""
    text = read_policy(file)

    def build(config: Any) -> Any:
        return VLLM.build(VllmConfig(**{**asdict(config), "rule": text}))

    return replace(VLLM, build=build)
