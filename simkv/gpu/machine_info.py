"""Data about the machine of a run: device, driver, versions, clocks and peak rates."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from statistics import median, stdev
from typing import Any, NamedTuple

import torch

from simkv.gpu.timer import current_clock, read_timer

#: Fields that are queried with ``nvidia-smi``; ``timestamp`` is the driver's own timestamp.
SMI_FIELDS = "timestamp,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Ceilings(NamedTuple):
    """Measured peak rates of a device.

    The rates are the bytes per second of a large copy (read and written), the FLOP/s of a large
    matrix product, and the bytes per second from pinned host memory to the device.
    """

    bytes_per_s: float
    flops_per_s: float
    host_bytes_per_s: float


def machine_info(device: str) -> dict[str, Any]:
    """Return device, driver, clocks, versions and date, as far as they are available."""
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "clock": current_clock(),
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
            "nvidia_smi": nvidia_smi(device),
        }
    return found


@lru_cache(maxsize=4)
def nvidia_smi(device: str) -> str:
    """Return a line with driver, clocks, power and temperature at the time of the first call.

    The line is empty if ``nvidia-smi`` is not available.
    """
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    command += gpu_id_option(device)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def gpu_id_option(device: str) -> list[str]:
    """Return the ``nvidia-smi`` option that selects the GPU by its UUID."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return [f"--id=GPU-{str(uuid).removeprefix('GPU-')}"] if uuid else []


@lru_cache(maxsize=4)
def ceilings(device: str) -> Ceilings:
    """Measure the device's peak rates, once per process."""
    on_gpu = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    count, side = (1 << 30, 8192) if on_gpu else (1 << 23, 512)

    def drawn(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device).normal_()

    source, target = drawn(count), drawn(count)
    moved = 2 * source.nbytes / median_seconds(partial(target.copy_, source), device)
    pinned = torch.empty(count // 16, dtype=dtype, pin_memory=on_gpu).normal_()
    into = target[: len(pinned)]
    crossed = pinned.nbytes / median_seconds(partial(into.copy_, pinned, non_blocking=True), device)
    a, b = drawn(side, side), drawn(side, side)
    return Ceilings(
        moved, 2 * side**3 / median_seconds(partial(torch.matmul, a, b), device), crossed
    )


def median_seconds(run: Callable[[], Any], device: str) -> float:
    """Return the median duration of ``run`` on the device, in seconds."""
    return median(time_repeats(run, 10, on_gpu=torch.device(device).type == "cuda"))


#: Number of repeats before the first check, and the total seconds, or the relative standard error
#: of the median, at which measuring stops.
MIN_REPEATS, SUFFICIENT_S, SUFFICIENT_ERROR = 5, 0.05, 0.002


def time_repeats(run: Callable[[], Any], most: int, *, on_gpu: bool) -> list[float]:
    """Return the durations in seconds of at most ``most`` runs.

    Measuring stops earlier if the runs took long enough or differ little. A first run is discarded.
    """
    run()
    timed = _device_times if on_gpu else _host_times
    found: list[float] = []
    while len(found) < most and not (len(found) >= MIN_REPEATS and _settled(found)):
        found += timed(run, min(MIN_REPEATS, most - len(found)))
    return found


def _settled(found: list[float]) -> bool:
    """Return whether the median is precise enough.

    The standard error of a median is 1.25 times the standard error of a mean.
    """
    error = 1.25 * stdev(found) / len(found) ** 0.5
    return sum(found) >= SUFFICIENT_S or error <= SUFFICIENT_ERROR * median(found)


def _host_times(run: Callable[[], Any], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        begin = read_timer()
        run()
        found.append(read_timer() - begin)
    return found


def _device_times(run: Callable[[], Any], repeats: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1000.0 for begin, end in events]
