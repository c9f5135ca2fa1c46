"""Run simkv's port and the engine's own (native) scheduler side by side and report the first
difference.

The decisions of the port determine the simulation; the native scheduler receives the same calls.
Decisions, results, queues and free blocks are compared after each call, and the block tables or,
if the port does not number blocks, the number of blocks of each request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, Completion, Scheduler
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec
from simkv.sim.simulation import build_replica_specs, simulate_scenario


class DifferentDecision(Exception):
    """Raised at the first difference between the port and the native scheduler.

    It has the step, the time (s), the subject, and the values and states of the two schedulers.
    """

    def __init__(
        self, step: int, time: float, subject: str, values: tuple[Any, Any], states: tuple[str, str]
    ) -> None:
        # SimPy copies the exception from these arguments
        super().__init__(step, time, subject, values, states)
        self.step, self.time, self.subject = step, time, subject
        self.values, self.states = values, states

    def describe(self) -> list[str]:
        """Return lines of text with the difference and the two states."""
        return [
            f"first difference at step {self.step} ({self.time:.6g} s): {self.subject}",
            f"  port:   {self.values[0]}",
            f"  native: {self.values[1]}",
            f"  state of the port:   {self.states[0]}",
            f"  state of the engine: {self.states[1]}",
        ]


class ComparedScheduler:
    """A port that repeats every call on ``native`` and raises DifferentDecision at a difference.

    ``features`` counts the events of each kind, and ``compared`` the comparisons by subject.
    """

    def __init__(self, port: Any, native: Any, *, tabled: bool = True) -> None:
        self.port, self.native = port, native
        self._tabled = tabled  # whether a request has a single block table
        self.pipeline_depth = port.pipeline_depth
        self.steps = 0
        self._left: set[int] = set()
        self.now = 0.0
        self.features: Counter[str] = Counter()
        self.compared: Counter[str] = Counter()
        self._batches: list[tuple[Batch, Batch]] = []
        self._same("pipeline_depth", port.pipeline_depth, native.pipeline_depth)
        self._same("num_blocks", port.num_blocks, native.num_blocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)

    def set_time(self, now: float) -> None:
        """Set the current time in seconds."""
        self.now = now
        for one in (self.port, self.native):
            if hasattr(one, "set_time"):
                one.set_time(now)

    def add(self, prompt: Prompt) -> None:
        """Add a request."""
        seen = Prompt(*(getattr(prompt, field.name) for field in fields(Prompt)))
        for one in (self.port, self.native):
            one.add(seen)

    def abort(self, request_id: int) -> None:
        """Abort a request."""
        self.features["aborts"] += 1
        self._left.add(request_id)
        for one in (self.port, self.native):
            one.abort(request_id)

    def schedule(self) -> Batch:
        """Return the decision of the port, after comparing it with the decision of the native
        scheduler.
        """
        cached = _cached(self.port)
        batch: Batch = self.port.schedule()
        other: Batch = self.native.schedule()
        self.steps += 1
        if batch.fatal and other.fatal:
            self.features["crashes"] += 1
            return batch
        self._same("crash", batch.fatal, other.fatal)
        self._same("tokens", [tuple(row) for row in batch.rows()], [*map(tuple, other.rows())])
        self._same("kind", batch.kind, other.kind)
        self._same("preempted", batch.preempted, other.preempted)
        # The native scheduler does not report whether a request of a disconnected client is also
        # rejected.
        self._same("rejected", *(_rejected(one) - self._left for one in (batch, other)))
        self._same("lost", sorted(batch.lost), sorted(other.lost))
        self._same("drafts", _drafts(batch), _drafts(other))
        self._same("copies", _copies(batch), _copies(other))
        self._same("adapters copied", batch.lora_loads[0], other.lora_loads[0])
        self._compare_state()
        self._count(batch)
        self.features["evictions"] += len(cached - _cached(self.port))
        self._batches.append((batch, other))
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Deliver a batch to the two schedulers and compare the results."""
        ours, theirs = self._batches.pop(0)
        assert ours is batch
        if batch.drafted and theirs.drafted:
            theirs.drafted.accepted = dict(batch.drafted.accepted)
            self.features["accepted drafts"] += sum(batch.drafted.accepted.values())
        done: Completion = self.port.complete(batch, ended)
        other: Completion = self.native.complete(theirs, ended)
        self._same("finished", sorted(done.finished), sorted(other.finished))
        self._same("rejected at the end", sorted(done.refused), sorted(other.refused))
        if not batch.decodes:
            self._same("tokens delivered", sorted(done.delivered), sorted(other.delivered))
        self._compare_state()
        return done

    def moved(self, jobs: Sequence[int]) -> None:
        """Report finished copies to both schedulers."""
        for one in (self.port, self.native):
            one.moved(jobs)

    def finish_disk_transfers(self, jobs: Sequence[int], looks: Sequence[int]) -> None:
        """Report finished disk transfers and lookups to both schedulers."""
        self.features["disk transfers"] += len(jobs)
        for one in (self.port, self.native):
            one.finish_disk_transfers(jobs, looks)

    def leap(self, most: int) -> int:  # noqa: ARG002
        """Return 1, because every step is compared."""
        return 1

    def _compare_state(self) -> None:
        port, native = self.port, self.native
        self._same("free blocks", port.free_blocks, native.free_blocks)
        self._same("waiting", port.waiting_ids(), native.waiting_ids())
        self._same("running", sorted(port.running_ids()), sorted(native.running_ids()))
        if self._tabled and (tables := _tables(port)) is not None:
            theirs = native.block_tables()
            self._same("block tables", {i: list(tables.get(i, ())) for i in theirs}, dict(theirs))
        else:
            self._same("blocks held", dict(port.blocks_held()), dict(native.blocks_held()))

    def _count(self, batch: Batch) -> None:
        self.features["preemptions"] += len(batch.preempted)
        self.features["rejections"] += len(_rejected(batch))
        self.features["copies to or from host memory"] += batch.moves is not None
        self.features["waits for an adapter"] += "adapter" in batch.aside.values()

    def _same(self, subject: str, port: Any, native: Any) -> None:
        self.compared[subject] += 1
        if port != native:
            if failure := getattr(self.native, "failure", ""):
                native = failure
            states = _state(self.port), _state(self.native)
            raise DifferentDecision(self.steps, self.now, subject, (port, native), states)


def _rejected(batch: Batch) -> set[int]:
    return {*batch.ignored, *batch.refused}


def _drafts(batch: Batch) -> dict[int, int]:
    return {i: n for i, n in batch.drafted.tokens.items() if n} if batch.drafted else {}


def _copies(batch: Batch) -> Any:
    """Return the copies between GPU and host memory that start with a batch."""
    moves = batch.moves
    return moves and ([*moves.loads], [*moves.stores], sorted(moves.flush), moves.disk)


def _tables(port: Any) -> Any:
    """Return the block tables of a port, or None if the port does not number its blocks like the
    engine.
    """
    tables = getattr(getattr(port, "memory", None), "tables", None)
    return tables.tables if tables is not None and hasattr(tables, "tables") else None


def _cached(port: Any) -> frozenset[Any]:
    """Return the contents of a port's prefix cache: keys of blocks, or nodes of a radix tree."""
    memory = getattr(getattr(port, "state", port), "memory", None)
    if tree := getattr(memory, "tree", None):
        return frozenset(tree.nodes())
    keys = getattr(getattr(memory, "tables", None), "keys", None)
    if keys is None:
        return frozenset()
    return frozenset((block, key) for block, key in enumerate(keys().tolist()) if key)


def _state(scheduler: Scheduler) -> str:
    waiting, running = scheduler.waiting_ids(), scheduler.running_ids()
    return (
        f"waiting {waiting[:12]}, running {running[:12]}, {scheduler.free_blocks} free blocks, "
        f"blocks held {dict([*scheduler.blocks_held().items()][:12])}"
    )


def compare_with_port(scenario: Scenario, folder: Path) -> ComparedScheduler:
    """Run a scenario whose engine has a source, side by side with the port of the same release.

    Returns the schedulers and the counts of the comparison if all decisions are equal. Raises
    DifferentDecision at the first difference, and InputError if the scenario has a fleet.
    """
    if scenario.fleet is not None:
        raise InputError("--against: does not support fleets; remove the section fleet")
    engine = scenario.engine
    port = ENGINES[engine.name]
    knobs = {one.name: getattr(engine, one.name) for one in fields(port.config)}
    both = ComparedScheduler(
        port.build(port.config(**knobs)),
        find_engine_spec(engine).build(engine),
        tabled=port.groups is None or len(getattr(engine, port.groups)) == 1,
    )
    simulate_scenario(
        scenario, build_replica_specs(scenario, folder), leaping=False, scheduler=both
    )
    return both
