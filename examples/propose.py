"""Proposes schedulers for `simkv evolve --propose`: the same rule with another constant each time.

It stands where a model or a program of your own would: what was tried comes on stdin, the file of
a scheduler goes to stdout.
"""

import re
import sys

RULE = '''"""Short prompts first, but {per_second} tokens are forgiven for each second of age."""

from simkv.custom import PolicyRequest, CustomVllmConfig, CustomVllmScheduler


class Forgiving(CustomVllmScheduler):
    """Short prompts first; whoever came earlier is let off some of its length."""

    config: CustomVllmConfig

    def waiting_order(self, r: PolicyRequest) -> float:
        return r.prompt_tokens + {per_second} * r.arrival
'''

told = sys.stdin.read()
number = int(re.search(r"# Proposal (\d+)", told)[1])
print(RULE.format(per_second=10 * number))
