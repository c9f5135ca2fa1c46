"""Log the state of a device during measurements, one line per second in the background.

    with log_clocks(Path("clocks.csv"), "cuda"):
        ...

On a GPU, a line has clocks, power and temperature with the driver's timestamp. ``unix_s`` is the
time at which the line was read, which may be seconds later. On a CPU, a line has the load of the
machine and the clock of its cores.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import time

import torch

from simkv.gpu.machine_info import SMI_FIELDS, gpu_id_option

CPU_FIELDS = "load,mhz"
#: Seconds between two lines.
EVERY_S = 1.0


@contextmanager
def log_clocks(path: Path, device: str) -> Iterator[None]:
    """Append one line per second to ``path`` while the ``with`` block runs.

    The columns are ``unix_s``, and ``SMI_FIELDS`` on a GPU or ``CPU_FIELDS`` on a CPU. Nothing is
    written if the device does not report these values.
    """
    on_gpu = torch.device(device).type == "cuda"
    begin = _of_gpu if on_gpu else _of_cpu
    over = begin(_writer(path, SMI_FIELDS if on_gpu else CPU_FIELDS), device)
    try:
        yield
    finally:
        over()


def _writer(path: Path, fields: str) -> Callable[[str], None]:
    def write(line: str) -> None:
        new = not path.exists()
        with path.open("a", encoding="utf-8") as file:
            if new:
                file.write(f"unix_s,{fields}\n")
            file.write(f"{time():.3f},{line.strip().replace(', ', ',')}\n")

    return write


def _of_gpu(write: Callable[[str], None], device: str) -> Callable[[], None]:
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    command += [f"--loop-ms={round(1000 * EVERY_S)}", *gpu_id_option(device)]
    try:
        tool = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return lambda: None
    assert tool.stdout is not None
    lines = tool.stdout

    def copy() -> None:
        for line in lines:
            write(line)

    reader = Thread(target=copy, daemon=True)
    reader.start()

    def over() -> None:
        tool.terminate()
        tool.wait()
        reader.join(timeout=5)

    return over


def _of_cpu(write: Callable[[str], None], device: str) -> Callable[[], None]:  # noqa: ARG001
    stop = Event()

    def look() -> None:
        while True:
            write(f"{os.getloadavg()[0]:.2f},{_megahertz():.0f}")
            if stop.wait(EVERY_S):
                return

    reader = Thread(target=look, daemon=True)
    reader.start()

    def over() -> None:
        stop.set()
        reader.join()

    return over


def _megahertz() -> float:
    """Return the mean clock of the cores in MHz, or 0 if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    found = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return sum(found) / len(found) if found else 0.0
