"""Run batches on the device: prepare the inputs, launch, wait.

    runner = Runner(MODEL_SHAPES["tiny"], RunnerConfig(num_blocks=64, block_size=16), "cpu")
    runner.admit(prompt)
    flight = runner.launch(rows, emits, tables)
    done = runner.wait(flight)          # done.tokens = {id: token}, done.timing

Several steps may be in flight. They run in the order of their launch. Each step reads the tokens
that the previous step sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import BatchRow
from simkv.costs.hardware.model_shape import ModelShape
from simkv.gpu.batch_inputs import (
    StepSize,
    TableTracker,
    fill,
    input_views,
    packed_length,
    split_rows,
)
from simkv.gpu.cuda_graphs import StepGraphs, padding
from simkv.gpu.graph_buckets import (
    GRAPH_TOKENS,
    PREFILL_ROWS,
    graph_sizes,
    step_size,
)
from simkv.gpu.kv_pool import KVPool
from simkv.gpu.prompt_token_ids import prompt_ids
from simkv.gpu.timer import read_timer
from simkv.gpu.transformer import Transformer, random_weights


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes that are fixed before the first step.

    ``seats`` is the number of requests that the runner can serve during its lifetime. ``max_len``
    is the maximum number of prompt and output tokens of a request. ``graph_tokens`` is the size in
    tokens of the largest step that is captured as a CUDA graph; 0 means none.
    """

    num_blocks: int
    block_size: int
    seats: int = 64
    max_len: int = 1024
    max_decodes: int = 256
    graph_tokens: int = 2816
    seed: int = 0


def covering_config(configs: Iterable[RunnerConfig]) -> RunnerConfig:
    """Return a config that is large enough for all ``configs``.

    Raises ValueError if their block sizes differ.
    """
    found, *others = configs
    for other in others:
        if found.block_size != other.block_size:
            raise ValueError(f"blocks of {found.block_size} and of {other.block_size} tokens")
        sizes = ("num_blocks", "seats", "max_len", "max_decodes")
        largest = {name: max(getattr(found, name), getattr(other, name)) for name in sizes}
        found = replace(found, **largest)
    return found


class Timing(NamedTuple):
    """Times of a step in seconds, and other data about its execution.

    ``gpu_s`` is the device's time from the start of the model to the copy of its outputs. On a CPU,
    it is the time inside the model. ``prepare_s``, ``launch_s`` and ``wait_s`` are host times.
    ``size`` is the padded size. ``graph`` is true for a captured step. ``unbacked`` is the number
    of tokens without a block. ``premature`` is the number of tokens sampled before all earlier KV
    of the request was computed. ``unbacked`` and ``premature`` are 0 unless the rules of an engine
    are wrong.
    """

    size: StepSize
    graph: bool
    gpu_s: float
    prepare_s: float
    launch_s: float
    wait_s: float
    new_blocks: int
    unbacked: int
    premature: int


class StepDone(NamedTuple):
    """A finished step, with the sampled token of each request that emits one."""

    tokens: dict[int, int]
    timing: Timing


@dataclass(slots=True)
class InFlightStep:
    """A step in flight."""

    size: StepSize
    graph: bool
    emitting: list[tuple[int, int]]
    sampled: torch.Tensor
    clock: Any
    prepare_s: float
    launch_s: float
    new_blocks: int
    unbacked: int
    premature: int


class Runner:
    """A model, its KV pool and all device state that persists between steps.

    ``dtype`` defaults to bfloat16 on a GPU and float32 on a CPU.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: RunnerConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.shape = shape
        self.config = config
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        dtype = dtype or (torch.bfloat16 if self.on_gpu else torch.float32)
        weights = random_weights(shape, self.device, dtype, config.seed)
        self.pool = KVPool(shape, config.num_blocks, config.block_size, self.device, dtype)
        self.model = Transformer(
            shape, weights, self.pool, seats=config.seats, max_len=config.max_len
        )
        sizes = graph_sizes(config.max_decodes, config.graph_tokens)
        self.graphs = StepGraphs(self.model, sizes if config.graph_tokens else [])
        self.reset()

    def reset(self) -> None:
        """Forget all requests. Weights, KV pool and graphs remain."""
        self._seats: dict[int, int] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._reach: dict[int, int] = {}
        self._watch = TableTracker(self.config.block_size, self.model.tables.shape[1])

    def admit(self, prompt: Prompt) -> None:
        """Copy the prompt of a new request to the device.

        Raises RuntimeError if the runner has already served the maximum number of requests.
        """
        if len(self._seats) == self.config.seats:
            raise RuntimeError(f"all {self.config.seats} request slots are in use")
        seat = self._seats[prompt.id] = len(self._seats)
        self._prompt_tokens[prompt.id] = self._reach[prompt.id] = prompt.prompt_tokens
        ids = self._host(prompt.prompt_tokens)
        ids.numpy()[:] = prompt_ids(prompt, self.shape.vocab)
        row = self.model.tokens[seat]
        row[: len(ids)].copy_(ids, non_blocking=True)
        self._quote(prompt, row)

    def launch(
        self,
        rows: Sequence[BatchRow],
        emits: Collection[int],
        tables: Mapping[int, Sequence[int]],
    ) -> InFlightStep:
        """Enqueue a step.

        ``tables`` contains the blocks of each request. ``emits`` are the ids of requests that
        sample a token. Raises RuntimeError if a request exceeds ``max_len``.
        """
        begin = read_timer()
        decodes, prefills = split_rows(rows)
        premature = self._check(rows, emits)
        count = len(decodes) + sum(row.tokens for row in prefills)
        size = step_size(len(decodes), len(prefills), count, self.config.max_decodes)
        packed = self._host(packed_length(size))
        fields = input_views(packed.numpy(), size)
        fill(fields, decodes, prefills, emits, self._seats, self.config.seats)
        delta = self._watch.delta(rows, tables, self._seats)
        emitting = [(row.id, i) for i, row in enumerate(decodes) if row.id in emits]
        emitting += [(row.id, i) for i, row in enumerate(prefills, size.decodes) if row.id in emits]
        prepared = read_timer()
        clock = _DeviceClock() if self.on_gpu else _HostClock()
        if delta.places:
            self._write_tables(delta.places, delta.blocks)
        sampled = self._submit(packed, size, clock.start)
        clock.stop()
        launched = read_timer()
        return InFlightStep(
            size,
            size in self.graphs.sizes,
            emitting,
            sampled,
            clock,
            prepared - begin,
            launched - prepared,
            sum(block > 0 for block in delta.blocks),
            delta.unbacked,
            premature,
        )

    def _submit(
        self, packed: torch.Tensor, size: StepSize, begin: Callable[[], None]
    ) -> torch.Tensor:
        """Enqueue a step and the copy of its sampled tokens to pinned memory."""
        found = self.enqueue(packed, size, begin)
        sampled = self._host(len(found))
        sampled.copy_(found, non_blocking=True)
        return sampled

    def enqueue(
        self, packed: torch.Tensor, size: StepSize, begin: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """Enqueue a step. The sampled tokens are valid until the next step.

        ``begin`` is called after the copy of the inputs is enqueued, and before the model.
        """
        if size in self.graphs.sizes:
            return self.graphs.run(packed, size, begin)
        moved = packed.to(self.device, non_blocking=True)
        begin()
        return self.model.step(input_views(moved, size), size)

    def wait(self, flight: InFlightStep) -> StepDone:
        """Wait until a step has run, and return its tokens and times."""
        begin = read_timer()
        gpu_s = flight.clock.seconds()
        wait_s = read_timer() - begin
        found = flight.sampled.tolist()
        tokens = {i: found[place] for i, place in flight.emitting}
        timing = Timing(
            flight.size,
            flight.graph,
            gpu_s,
            flight.prepare_s,
            flight.launch_s,
            wait_s,
            flight.new_blocks,
            flight.unbacked,
            flight.premature,
        )
        return StepDone(tokens, timing)

    def warm_up(self, seconds: float) -> None:
        """Run empty steps of each kind for the given number of seconds, at least once.

        This compiles the kernels and sets up the libraries before any measurement.
        """
        most = self.config.max_decodes
        counts = [(1, 0, 1), (most, 0, most), (0, 1, 512), (1, 1, 512), (1, PREFILL_ROWS + 1, 4096)]
        sizes = [step_size(*count, most) for count in counts]
        # otherwise they would be built during the capture
        if self.on_gpu and not self.graphs.sizes:
            sizes += graph_sizes(most, GRAPH_TOKENS)
        end = read_timer() + seconds
        while True:
            for size in sizes:
                packed = self._host(packed_length(size))
                packed.copy_(padding(size, self.config.seats))
                self._submit(packed, size, lambda: None)
            if self.on_gpu:
                torch.cuda.synchronize()
            if read_timer() >= end:
                return

    def retire(self, request_id: int) -> None:
        """Release a request that has ended. Its output remains readable."""
        self._watch.forget(request_id)

    def tokens(self, request_id: int, count: int) -> list[int]:
        """Return the first ``count`` tokens (prompt, then output) of a request."""
        found: list[int] = self.model.tokens[self._seats[request_id], :count].tolist()
        return found

    def _check(self, rows: Sequence[BatchRow], emits: Collection[int]) -> int:
        """Return the number of tokens that are emitted too early.

        Raises RuntimeError if a request exceeds ``max_len``.
        """
        premature = 0
        for row in rows:
            end = row.context + row.tokens
            if end >= self.config.max_len:
                raise RuntimeError(
                    f"request {row.id}: {row.context} + {row.tokens} tokens do not fit into "
                    f"max_len {self.config.max_len}"
                )
            if row.id in emits:
                premature += end < self._reach[row.id]
                self._reach[row.id] = max(end, self._reach[row.id])
        return premature

    def _host(self, count: int) -> torch.Tensor:
        """Allocate host memory for a copy to or from the device."""
        return torch.empty(count, dtype=torch.int32, pin_memory=self.on_gpu)

    def _write_tables(self, places: list[int], blocks: list[int]) -> None:
        host = self._host(2 * len(places)).view(2, -1)
        view = host.numpy()
        view[0], view[1] = places, blocks
        moved = host.to(self.device, non_blocking=True)
        self.model.tables.view(-1)[moved[0]] = moved[1]

    def _quote(self, prompt: Prompt, row: torch.Tensor) -> None:
        """Copy the parts of a prompt that repeat the output of another request (stream
        ``o<id>``).
        """
        at = 0
        for segment in prompt.segments:
            length = segment.end - segment.start
            source = segment.stream[1:]
            if segment.stream[0] == "o" and source.isdigit() and int(source) in self._seats:
                begin = self._prompt_tokens[int(source)] + segment.start
                said = self.model.tokens[self._seats[int(source)], begin : begin + length]
                row[at : at + len(said)].copy_(said)
            at += length


class _HostClock:
    """Clock for the duration of a step that runs on the host."""

    def start(self) -> None:
        self._begin = read_timer()

    def stop(self) -> None:
        self._end = read_timer()

    def seconds(self) -> float:
        return self._end - self._begin


class _DeviceClock:
    """Clock for the duration of a step on the device, between two events of its stream."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def seconds(self) -> float:
        """Wait for the end of the step and return its duration in seconds."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000.0
