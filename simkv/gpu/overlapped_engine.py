"""Steps of a pipelined scheduler: the next is decided and prepared while the device runs the last.

As engines do that schedule asynchronously (vLLM) or overlap (SGLang): one step ahead, its token ids
read on the device from what the step before it samples. A step then costs what takes longer, the
host's work or the device's, and no longer their sum.
"""

from __future__ import annotations

from simkv.costs.cost_profile import CostProfile
from simkv.gpu.torch_executor import TorchExecutor
from simkv.gpu.whole_step import device_profile, is_host_term
from simkv.sim.clock import SimProcess
from simkv.sim.engine import Engine


class OverlappedEngine(Engine):
    """The engine's loop where the end of a step is known only when it has come.

    Decisions are those of the loop that is simulated: the next when the oldest step has ended.
    """

    executor: TorchExecutor

    def _iterate(self) -> SimProcess:
        """The engine's iterations."""
        yield self.timeout_at(self.ready)
        while True:
            batch = self.schedule()
            if batch is None:
                return
            load = self.load(batch)
            self.launch(batch, load, self.env.now, 0.0)  # its times are set when it ends
            if batch:
                self.executor.enqueue(load)
                if len(self.in_flight) < self.scheduler.pipeline_depth:
                    continue
            if self.in_flight[0].batch:
                yield self.timeout_at(self._wait())
            turn = self.finish_iteration(batch)
            if turn == "sleep":
                yield self.sleep()
                yield self.timeout_at(self.env.now)  # after all else that happens then
            elif turn == "idle":
                yield self.timeout_at(self.env.now + self.executor.idle())

    def _wait(self) -> float:
        """Wait for the oldest step; returns its end."""
        end = self._finish(self.in_flight[0].row)
        self.in_flight[0].end = end
        return end

    def _finish(self, row: int) -> float:
        """Wait for the oldest step, write down when it was; returns its end."""
        log = self.record.steps
        start, seconds = self.executor.finish(log.decided[row])
        log.start[row], log.end[row] = start, start + seconds
        return log.end[row]

    def finalize(self) -> None:
        """The run ends now: the steps that are under way are waited for."""
        launched = [flight for flight in self.in_flight if flight.batch]
        for flight in launched[len(launched) - self.executor.in_flight :]:
            self._finish(flight.row)
        super().finalize()


def overlap_profile(profile: CostProfile) -> CostProfile:
    """The profile of an engine that overlaps: a step takes as long as the device or the host."""
    host = [term for term in profile.terms if is_host_term(term)]
    name = f"{profile.name}-overlapped"
    return device_profile(profile).model_copy(update={"name": name, "floor": host})
