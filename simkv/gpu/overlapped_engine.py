"""Steps of a pipelined scheduler: the next step is prepared while the device runs the current step.

Asynchronous scheduling in vLLM and overlap in SGLang work in this way. The duration of a step is
the maximum of the host's and the device's time instead of their sum.
"""

from __future__ import annotations

from simkv.gpu.torch_executor import TorchExecutor
from simkv.sim.clock import SimProcess
from simkv.sim.engine import Engine


class OverlappedEngine(Engine):
    """The engine's loop for steps whose durations are not known in advance.

    The loop makes the same decisions as the simulated loop. It makes each decision when the oldest
    step has ended.
    """

    executor: TorchExecutor

    def _iterate(self) -> SimProcess:
        """Run the engine's iterations."""
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
                yield self.timeout_at(self.env.now)  # resume after all other events of this time
            elif turn == "idle":
                yield self.timeout_at(self.env.now + self.executor.idle())

    def _wait(self) -> float:
        """Wait for the oldest step and return its end time."""
        end = self._finish(self.in_flight[0].row)
        self.in_flight[0].end = end
        return end

    def _finish(self, row: int) -> float:
        """Wait for the oldest step, record its times and return its end time."""
        log = self.record.steps
        start, seconds = self.executor.finish(log.decided[row])
        log.start[row], log.end[row] = start, start + seconds
        return log.end[row]

    def finalize(self) -> None:
        """Wait for the steps in flight and end the run."""
        launched = [flight for flight in self.in_flight if flight.batch]
        for flight in launched[len(launched) - self.executor.in_flight :]:
            self._finish(flight.row)
        super().finalize()
