"""Record the loop iterations in which SGLang's ``SchedulerRecvSkipper`` receives requests.

    pip download --no-deps sglang==0.5.23 && unzip sglang-0.5.23-*.whl -d SOURCE
    python -m tests.conformance.record_sglang_receiver SOURCE tests/conformance/receiver.json

A recording has one entry per loop iteration: the kind of the preceding batch (D decode, E extend, M
mixed, N none), which is random, and 1 if the iteration received requests, else 0. The imports of
SGLang's file are replaced by stubs; the weights of the kinds are the defaults in SGLang's
environ.py.
"""

from __future__ import annotations

import enum
import json
import random
import re
import sys
import types
from pathlib import Path
from typing import Any

FILE = "sglang/srt/managers/scheduler_components/recv_skipper.py"
MODES = {"D": "DECODE", "E": "EXTEND", "M": "MIXED", "N": None}


def _stand_ins(source: Path, interval: int) -> dict[str, types.ModuleType]:
    mode = enum.Enum("ForwardMode", "EXTEND DECODE MIXED IDLE TARGET_VERIFY PREBUILT")
    weights = dict(
        re.findall(
            r"(SGLANG_SCHEDULER_RECV_SKIPPER_\w+) = EnvInt\((\d+)\)",
            (source / "sglang/srt/environ.py").read_text(),
        )
    )
    envs = types.SimpleNamespace(
        **{k: types.SimpleNamespace(get=lambda v=int(v): v) for k, v in weights.items()}
    )
    schedule = types.SimpleNamespace(scheduler_recv_interval=interval)
    parallel = types.SimpleNamespace(attn_dp_enabled=False)
    found: dict[str, Any] = {
        "sglang.srt.environ": {"envs": envs},
        "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": mode},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: parallel,
            "get_schedule": lambda: schedule,
        },
    }
    modules = {}
    for name, content in found.items():
        modules[name] = types.ModuleType(name)
        modules[name].__dict__.update(content)
    return modules


def record(source: Path, interval: int, modes: str) -> str:
    """Run SGLang's own code; return 1 for each loop iteration that receives requests, and 0 for
    each other iteration.
    """
    sys.modules.update(_stand_ins(source, interval))
    space: dict[str, Any] = {"__name__": "recv_skipper"}
    exec((source / FILE).read_text(), space)
    skipper = space["SchedulerRecvSkipper"].maybe_create()
    kinds = space["ForwardMode"]
    received = []
    for letter in modes:
        name = MODES[letter]
        last = None if name is None else types.SimpleNamespace(forward_mode=kinds[name])
        received.append("1" if skipper is None or skipper.handle(last) else "0")
    return "".join(received)


def main(source: Path, out: Path) -> None:
    """Record random sequences and write them."""
    draw = random.Random(0)
    rows = []
    for interval in (1, 2, 5, 10, 30):
        for _ in range(4):
            modes = "".join(draw.choices("DNEM", (20, 3, 1, 1), k=80))
            rows.append([interval, modes, record(source, interval, modes)])
    out.write_text(json.dumps(rows, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
