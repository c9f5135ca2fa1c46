"""Detect the format of a trace from its content."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from simkv.core.errors import InputError, spelling_hint
from simkv.workload.formats.aiperf import AIPERF
from simkv.workload.formats.azure import AZURE
from simkv.workload.formats.blis import BLIS, data_file
from simkv.workload.formats.burstgpt import BURSTGPT
from simkv.workload.formats.genai_perf import GENAI_PERF
from simkv.workload.formats.guidellm import GUIDELLM
from simkv.workload.formats.llmservingsim import CAPTURE, LLMSERVINGSIM
from simkv.workload.formats.mapped_columns import make_mapped_format
from simkv.workload.formats.mooncake import MOONCAKE
from simkv.workload.formats.mooncake_agentic import MOONCAKE_AGENTIC
from simkv.workload.formats.mooncake_agentic_v2 import MOONCAKE_AGENTIC_V2
from simkv.workload.formats.otel_spans import SPANS
from simkv.workload.formats.recorded_case import CASE
from simkv.workload.formats.servegen import SERVEGEN, is_client_file
from simkv.workload.formats.simkv_csv import LENGTH_PARSERS, SIMKV, find_missing_columns
from simkv.workload.formats.simkv_parquet import PARQUET
from simkv.workload.formats.splitwise import SPLITWISE
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.formats.vidur import VIDUR, VIDUR_OLD
from simkv.workload.formats.vllm_bench import BENCH
from simkv.workload.formats.weka import WEKA
from simkv.workload.trace_source import open_binary

TRACE_FORMATS = (
    CASE,
    SIMKV,
    PARQUET,
    AZURE,
    MOONCAKE_AGENTIC_V2,
    MOONCAKE_AGENTIC,
    MOONCAKE,
    BURSTGPT,
    SERVEGEN,
    WEKA,
    VIDUR,
    VIDUR_OLD,
    LLMSERVINGSIM,
    CAPTURE,
    AIPERF,
    SPANS,
    GENAI_PERF,
    GUIDELLM,
    BLIS,
    SPLITWISE,
    BENCH,
)
FORMAT_NAMES = tuple(format.name for format in TRACE_FORMATS)

#: Number of bytes to inspect.
HEAD_BYTES = 1 << 18
#: Minimum size in bytes of a gzip file, even with empty content.
EMPTY_GZIP = 20
_KEY = re.compile(r'"([A-Za-z_][A-Za-z0-9_ ]*)"\s*:')
_YAML_KEY = re.compile(r"^([A-Za-z_]+):", re.MULTILINE)
#: Names of the files that are read if their directory is given.
_INSIDE = ("requests.jsonl", "requests.jsonl.gz", "requests.csv", "profile_export.jsonl")


def detect_format(
    path: Path, name: str = "auto", columns: Mapping[str, str] | None = None
) -> tuple[TraceFormat, Path]:
    """Return the format of a trace, and the file or directory with the requests.

    ``columns`` are the column names of a custom log. Raises InputError if the file is missing or
    its format is unknown.
    """
    path = _data(path)
    if columns:
        return make_mapped_format(columns, read_head(path)), path
    if name != "auto":
        for format in TRACE_FORMATS:
            if format.name == name:
                return format, path
        raise InputError(
            f"format: unknown format {name!r}{spelling_hint(name, FORMAT_NAMES)}; "
            f"expected auto, {', '.join(FORMAT_NAMES)}"
        )
    head = read_head(path)
    for format in TRACE_FORMATS:
        if format.known(head):
            return format, path
    if head.is_empty:
        raise InputError(f"{path}: the file is empty")
    if lacking := find_missing_columns(head):
        raise InputError(
            f"{path}: missing {', '.join(lacking)}; found {_described(head)}. If these columns "
            f"have other names, use `simkv trace convert --columns {lacking[0]}=NAME`"
        )
    found = _described(head)
    if is_client_file(path.name):
        found += " (a single ServeGen client: pass its folder instead)"
    raise InputError(f"{path}: unknown trace format; found {found}. {_expected(path, head)}")


def _described(head: FileHead) -> str:
    names = ", ".join((head.columns or sorted(head.names))[:20])
    if names and head.kind in ("csv", "json"):
        what = "a CSV file with the columns" if head.kind == "csv" else "JSON with the keys"
        return f"{what} {names}"
    return "a folder" if head.kind == "folder" else f"a {head.kind} file"


def _expected(path: Path, head: FileHead) -> str:
    """Return which files can be read, and the command that maps the columns of a table."""
    if head.kind not in ("csv", "json"):
        return f"Supported: {', '.join(FORMAT_NAMES)}; see `simkv trace formats`"
    pairs = ",".join(f"{name}=NAME" for name in ("arrival", *LENGTH_PARSERS))
    return (
        "Expected the columns arrival, prompt_tokens and output_tokens, or a format in `simkv "
        f"trace formats`. If the columns have other names, use `simkv trace convert {path} "
        f"trace.csv --columns {pairs}`"
    )


def _data(path: Path) -> Path:
    """Return the file with the requests if ``path`` is a directory or a header."""
    if not path.exists():
        raise InputError(f"{path}: cannot be read: no such file or directory")
    if path.suffix in (".yaml", ".yml") and (data := data_file(path)):
        return data
    if path.is_dir():
        headers = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
        inside = [path / name for name in _INSIDE if (path / name).is_file()]
        inside += [found for header in headers if (found := data_file(header))]
        return inside[0] if inside else path
    return path


def read_head(path: Path) -> FileHead:
    """Return the kind of a file and its column names or keys.

    Raises InputError if the file is unreadable.
    """
    if path.is_dir():
        return FileHead(path, "folder", frozenset())
    start = _beginning(path)
    if start[:4] == b"PAR1":
        return FileHead(path, "parquet", frozenset())
    if start[257:262] == b"ustar":
        return FileHead(path, "tar", frozenset())
    text = start.decode("utf-8-sig", errors="replace").lstrip()
    first = re.split("[\r\n]", text, maxsplit=1)[0]
    if not first.replace("\t", " ").isprintable():
        return FileHead(path, "binary", frozenset())
    if text[:1] in ("{", "["):
        return FileHead(path, "json", _folded(found[1] for found in _KEY.finditer(text)))
    if re.match(r"[A-Za-z_]+:(\s|$)", first):
        return FileHead(path, "yaml", _folded(found[1] for found in _YAML_KEY.finditer(text)))
    if "," in first:
        columns = tuple(name.strip().strip('"') for name in first.split(","))
        return FileHead(path, "csv", _folded(columns), columns)
    return FileHead(path, "text", _folded([first]))


def _beginning(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed if it is a gzip file."""
    with open_binary(path) as raw:
        start = raw.read(HEAD_BYTES)
    if start[:2] != b"\x1f\x8b":
        return start
    try:
        text = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(start, HEAD_BYTES)
    except zlib.error as error:
        raise InputError(f"{path}: damaged gzip data; download the file again") from error
    if not text and len(start) < EMPTY_GZIP:
        raise InputError(f"{path}: empty gzip data; download the file again")
    return text


def _folded(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.strip().casefold() for name in names)
