"""Generate the packaged hardware data that replaces the operator tables: ``make profiles``.

Writes ``efficiency.json`` and the packaged profiles. ``efficiency.json`` has the fractions of
data-sheet rates that measured GPUs reach, and the error of estimates with these fractions, measured
by leaving out one GPU at a time. The only inputs are the tables of the package aiconfigurator-core
and the GPUs' data sheets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dev.operator_efficiency import errors_of, joined, shares_of
from simkv.core.errors import InputError
from simkv.costs.cost_profile import StepError
from simkv.costs.hardware.model_gpu_catalog import Gpu, gpus
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators import composed_profiles, roofline
from simkv.costs.operators.calibration_rules import CostConstants
from simkv.costs.operators.operator_tables import TableStore, find_installed_tables
from simkv.costs.operators.profile_resolution import compose_from_tables, estimate_from_data_sheet

#: Measured GPUs whose fractions are used; all other GPUs in the tables are variants of these.
SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server")
SOURCE = (
    "medians over the operator tables of aiconfigurator-core 0.12.0 (Apache-2.0) of A100, H100, "
    "H200, B200, L40S and RTX PRO 6000, by dev/operator_efficiency.py"
)
#: Maximum total size of the packaged profiles in the wheel, in bytes.
MOST = 2_000_000


def main() -> int:
    """Write both outputs and print a summary; return 1 if the profiles exceed ``MOST`` bytes, else
    0."""
    root = find_installed_tables()
    if root is None:
        raise InputError("needs the operator tables: pip install 'simkv[hardware]'")
    wanted = [composed_profiles.parse_packaged_hardware(row) for row in _rows()]
    _efficiency(root, wanted)
    composed_profiles.PROFILES_DIR.mkdir(exist_ok=True)
    for old in composed_profiles.PROFILES_DIR.glob("*.json"):
        old.unlink()
    total = 0
    for hardware in wanted:
        profile = compose_from_tables(
            hardware, composed_profiles.PACKAGED_SETTING, constants=CostConstants()
        )
        if profile is None:
            print(f"{hardware.gpu.name}, {hardware.architecture.name}: by the data sheet")
            continue
        text = composed_profiles.format_profile(composed_profiles.thin_profile(profile))
        composed_profiles.composed_profile_path(hardware).write_text(text, encoding="utf-8")
        total += len(text)
        print(f"{profile.name}: {len(text)} bytes")
    print(f"{total} bytes in all")
    return int(total > MOST)


def _rows() -> list[dict[str, object]]:
    path = Path(composed_profiles.__file__).with_name("packaged.json")
    rows: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def _efficiency(root: Path, wanted: list[Hardware]) -> None:
    known = {gpu.system: gpu for gpu in gpus() if gpu.system in SYSTEMS}
    shares = {name: _shares(root, gpu) for name, gpu in known.items()}
    pairs = []
    for hardware in wanted:
        system = hardware.gpu.system
        truth = compose_from_tables(
            hardware, composed_profiles.PACKAGED_SETTING, constants=CostConstants()
        )
        if truth is None or system not in shares:
            continue
        rest = joined([found for name, found in shares.items() if name != system])
        guess = estimate_from_data_sheet(
            hardware, composed_profiles.PACKAGED_SETTING, CostConstants(), rest
        )
        pairs.append((guess, truth))
        _say(system, errors_of([(guess, truth)]), hardware.architecture.name)
    errors = errors_of(pairs)
    _say("all", errors, "every combination")
    data = {
        "shares": joined(list(shares.values())).model_dump(),
        "left_out": {kind: _rounded(error) for kind, error in errors.items()},
        "source": SOURCE,
    }
    path = Path(roofline.__file__).with_name("efficiency.json")
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _shares(root: Path, gpu: Gpu) -> dict[str, float]:
    assert gpu.system
    found: dict[str, float] = {}
    for backend in ("sglang", "vllm"):
        found |= shares_of(
            TableStore((root,), gpu.system, backend, composed_profiles.PACKAGED_SETTING.release),
            gpu,
        )
    return found


def _rounded(error: StepError) -> dict[str, float]:
    return {
        name: float(f"{value:.3g}") if name != "points" else value
        for name, value in error.model_dump().items()
    }


def _say(system: str, errors: dict[str, StepError], what: str) -> None:
    said = ", ".join(
        f"{kind} median {100 * e.median:.0f} % P95 {100 * e.p95:.0f} % bias {100 * e.bias:+.0f} %"
        for kind, e in errors.items()
    )
    print(f"data sheet against tables, {system} left out, {what}: {said}")


if __name__ == "__main__":
    sys.exit(main())
