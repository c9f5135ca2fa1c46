"""Check whether the benchmark's runs still make the same decisions.

    python benchmarks/decision_digests.py [w1 w1-async w1-100k w2 w3-azure w3-mooncake w4]
    python benchmarks/decision_digests.py --take [...]  # write new digests with the commit

``decision_digests.json`` contains, for each case, an md5 hash of the outcome, token times and
preemptions of every request, and of the end and free blocks of every step. Exits with 1 if a hash
differs. The cases W3 need the public traces, as in ``simulation_speed.py``.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from array import array
from collections.abc import Iterator

from speed_workloads import CASES, HERE, Case

from simkv.sim.client_loop import run_clients
from simkv.sim.run_record import RequestRecord, RunRecord, emitting_rows

KEPT = HERE / "decision_digests.json"


def fingerprint(record: RunRecord) -> str:
    """Return the md5 hash of the decisions of a run and their times.

    Token times are hashed as rows of the step log with their end times, so the hash does not depend
    on how the record stores them.
    """
    md5 = hashlib.md5(usedforsecurity=False)
    for i in sorted(record.requests):
        life = record.requests[i]
        times = (life.ended_at, life.first_token, life.last_token, *life.preempted_at)
        said = (i, str(life.outcome), life.tokens, life.recomputed_tokens, life.bounces, *times)
        md5.update(repr((said, list(_rows(life)))).encode())
    md5.update(array("d", record.steps.end).tobytes())
    md5.update(array("q", record.steps.free_blocks).tobytes())
    return md5.hexdigest()


def _rows(life: RequestRecord) -> Iterator[tuple[int, int]]:
    """Return the ranges of rows in which the request got a token; adjacent ranges are merged."""
    start, end = -1, -2
    for first, last in emitting_rows(life):
        if first == end + 1:
            end = last
            continue
        if start >= 0:
            yield start, end
        start, end = first, last
    if start >= 0:
        yield start, end


def measure(case: Case) -> str:
    """Run a case and return its md5 hash."""
    return fingerprint(run_clients(case.engine(), case.requests(), None))


def main() -> int:
    names = [name for name in sys.argv[1:] if name != "--take"]
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    taking, differ = "--take" in sys.argv, 0
    commit = subprocess.check_output(
        ["git", "log", "-1", "--format=%h", "--", "simkv"], text=True, cwd=HERE.parent
    ).strip()
    for case in CASES:
        if names and case.name not in names:
            continue
        if case.missing:
            print(f"{case.name}: left out, there is no {case.missing}")
            continue
        md5 = measure(case)
        if taking:
            kept[case.name] = {"md5": md5, "commit": commit}
            KEPT.write_text(json.dumps(kept, indent=2) + "\n")
        was = kept.get(case.name, {})
        same = md5 == was.get("md5")
        differ += not same
        print(f"{case.name}: {md5} {'as' if same else 'DIFFERS FROM'} {was}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
