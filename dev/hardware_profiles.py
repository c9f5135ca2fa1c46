"""Make what simkv says of hardware without its operator tables: ``make profiles``.

Writes ``efficiency.json`` (shares of the data sheet that measured GPUs reach, and the error of
estimates by them, a GPU left out at a time) and the packaged profiles, from the tables of the
package aiconfigurator-core and the GPUs' data sheets alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dev.operator_efficiency import errors_of, joined, shares_of
from simkv.core.errors import InputError
from simkv.costs.hardware.catalog import Gpu, gpus
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.operators import packaged, roofline
from simkv.costs.operators.choice import composed, estimated
from simkv.costs.operators.constants import Constants
from simkv.costs.operators.tables import TableStore, installed
from simkv.costs.profile import StepError

#: Measured GPUs whose shares count; others of the tables are variants of these.
SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server")
SOURCE = (
    "medians over the operator tables of aiconfigurator-core 0.12.0 (Apache-2.0) of A100, H100, "
    "H200, B200, L40S and RTX PRO 6000, by dev/operator_efficiency.py"
)
#: Longest file that may be added to what a wheel carries, in bytes, and all of them.
MOST = 2_000_000


def main() -> int:
    """Write both; say what was written."""
    root = installed()
    if root is None:
        raise InputError("needs the operator tables: pip install 'simkv[hardware]'")
    wanted = [packaged.hardware_of(row) for row in _rows()]
    _efficiency(root, wanted)
    packaged.FOLDER.mkdir(exist_ok=True)
    for old in packaged.FOLDER.glob("*.json"):
        old.unlink()
    total = 0
    for hardware in wanted:
        profile = composed(hardware, packaged.SETTING, constants=Constants())
        if profile is None:
            print(f"{hardware.gpu.name}, {hardware.architecture.name}: by the data sheet")
            continue
        text = packaged.written(packaged.thinned(profile))
        packaged.path_of(hardware).write_text(text, encoding="utf-8")
        total += len(text)
        print(f"{profile.name}: {len(text)} bytes")
    print(f"{total} bytes in all")
    return int(total > MOST)


def _rows() -> list[dict[str, object]]:
    path = Path(packaged.__file__).with_name("packaged.json")
    rows: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def _efficiency(root: Path, wanted: list[Hardware]) -> None:
    known = {gpu.system: gpu for gpu in gpus() if gpu.system in SYSTEMS}
    shares = {name: _shares(root, gpu) for name, gpu in known.items()}
    pairs = []
    for hardware in wanted:
        system = hardware.gpu.system
        truth = composed(hardware, packaged.SETTING, constants=Constants())
        if truth is None or system not in shares:
            continue
        rest = joined([found for name, found in shares.items() if name != system])
        guess = estimated(hardware, packaged.SETTING, Constants(), rest)
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
        found |= shares_of(TableStore((root,), gpu.system, backend, packaged.SETTING.release), gpu)
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
