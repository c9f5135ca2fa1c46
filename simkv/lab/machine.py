"""What a run was made on: device, driver, versions, clocks, and the two ceilings of a device."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

#: What is asked of a GPU about itself.
SMI_FIELDS = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Ceilings(NamedTuple):
    """Bytes per second of a large copy (read and written), FLOP/s of a large matrix product, and
    bytes per second from the host to the device (of pinned memory; on a CPU a plain copy)."""

    bytes_per_s: float
    flops_per_s: float
    host_bytes_per_s: float


def machine(device: str) -> dict[str, Any]:
    """Device, driver, clocks, versions and date, as far as they can be known."""
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        import triton

        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / (1 << 30), 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "nvidia_smi": nvidia_smi(),
        }
    return found


def nvidia_smi() -> str:
    """Driver, clocks, power and temperature in one line; empty if the tool does not answer."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@lru_cache(maxsize=4)
def ceilings(device: str) -> Ceilings:
    """The device's ceilings, measured on random numbers once per process; under a second."""
    on_gpu = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    count, side = (1 << 30, 8192) if on_gpu else (1 << 23, 512)

    def drawn(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device).normal_()

    source, target = drawn(count), drawn(count)
    moved = 2 * source.nbytes / seconds(partial(target.copy_, source), device)
    pinned = torch.empty(count // 16, dtype=dtype, pin_memory=on_gpu).normal_()
    into = target[: len(pinned)]
    crossed = pinned.nbytes / seconds(partial(into.copy_, pinned, non_blocking=True), device)
    a, b = drawn(side, side), drawn(side, side)
    return Ceilings(moved, 2 * side**3 / seconds(partial(torch.matmul, a, b), device), crossed)


def seconds(run: Callable[[], Any], device: str) -> float:
    """Median seconds of ``run`` on the device."""
    return median(times(run, 10, on_gpu=torch.device(device).type == "cuda"))


def times(run: Callable[[], Any], repeats: int, *, on_gpu: bool) -> list[float]:
    """Seconds of each of ``repeats`` runs, by the device's own events where it has any.

    One more, the first, is thrown away.
    """
    run()
    if on_gpu:
        return _device_times(run, repeats)
    found = []
    for _ in range(repeats):
        begin = perf_counter()
        run()
        found.append(perf_counter() - begin)
    return found


def _device_times(run: Callable[[], Any], repeats: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1000.0 for begin, end in events]
