"""A scheduler of one's own that keeps the laws, and scenarios for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.conftest import ROOT

#: The scheduler of the how-to.
_PAGE = (ROOT / "docs" / "how-to" / "custom-scheduler.md").read_text(encoding="utf-8")
GOOD = re.findall(r'^```python title="mine.py"\n(.*?)^```$', _PAGE, re.M | re.S)[0]
#: A rule over vLLM's decisions, and what the wheel's scheduler decided under it
#: (``record_exports.py``).
RECORDED = ROOT / "tests" / "custom" / "recorded"
RULE = RECORDED / "all_four.py"
#: The same of a rule of the small language, as a search writes it down.
FOUND = RECORDED / "found" / "found.yaml"
#: What it says at the place where broken ones say something else.
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
    """A scenario file, and the scheduler that it names, in ``folder``."""
    (folder / "mine.py").write_text(code, encoding="utf-8")
    path = folder / "own.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump({**SCENARIO, **fields}, file)
    return path
