"""Propose schedulers for `simkv evolve --propose`: one policy with an increasing constant.

Replace it by your own program or a language model. It reads the earlier candidates on stdin and
writes the file of a scheduler to stdout.
"""

import re
import sys

RULE = '''"""Short prompts first, with a bonus of {per_second} tokens per second of age."""

from simkv.custom import PolicyRequest, CustomVllmConfig, CustomVllmScheduler


class ShortestWithAging(CustomVllmScheduler):
    """Short prompts first; older requests count as shorter."""

    config: CustomVllmConfig

    def waiting_order(self, r: PolicyRequest) -> float:
        return r.prompt_tokens + {per_second} * r.arrival
'''

told = sys.stdin.read()
number = int(re.search(r"# Proposal (\d+)", told)[1])
print(RULE.format(per_second=10 * number))
