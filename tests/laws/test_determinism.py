"""Test of law 4 across processes: two runs with different hash seeds write the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.laws.random_scenarios import ENGINES

HEAD = """\
name: everything
workload:
  arrivals:
    num_prompts: 25
    request_rate: 2.0
    burstiness: 0.5
    prompt_tokens: {distribution: uniform, low: 1, high: 60}
    output_tokens: {distribution: lognormal, mean: 12, sigma: 0.8, max: 40}
    prefix_group: a
    prefix_tokens: 9
engine: {name: mistralrs}
profile: l4-mistralrs-pr2034
timeout: 25.0
variants:
"""
#: A small cache, so that many decisions are made.
TIGHT = {
    "mistralrs": "num_gpu_blocks: 30, block_size: 4, max_num_seqs: 6",
    "vllm": "num_gpu_blocks: 40, block_size: 4, max_model_len: 110, max_num_seqs: 8",
    "sglang": "max_total_num_tokens: 160, page_size: 4, chunked_prefill_size: 16",
    "fastdeploy": "num_blocks: 30, block_size: 4, max_num_seqs: 6",
    "trtllm": "max_tokens_in_paged_kv_cache: 120, tokens_per_block: 4, max_batch_size: 6",
}


def test_output_is_independent_of_hash_seed(tmp_path: Path) -> None:
    assert TIGHT.keys() == {engine for engine, _ in ENGINES}
    rows = [
        f"  v{i}: {{engine: {{name: {engine}, variant: {variant}, {TIGHT[engine]}}}}}\n"
        for i, (engine, variant) in enumerate(ENGINES)
    ]
    (tmp_path / "s.yaml").write_text(HEAD + "".join(rows))
    left: list[dict[str, bytes]] = []
    for seed in ("1", "4242"):
        out = tmp_path / seed
        command = ["run", "s.yaml", "--no-plots", "--steps", "--exit-zero", "--out", out]
        subprocess.run(
            [sys.executable, "-m", "simkv.cli", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        left.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert left[0].keys() == {"summary.json", "requests.csv", "steps.csv", "scenario.yaml"}
    for name, content in left[0].items():
        assert content == left[1][name], name
