"""Tests of SGLang's memory with numbered pages: the decisions are the same, and every page has one
owner.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import simpy
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.scheduler_protocol import blocks_for
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.schedulers.engine_registry import build_scheduler, find_engine_spec
from simkv.schedulers.sglang.paged_memory import PagedMemory
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.workload.workload_section import generate_requests
from tests.laws.random_scenarios import scenarios


def check(memory: PagedMemory, live: dict[int, Any]) -> None:
    """Check that the free pages match the counter, and that each other page has an owner."""
    size = memory.page_size
    assert len(memory.free_pages) * size == memory.free
    owners = Counter(memory.free_pages)
    if memory.pages:
        for pages in memory.pages._pages.values():
            owners.update(pages)
        assert set(memory.pages._pages) == set(memory.pages.nodes())
    assert memory.tables.keys() == {i for i, r in live.items() if r.kv}
    for i, table in memory.tables.items():
        r = live[i]
        assert len(table) == blocks_for(r.kv, size)
        owners.update(table[r.owned // size :])
        if memory.pages and r.node:
            assert table[: r.owned // size] == memory.pages.path(r.node)[: r.owned // size]
    assert max(owners.values()) == 1
    assert sorted(owners) == list(range(1, len(owners) + 1))


class Checked:
    """A scheduler whose pages are checked after every call."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def schedule(self) -> Any:
        batch = self.inner.schedule()
        if not batch.fatal:
            check(self.inner.state.memory, self.inner.state.admitted)
            for row in batch.rows():
                table = self.inner.state.memory.tables[row.id]
                assert len(table) >= blocks_for(row.context + row.tokens, self.config.page_size)
        return batch

    def complete(self, batch: Any, ended: Any) -> Any:
        completion = self.inner.complete(batch, ended)
        check(self.inner.state.memory, self.inner.state.admitted)
        return completion


@given(data=st.data())
def test_sglang_pages(data):
    scenario = data.draw(scenarios("sglang", "0.5.23"))
    records = []
    tabled = find_engine_spec(scenario.engine).build_with_tables(scenario.engine)
    for scheduler in (build_scheduler(scenario.engine), Checked(tabled.scheduler)):
        executor = SimulatedExecutor(load_profile("unit-step"))
        engine = Engine(simpy.Environment(), scheduler, executor, leaping=False)
        requests = generate_requests(scenario.workload, scenario.timeout)
        records.append(run_clients(engine, requests, scenario.horizon).steps)
    assert records[0] == records[1]
