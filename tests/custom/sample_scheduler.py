"""A correct custom scheduler, and scenarios that use it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.conftest import ROOT

#: The scheduler of the how-to page on custom schedulers.
_PAGE = (ROOT / "docs" / "how-to" / "custom-scheduler.md").read_text(encoding="utf-8")
GOOD = re.findall(r'^```python title="mine.py"\n(.*?)^```$', _PAGE, re.M | re.S)[0]
#: A custom vLLM policy, and the recorded decisions of the released scheduler with this policy
#: (``record_exports.py``).
RECORDED = ROOT / "tests" / "custom" / "recorded"
RULE = RECORDED / "all_four.py"
#: Another custom policy with its recorded decisions, in the policy language and in the format of a
#: policy search.
FOUND = RECORDED / "found" / "found.yaml"
#: The statement that tests replace to obtain a broken scheduler.
DECIDES = "        budget = self.config.max_num_batched_tokens\n"

SCENARIO: dict[str, Any] = {
    "name": "own",
    "workload": {
        "burst": {"num_prompts": 12, "prompt_tokens": 50, "output_tokens": 40, "interval": 0.5}
    },
    "engine": {"name": "mine", "file": "mine.py", "num_blocks": 20},
    "profile": "unit-step",
}


def write(folder: Path, code: str = GOOD, **fields: Any) -> Path:
    """Write a scenario file and its scheduler to ``folder``."""
    (folder / "mine.py").write_text(code, encoding="utf-8")
    path = folder / "own.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump({**SCENARIO, **fields}, file)
    return path
