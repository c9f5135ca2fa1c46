"""Measured operator tables as published: Parquet files by system, family, backend and version.

The path of a table is ``ROOT/<system>/<family>/<backend>/<version>/<table>_perf.parquet``. Times
are in milliseconds. The package aiconfigurator-core (Apache-2.0) contains tables in this format;
simkv reads the tables and does not import the package. Custom tables in the same format take
precedence.

``clean_rows`` and the lookups clean the rows as follows:

1. A row that is faster than the GPU's peak allows (with tolerance ``SLACK``) is removed.
2. Among the versions that contain the shape, the first one at or after the engine's release is
   used; if there is none, the last one before it. (Kernels change: experts in 0.24 take half the
   time of 0.19.) If the engine's kernel is known (``kernel_table.py``), only its rows are used.
3. If a matrix product or sparse attention takes more than ``HOST_BOUND`` times as long as the
   fastest row of the same shape in any table, the host was the bottleneck of the measurement.
   In this case, the fastest row is used. For experts and all-reduces, a table whose median
   exceeds this ratio is replaced as a whole.
4. A batch never costs more than a larger batch, because it could be padded to the larger size
   (``make_nondecreasing``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from simkv.core.engine_version import find_version
from simkv.core.errors import InputError
from simkv.costs.operators.piecewise_curve import Curve

if TYPE_CHECKING:
    import pandas as pd

#: Package with the tables, which is used if installed (``pip install 'simkv[hardware]'``).
TABLES_PACKAGE = "aiconfigurator_core"
#: Tolerance for GPUs whose clock is slightly above the data sheet's peak clock.
SLACK = 1.1
#: Ratio above which the host is assumed to be the bottleneck of a measurement. Without this effect,
#: the times of a matrix product in two engines rarely differ by more than a third. Among the
#: fp8_block products of H100 to B300, host-bound measurements are 2 to 15 times slower.
HOST_BOUND = 2.0
BACKENDS = ("vllm", "sglang")
#: Ranks of versions (``TableStore.rows``): below the first, a version has the minor of the release;
#: from the second on, it is older than the release.
SAME_MINOR, OLDER_RANK = 1e-3, 5e5

RowFilter = Mapping[str, object]


def find_installed_tables() -> Path | None:
    """Return the directory of the tables in the installed package, or None if it is not
    installed.
    """
    spec = importlib.util.find_spec(TABLES_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "systems" / "data"
    return folder if folder.is_dir() else None


@dataclass(frozen=True)
class TableStore:
    """Operator tables of a GPU (``system``), for one ``release`` of an engine (``backend``)."""

    roots: tuple[Path, ...]
    system: str
    backend: str
    release: str
    #: Files whose rows were returned.
    seen: set[Path] = field(default_factory=set, compare=False)

    def has(self, table: str) -> bool:
        """Return whether the engine has this table."""
        return bool(self._files(table, self.backend))

    def rows(self, table: str, where: RowFilter, *, anyone: bool = False) -> pd.DataFrame | None:
        """Return the matching rows from all versions of the engine's table, or None.

        ``anyone`` selects the tables of other engines. The column ``rank`` is smallest for the
        preferred version.
        """
        import pandas as pd

        backends = ["nccl" if table == "nccl" else self.backend]
        if anyone:
            backends = [name for name in BACKENDS if name != self.backend]
        for root in self.roots:
            if parts := self._parts(root, table, backends, where):
                return pd.concat(parts, ignore_index=True)
            if anyone and self._parts(root, table, [self.backend], where):
                return None  # later roots must not override this root
        return None

    def _parts(
        self, root: Path, table: str, backends: Sequence[str], where: RowFilter
    ) -> list[pd.DataFrame]:
        """Return the matching rows of each file under ``root`` that has any."""
        parts = []
        for backend in backends:
            for path in self._files(table, backend, root):
                frame = _read(path)
                for column, wanted in where.items():
                    if column in frame:
                        frame = frame[_matches(frame[column], wanted)]
                if len(frame):
                    self.seen.add(path)
                    parts.append(frame.assign(rank=self._rank(path.parts[-2])))
        return parts

    def values(self, table: str, column: str, where: RowFilter) -> list[Any]:
        """Return the sorted distinct values of a column."""
        found = self.rows(table, where)
        return [] if found is None else sorted(found[column].unique().tolist())

    def _rank(self, version: str) -> float:
        """Return the sort key of a version: the engine's release first, then newer, then older
        versions.
        """
        own, wanted = version_key(version), version_key(self.release)
        distance = sum(1e-3**i * (a - b) for i, (a, b) in enumerate(zip(own, wanted, strict=True)))
        return distance if distance >= 0 else 2 * OLDER_RANK - distance

    def _files(self, table: str, backend: str, root: Path | None = None) -> list[Path]:
        roots = (root,) if root else self.roots
        name = f"*/{backend}/*/{table}_perf.parquet"
        return [path for one in roots for path in sorted((one / self.system).glob(name))]


def version_key(version: str) -> tuple[int, int, int, float]:
    """Return a version as a sortable tuple: three numbers, and the post-release or pre-release
    number.

    Names without a version, such as commits, count as newer than all versions.
    """
    found = find_version(version)
    if found is None:
        return 9999, 0, 0, 0
    last = found.pre[1] / 1000 - 1 if found.pre else found.post or 0
    return found.major, found.minor, found.micro, last


def select_first_ranked(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the preferred version (rule 2 of the module)."""
    first: pd.DataFrame = rows[rows["rank"] == rows["rank"].min()]
    return first


def select_kernel(rows: pd.DataFrame | None, source: str) -> pd.DataFrame | None:
    """Return the rows whose ``kernel_source`` contains ``source``, or None if there are none."""
    if rows is None or "kernel_source" not in rows:
        return None
    names = [str(name) for name in rows["kernel_source"].unique()]
    found = rows[rows["kernel_source"].isin([n for n in names if source.lower() in n.lower()])]
    return found if len(found) else None


def clean_rows(
    own: pd.DataFrame | None,
    others: pd.DataFrame | None,
    keys: Sequence[str],
    fastest: Callable[[pd.DataFrame], pd.Series[float]] | None = None,
) -> dict[Any, float]:
    """Return the time in seconds for each combination of values of ``keys``, without bad rows.

    ``fastest`` returns the time (ms) of each row at the GPU's peak rate, for rule 1 of the module.
    ``others`` are the rows of other tables, for rule 3.
    """
    found, elsewhere = (
        {} if rows is None else _least(_possible(rows, fastest), keys) for rows in (own, others)
    )
    return {
        key: elsewhere[key] if key in elsewhere and ms > HOST_BOUND * elsewhere[key] else ms
        for key, ms in found.items()
    }


def select_plausible_curve(own: Sequence[Curve], others: Sequence[Curve]) -> Curve:
    """Return the first curve of ``own`` that is plausible by rule 3 of the module.

    If there is none, return the fastest curve of ``own`` and ``others``. The curves in ``own`` are
    in order of preference.
    """
    every = [*own, *others]
    for curve in own:
        ratios = [
            y / min(other(x) for other in every) for x, y in zip(curve.xs, curve.ys, strict=True)
        ]
        if median(ratios) <= HOST_BOUND:
            return curve
    return min(every, key=lambda curve: sum(curve.ys) / len(curve.ys))


def _possible(
    rows: pd.DataFrame, fastest: Callable[[pd.DataFrame], pd.Series[float]] | None
) -> pd.DataFrame:
    return rows if fastest is None else rows[rows["latency"] * SLACK >= fastest(rows)]


def _least(frame: pd.DataFrame, keys: Sequence[str]) -> dict[Any, float]:
    least = frame.groupby(list(keys) if len(keys) > 1 else keys[0])["latency"].min()
    return {key: 1e-3 * float(ms) for key, ms in least.items() if ms > 0}


def _matches(column: pd.Series[Any], wanted: object) -> pd.Series[bool]:
    return column.isin(wanted) if isinstance(wanted, (list, tuple, set)) else column == wanted


@lru_cache(maxsize=24)
def _read(path: Path) -> pd.DataFrame:
    """Read a table with text columns as categories, which makes filters five times faster."""
    try:
        import pyarrow.parquet as pq
        from pyarrow.lib import ArrowException
    except ImportError as error:
        raise InputError(f"{path}: requires pyarrow: pip install 'simkv[hardware]'") from error
    try:
        types = pq.read_schema(path)
        texts = [field.name for field in types if str(field.type).endswith("string")]
        frame: pd.DataFrame = pq.read_table(path, read_dictionary=texts).to_pandas()
    except (OSError, ArrowException) as error:
        raise InputError(f"{path}: cannot be read as a table: {error}") from error
    if "latency" not in frame:
        raise InputError(f"{path}: missing column 'latency' (milliseconds)")
    if "head_dim" in frame and "window_size" not in frame:
        frame["window_size"] = 0  # older tables have no column for the window
    return frame
