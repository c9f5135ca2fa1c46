"""Record the decisions of vLLM's own scheduler with custom policies, for ``test_export``.

SIMKV_WHEELS=… python -m tests.custom.record_exports 500

With 500 cases per policy, this took 200 s of CPU time on the machine of the committed recordings.
The first cases are committed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from simkv.conformance.decision_trace import pack_traces
from simkv.conformance.policy_export import (
    TARGET_RELEASE,
    check_export,
    export_policy,
    record_export,
)
from tests.custom.sample_scheduler import FOUND, RULE

KEPT = 12


def main(cases: int) -> None:
    """Compare the decisions in ``cases`` cases and store the first cases; raise if a decision
    differs from the simulation.
    """
    wheel = Path(os.environ["SIMKV_WHEELS"]) / f"vllm-{TARGET_RELEASE}"
    for rule in (RULE, FOUND):
        different = []
        for number, (name, mismatch) in enumerate(check_export(rule, {}, wheel, cases), start=1):
            if mismatch:
                different.append(name)
            if number % 50 == 0:
                print(rule.name, number, different, flush=True)
        print(f"{cases - len(different)} of {cases} are as simulated; different: {different}")
        (rule.parent / "exported.txt").write_text(export_policy(rule, {}, f"{rule.stem}_for_vllm"))
        kept = pack_traces(record_export(rule, {}, wheel, KEPT))
        (rule.parent / "decisions.jsonl.gz").write_bytes(kept)


if __name__ == "__main__":
    main(int(sys.argv[1]))
