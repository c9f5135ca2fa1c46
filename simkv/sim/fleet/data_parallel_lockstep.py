"""Engines in lockstep: they run every forward pass together, and each pass takes the time of the
slowest engine.

Data-parallel ranks of a mixture-of-experts model run this way, because they exchange tokens in
every layer (vLLM 0.19.0, ``DPEngineCoreProc.run_busy_loop`` in ``vllm/v1/engine/core.py`` and
``coordinate_batch_across_dp`` in ``vllm/v1/worker/dp_utils.py``; see docs/vllm-versions.md).

A rank without work runs dummy passes while another rank works. A request that arrives at such a
rank waits until the pass ends, when all ranks make their next decision. A dummy pass never
determines the duration of a pass. Two effects are not modeled: the up to 31 dummy passes after the
last request, and the padding of all ranks to the same number of tokens with CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

from simkv.core.scheduler_protocol import Batch
from simkv.costs.step_load import StepLoad
from simkv.sim.clock import SimProcess
from simkv.sim.engine import MAX_LEAP_STEPS, Engine
from simkv.sim.leaping import Leap


class DataParallelLockstep:
    """Engines in lockstep.

    Start ``run()`` of this object instead of ``run()`` of each engine. Raises ValueError if there
    is no engine, or if the pipeline depths differ.
    """

    # Requests are submitted to the engines. If every awake engine can skip ahead over equal steps
    # (a leap), all do so together. The leap has as many steps as the shortest of their leaps. An
    # arrival at any engine ends the leap of all engines.

    def __init__(self, engines: Sequence[Engine]) -> None:
        depths = {engine.scheduler.pipeline_depth for engine in engines}
        if len(depths) != 1:
            raise ValueError(f"pipeline depths {sorted(depths)}: expected equal depths")
        self.engines = list(engines)
        self._depth = depths.pop()
        self._leaping: list[Engine] = []
        for engine in engines:
            engine.rank = self.engines[0].rank  # all engines act at the events of the first engine
            engine.on_leap_cut = self._cut

    def run(self) -> SimProcess:
        """SimPy process: run the iterations of all engines."""
        first, gpu_free = self.engines[0], 0.0
        yield first.timeout_at(first.ready)
        while True:
            awake = [engine for engine in self.engines if engine.wake is None]
            if not awake:
                yield first.env.any_of([engine.wake for engine in self.engines if engine.wake])
                yield first.timeout_at(first.env.now)
                continue
            decided: list[tuple[Engine, Batch]] = []
            for engine in awake:
                batch = engine.schedule()
                if batch is None:
                    self._all_die(engine)
                    return
                decided.append((engine, batch))
            loads = self._loads(decided)
            gpu_free = self._launch(decided, loads, max(first.env.now, gpu_free))
            # An engine that can launch another batch does not wait for its oldest batch.
            full = [(e, b) for e, b in decided if len(e.in_flight) >= self._depth or not b]
            running = [e.in_flight[0].end for e, _ in full if e.in_flight[0].batch]
            if len(full) == len(decided) and (leap := self._plan_leap(decided, loads)):
                yield leap.wake
                gpu_free = max(engine.finish_leap() for engine in self._leaping)
                self._leaping = []
            elif running:
                yield first.timeout_at(max(running))
            turns = [(engine, engine.finish_iteration(batch)) for engine, batch in full]
            for engine, turn in turns:
                if turn == "sleep" and not engine.inbox:
                    engine.sleep()
            idle = [engine.executor.idle() for engine, turn in turns if turn == "idle"]
            if idle and all(turn != "on" for _, turn in turns) and len(full) == len(decided):
                yield first.timeout_at(first.env.now + max(idle))

    def _loads(self, decided: Sequence[tuple[Engine, Batch]]) -> list[StepLoad]:
        """Return the load of each batch, with the token counts of all ranks filled in."""
        loads = [engine.load(batch) for engine, batch in decided]
        tokens = [load.prefill_tokens + load.decode_seqs for load in loads]
        group = {
            "group_tokens": sum(tokens),
            "group_most": max(tokens, default=0),
            "group_ranks": len(self.engines),
        }
        return [load._replace(**group) for load in loads]

    def _launch(
        self, decided: Sequence[tuple[Engine, Batch]], loads: Sequence[StepLoad], start: float
    ) -> float:
        """Start all batches at ``start`` (s). Return the time at which the GPUs are free (s)."""
        both = list(zip(decided, loads, strict=True))
        seconds = max((e.executor.run(load) for (e, batch), load in both if batch), default=0.0)
        for (engine, batch), load in both:
            engine.launch(batch, load, start, seconds)
        return start + seconds

    def _plan_leap(
        self, decided: Sequence[tuple[Engine, Batch]], loads: Sequence[StepLoad]
    ) -> Leap | None:
        """Start a leap of all engines and return the leap of the first engine, or None."""
        steps = MAX_LEAP_STEPS
        ends = {(e.in_flight[0].end, e.in_flight[-1].end) for e, _ in decided}
        for engine, batch in decided:
            steps = min(steps, engine.leapable_steps(batch)) if len(ends) == 1 and steps else 0
        if not steps:
            return None
        engines = [engine for engine, _ in decided]
        each = [
            e.executor.forecast_steps(load, steps) for e, load in zip(engines, loads, strict=True)
        ]
        if min(map(len, each)) < steps:
            return None
        slowest = list(map(max, *each)) if len(each) > 1 else each[0]
        self._leaping = engines
        leaps = [
            engine.start_leap(load, slowest, list(map(float, own)))
            for engine, load, own in zip(engines, loads, each, strict=True)
        ]
        return leaps[0]

    def _cut(self) -> None:
        """End the leap of all engines at the end of the present step."""
        for engine in self._leaping:
            engine.cut()

    def _all_die(self, dead: Engine) -> None:
        """Stop all other engines, because no pass can complete without the engine that died."""
        for engine in self.engines:
            if engine is not dead:
                ids = [*engine.scheduler.running_ids(), *engine.scheduler.waiting_ids()]
                engine.die("engine died", "another engine in lockstep with it died", ids)
