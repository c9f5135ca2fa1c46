"""Measure the throughput and accuracy of ``simkv serve``.

python benchmarks/serve_throughput.py [STREAMS]

The program starts the server as a process and reads streams in another process. For increasing
``--speed``, it prints the SSE chunks per second and their lag (the server's metric
``simkv:clock_lag_seconds``). At --speed 1, it also compares the clients' TTFT and ITL with a
simulation of the recorded requests.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
#: Costs in which a step takes 10 ms, plus 0.1 ms per prompt token.
SCENARIO = """\
name: served
engine: {{name: vllm, variant: "0.33.0", num_gpu_blocks: 8000, max_num_seqs: {streams}}}
profile: {costs}
"""


@dataclass
class Stream(asyncio.Protocol):
    """A client that reads one reply; ``times`` are the times of its chunks by the monotonic
    clock.
    """

    body: bytes
    done: asyncio.Future[None]
    sent: float = 0.0
    times: list[float] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.tail = transport, b""
        self.sent = time.monotonic()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self.body)}\r\n"
        transport.write(head.encode() + b"content-type: application/json\r\n\r\n" + self.body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.times += [now] * data.count(b'data: {"id"')
        self.tail = (self.tail + data)[-24:]
        if b"[DONE]" in self.tail:
            self.transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def read(port: int, streams: int, tokens: int, apart: float) -> list[Stream]:
    """Open streams at intervals of ``apart`` seconds."""
    loop, found = asyncio.get_running_loop(), list[Stream]()
    for number in range(streams):
        asked = {"prompt": [number] * 64, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        stream = Stream(json.dumps(asked).encode(), loop.create_future())
        found.append(stream)
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
        await asyncio.sleep(apart)
    await asyncio.gather(*(stream.done for stream in found))
    return found


class Server:
    """``simkv serve`` as a separate process."""

    def __init__(self, folder: Path, streams: int, speed: float) -> None:
        path = folder / "served.yaml"
        costs = ROOT / "scenarios" / "assumed-costs.json"
        path.write_text(SCENARIO.format(streams=streams, costs=costs))
        self.came, self.scenario = folder / "came.csv", path
        command = [sys.executable, "-m", "simkv", "serve", str(path), "--port", "0"]
        command += ["--speed", str(speed), "--record", str(self.came)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r":(\d+) at", self.process.stdout.readline())
        assert found
        self.port = int(found[1])

    def lag(self, share: float) -> float:
        """Return an upper bound of the lag (s) for the fraction ``share`` of all tokens, from the
        server's histogram.
        """
        url = f"http://127.0.0.1:{self.port}/metrics"
        text = urllib.request.urlopen(url).read().decode()
        found = re.findall(r'clock_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
        total = float(found[-1][1])
        return next(float(le) for le, count in found if float(count) >= share * total)

    def end(self) -> float:
        """Stop the server; return its CPU seconds."""
        before = _children_cpu()
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return _children_cpu() - before


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sustained(streams: int, speed: float, tokens: int) -> tuple[float, float, float]:
    """Return the chunks per second, the bound of the lag (s) for 99 % of the chunks, and the chunks
    per CPU second.

    The CPU time includes the start of the server.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), streams, speed)
        found = asyncio.run(read(server.port, streams, tokens, 0.0))
        lag = server.lag(0.99)
        cpu = server.end()
    times = sorted(time for stream in found for time in stream.times)
    assert len(times) == streams * tokens, f"{len(times)} chunks of {streams * tokens}"
    middle = times[len(times) // 10 : -len(times) // 10]
    return len(middle) / (middle[-1] - middle[0]), lag, len(times) / cpu


def compared(streams: int, tokens: int) -> list[str]:
    """Return lines that compare the clients' times at --speed 1 with a simulation of the recorded
    requests.
    """
    from simkv.metrics.scenario_runner import run_file

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder, streams, 1.0)
        found = asyncio.run(read(server.port, streams, tokens, 0.02))
        lag = server.lag(0.99)
        server.end()
        again = folder / "again.yaml"
        again.write_text(server.scenario.read_text() + "workload: {trace: came.csv}\n")
        record = run_file(again)["run"].record
    ends, lives = np.array(record.steps.end), record.requests
    simulated_ttft, simulated_itl = [], []
    for life in lives.values():
        assert life.first_token is not None
        simulated_ttft.append(life.first_token - life.request.arrival)
        rows = [r for s in life.segments if s.emits for r in range(s.first, s.last + 1)]
        simulated_itl.append(np.diff(ends[rows]))
    seen = {
        "TTFT": [stream.times[0] - stream.sent for stream in found],
        "ITL": np.concatenate([np.diff(stream.times) for stream in found]),
    }
    runs = {"TTFT": simulated_ttft, "ITL": np.concatenate(simulated_itl)}
    lines = [f"  99 % of the chunks were written less than {1e3 * lag:g} ms late"]
    for what, values in seen.items():
        for share in (50, 99):
            live, run = (1e3 * np.percentile(x, share) for x in (values, runs[what]))
            lines.append(
                f"  {what:>4} P{share}: {live:8.2f} ms live, {run:8.2f} ms in a run of the record, "
                f"{live - run:+.2f} ms"
            )
    return lines


def main() -> None:
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    print(f"simkv serve, {streams} streams:")
    for speed in (0.5, 1.0, 1.5, 2.0, 3.0):
        chunks, lag, per_cpu = sustained(streams, speed, int(600 * speed))
        print(
            f"  --speed {speed:g}: {chunks:,.0f} chunks/s, 99 % less than {1e3 * lag:g} ms late, "
            f"{per_cpu:,.0f} chunks per CPU s"
        )
    print("\n".join(compared(streams, 300)))


if __name__ == "__main__":
    main()
