"""Tests of names of GPU and model from the user: unknown names are rejected, known names are
used.
"""

from __future__ import annotations

import pandas as pd
import pytest

from simkv.core.errors import InputError
from simkv.costs.hardware.model_gpu_catalog import find_gpu, find_model
from simkv.costs.sources.single_request import compute_model_traits
from simkv.incident.evidence import Evidence, StatedSetting
from simkv.incident.initial_costs import cost_priors, guess_unit_costs
from simkv.incident.server_setup import UserSettings, infer_setup
from simkv.incident.workload_rebuild import describe_missing_side, is_hybrid, server_role

LOG = Evidence("server.log", engine="vllm")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (UserSettings(gpu="H10"), r"--gpu: unknown GPU 'H10'; nearest: .*H100"),
        (
            UserSettings(model="llama-3.9-8b"),
            r"unknown model .*Llama-3.1-8B.*profile list",
        ),
    ],
)
def test_rejects_unknown_names_with_the_nearest(asked: UserSettings, message: str) -> None:
    with pytest.raises(InputError, match=message):
        infer_setup(LOG, asked)


def test_reports_names_that_do_not_change_step_costs() -> None:
    setup = infer_setup(LOG, UserSettings(gpu="H100", model="deepseek-ai/DeepSeek-V3"))
    assert any("the hardware gives no initial values" in line for line in setup.assumed)
    setup = infer_setup(LOG, UserSettings(gpu="H100"))
    assert any("without --model" in line for line in setup.assumed)


def test_hardware_gives_prior_values() -> None:
    observed = pd.DataFrame(
        {
            "t_s": [0.0, 1.0, 2.0],
            "prompt_tokens": [100, 200, 300],
            "output_tokens": [10, 20, 30],
            "ttft_ms": [30.0, 40.0, 50.0],
            "e2e_ms": [200.0, 400.0, 600.0],
            "queue_ms": [0.0, 0.0, 0.0],
        }
    )
    guess = guess_unit_costs(observed, 8192)
    shape = compute_model_traits(find_model("llama-3.1-8b"), 8192, tensor_parallel=1)
    fast, slow = (cost_priors(guess, shape, find_gpu(name)) for name in ("H100", "L4"))
    assert fast["token"].price < slow["token"].price
    assert fast["context"].price < slow["context"].price


def test_capacity_of_a_hybrid_cache_is_not_blocks_times_size() -> None:
    settings = {
        "kv_tokens": StatedSetting(900_000, "server.log:1"),
        "num_gpu_blocks": StatedSetting(20_000, "metrics"),
        "block_size": StatedSetting(32, "server.log:2"),
    }
    evidence = Evidence("server.log", engine="vllm", settings=settings)
    assert infer_setup(evidence, UserSettings()).engine["num_gpu_blocks"] == 20_000
    assert is_hybrid(evidence, 20_000 * 32)
    assert not is_hybrid(evidence, 900_000)


def test_recognizes_one_side_of_a_disaggregated_deployment() -> None:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    stated = {"kv_transfer_config": StatedSetting(str(transfer), "server.log:1")}
    assert server_role(Evidence("server.log", settings=stated)) == "decode"
    stated = {"disaggregation_mode": StatedSetting("prefill", "server.log:1")}
    assert server_role(Evidence("server.log", settings=stated)) == "prefill"
    assert server_role(LOG) is None
    stated = {"kv_transfer_config": StatedSetting(str(transfer | {"kv_role": "kv_both"}), "s:1")}
    assert server_role(Evidence("server.log", settings=stated)) == "prefill or decode"
    offload = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    stated = {"kv_transfer_config": StatedSetting(str(offload), "server.log:1")}
    assert server_role(Evidence("server.log", settings=stated)) is None


@pytest.mark.parametrize(
    ("engine", "role", "missing", "flag"),
    [
        ("vllm", "prefill", "output lengths, decode times", "--otlp-traces-endpoint"),
        ("vllm", "decode", "arrivals, queue times and prefill times", "--otlp-traces-endpoint"),
        ("vllm", "prefill or decode", "the log of the other server", "--otlp-traces-endpoint"),
        ("sglang", "decode", "arrivals, queue times", "--log-requests --log-requests-format json"),
    ],
)
def test_log_of_one_side_reports_missing_data_and_flag(
    engine: str, role: str, missing: str, flag: str
) -> None:
    text = describe_missing_side(Evidence("server.log", engine=engine), role)
    assert f"server.log is the log of a {role} server" in text
    assert missing in text
    assert flag in text
