"""Small scenario for sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.study.run_digest import hash_code

SMALL = """\
name: small
workload:
  arrivals:
    num_prompts: 40
    request_rate: 2.0
    seed: 7
    prompt_tokens: {distribution: uniform, low: 100, high: 500}
    output_tokens: {distribution: uniform, low: 10, high: 100}
engine: {name: vllm, num_gpu_blocks: 128, max_num_seqs: 16, max_model_len: 1000}
profile: costs.json
timeout: 40
variants:
  plain: {}
  cold: {engine: {enable_prefix_caching: false}}
"""


@pytest.fixture(autouse=True)
def _code_of_now() -> None:
    """Hash simkv's code again, in case it was edited during the test session."""
    hash_code.cache_clear()


@pytest.fixture
def small(tmp_path: Path, root: Path) -> Path:
    """Write a scenario file of two variants that run in a few milliseconds, and a profile in the
    same folder.
    """
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    (tmp_path / "costs.json").write_text((root / "scenarios/assumed-costs.json").read_text())
    return path
