"""Write the example reports of the repository: ``python -m dev.example_reports reports``.

The reports load the plotting library from the package, so that the repository contains only one
copy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from simkv.report.html_page import LIBRARY_FILE
from simkv.report.report_gallery import write_gallery
from simkv.scenario.packaged_scenarios import find_incidents

#: One well-known incident per engine.
EXAMPLES = ("mistralrs-forty", "sglang-32549-decode-starved", "vllm-31731-heavy-head")


def write_examples(folder: Path) -> list[Path]:
    """Write the reports of ``EXAMPLES`` and an index to ``folder``; return the paths."""
    library = Path(os.path.relpath(LIBRARY_FILE, folder.resolve())).as_posix()
    return write_gallery(folder, find_incidents(EXAMPLES), library_url=library)


if __name__ == "__main__":
    for path in write_examples(Path(sys.argv[1])):
        print(path)
