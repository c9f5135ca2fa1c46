"""Fuzz a server with its OpenAPI document, and check its state at the end.

    pip install schemathesis
    python benchmarks/serve_fuzzing.py [--examples 100]

schemathesis generates valid and invalid bodies, headers and methods, and checks the responses
against the document. Two of its checks are excluded, because valid bodies may be rejected (a prompt
longer than the model's limit), and because numbers may be sent as text, as in vLLM. At the end, the
engine must be empty, there must be no unexpected errors, and a simulation of the recorded requests
must end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parents[1]
SCENARIO = f"""\
name: served
engine: {{name: vllm, num_gpu_blocks: 300, max_model_len: 2048, max_num_queued_reqs: 300}}
profile: {HERE / "scenarios" / "assumed-costs.json"}
"""
PORT = 8765
LEFT_OUT = "positive_data_acceptance,negative_data_rejection"


def main() -> int:
    """Fuzz the server and check its state; return the exit code."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--examples", type=int, default=100, help="of each path")
    examples = options.parse_args().examples
    simkv = [sys.executable, "-m", "simkv"]
    with tempfile.TemporaryDirectory() as made, (Path(made) / "said").open("w+") as said:
        folder, url = Path(made), f"http://127.0.0.1:{PORT}"
        (folder / "served.yaml").write_text(SCENARIO)
        command = [*simkv, "serve", "served.yaml", "--port", str(PORT), "--speed", "1000"]
        server = subprocess.Popen(
            [*command, "--record", "came.csv"], cwd=folder, stdout=said, stderr=said
        )
        try:
            wait_for(url)
            fuzzer = ["schemathesis", "run", f"{url}/openapi.json", "--continue-on-failure"]
            fuzzer += ["--phases", "coverage,fuzzing", "--exclude-checks", LEFT_OUT]
            fuzzer += ["--max-examples", str(examples), "--request-timeout", "120"]
            found = subprocess.run(fuzzer, check=False).returncode
            wait_until_idle(url)
        finally:
            server.terminate()
            server.wait(60)
        said.seek(0)
        failed = "Traceback" in said.read()
        again = SCENARIO + "workload: {trace: came.csv}\n"
        (folder / "again.yaml").write_text(again)
        run = subprocess.run([*simkv, "run", "again.yaml", "--exit-zero"], cwd=folder, check=False)
    print(f"schemathesis {found}, traceback {failed}, run of the record {run.returncode}")
    return 1 if found or failed or run.returncode or server.returncode else 0


def wait_for(url: str) -> None:
    """Wait until the server responds. Raises TimeoutError."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health")
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError("the server did not start")


def wait_until_idle(url: str) -> None:
    """Wait until no call is in flight and no block is in use. Raises TimeoutError."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        kept = ("vllm:num_requests_", "vllm:kv_cache_usage_perc")
        left = [line for line in lines if line.startswith(kept) and not line.endswith(" 0.0")]
        if not left and httpx.get(f"{url}/load").json() == {"server_load": 0}:
            return
        time.sleep(0.1)
    raise TimeoutError(f"left behind: {left}")


if __name__ == "__main__":
    sys.exit(main())
