from __future__ import annotations

from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.study.history.release_history import fetch_release, parse_releases


def releases(text: str, folder: Path = Path("none")) -> list[str]:
    return parse_releases(text, "vllm", "vllm", folder)


def test_range_in_both_directions() -> None:
    found = releases("0.9..0.11")
    assert found[0] == "0.9.1"
    assert found[-1] == "0.11.2"  # 0.11 includes its patch releases
    assert "0.12.0" not in found
    assert releases("0.11..0.9") == found[::-1]
    assert releases("0.32.0..0.34.0")[-1] == "0.34.0"  # a release that simkv does not know yet


def test_list_and_local_releases(tmp_path: Path) -> None:
    assert releases("0.9.2, v0.19.1") == ["0.9.2", "0.19.1"]
    (tmp_path / "vllm-0.10.0" / "vllm").mkdir(parents=True)
    assert releases("0.9.2..0.10.1.1", tmp_path) == ["0.9.2", "0.10.0", "0.10.1.1"]
    assert fetch_release("vllm", "0.10.0", tmp_path) == tmp_path / "vllm-0.10.0"


@pytest.mark.parametrize("text", ["new..old", "0.33.0", "0.9..0.10..0.11", "0.90..0.91"])
def test_bad_range(text: str) -> None:
    with pytest.raises(InputError, match="--releases"):
        releases(text)
