"""Tests of YAML with line numbers, of ``--set``, and of invalid files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.scenario.yaml_document import YamlDocument, find_key, read_document

TEXT = """\
name: t
workload:
  requests:
    - {prompt_tokens: 1}
    - {prompt_tokens: 2}
engine:
  block_size: 16
variants:
  a: &a {timeout: 1.0, engine: {block_size: 8}}
  b: {<<: *a}
  c: *a
"""


@pytest.fixture
def document(tmp_path: Path) -> YamlDocument:
    return read(tmp_path, TEXT)


def read(folder: Path, text: str | bytes) -> YamlDocument:
    path = folder / "s.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_document(path)


def failure(folder: Path, text: str | bytes) -> str:
    """Return the error message of reading this text, without the folder."""
    with pytest.raises(InputError) as raised:
        read(folder, text)
    message = str(raised.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder}/")


# Line numbers


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (("name",), 1),
        (("workload", "requests"), 3),
        (("workload", "requests", 1), 5),
        (("workload", "requests", 1, "prompt_tokens"), 5),
        (("engine", "block_size"), 7),
        (("engine", "typo"), 6),
        (("variants", "a", "engine", "block_size"), 9),
        (("variants", "b", "engine"), 10),
        (("nowhere",), 1),
        ((), 1),
    ],
)
def test_place_is_the_line_of_the_value_or_its_parent(
    document: YamlDocument, location: tuple[str | int, ...], line: int
) -> None:
    assert document.place(location) == f"{document.path}:{line}"


def test_place_of_an_override_is_the_command_line(document: YamlDocument) -> None:
    document.override("engine.block_size=3")
    assert document.place(("engine", "block_size")) == "--set engine.block_size=3"
    assert document.place(("engine",)) == f"{document.path}:6"
    document.override("workload={requests: []}")
    assert document.place(("workload", "requests")) == "--set workload={requests: []}"


def test_find_key_matches_the_written_key() -> None:
    assert find_key({1: "x"}, "1") == 1
    assert find_key({"1": "x"}, 1) == "1"
    assert find_key(["x"], "0") == 0
    assert find_key(["x"], "1") is None
    assert find_key(["x"], "-1") is None
    assert find_key("x", 0) is None


# --set


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("engine.block_size=32", ("engine", "block_size"), 32),
        (" engine.block_size = 32", ("engine", "block_size"), 32),
        ("workload.requests.1.prompt_tokens=7", ("workload", "requests", 1, "prompt_tokens"), 7),
        ("workload.requests.0={prompt_tokens: 9}", ("workload", "requests", 0, "prompt_tokens"), 9),
        ("timeout=1e3", ("timeout",), 1000.0),
        ("timeout=null", ("timeout",), None),
        ("timeout=", ("timeout",), None),
        ("summary=a=b", ("summary",), "a=b"),
        ("provenance.given=[x, y]", ("provenance", "given"), ["x", "y"]),
        ("variants.new.engine.variant=x", ("variants", "new", "engine", "variant"), "x"),
    ],
)
def test_override_sets_one_value(
    document: YamlDocument, assignment: str, path: tuple[str | int, ...], value: object
) -> None:
    document.override(assignment)
    node = document.tree
    for key in path:
        node = node[key]
    assert node == value


@pytest.mark.parametrize("name", ["b", "c"])
def test_override_of_an_alias_leaves_other_aliases_unchanged(
    document: YamlDocument, name: str
) -> None:
    document.override(f"variants.{name}.engine.block_size=2")
    document.override(f"variants.{name}.timeout=7")
    sizes = {key: value["engine"]["block_size"] for key, value in document.tree["variants"].items()}
    assert sizes == {"a": 8, "b": 8, "c": 8} | {name: 2}
    assert document.tree["variants"]["a"]["timeout"] == 1.0


def test_override_accepts_a_numeric_key(tmp_path: Path) -> None:
    document = read(tmp_path, "e2e_s: {0: 1.0}\n")
    document.override("e2e_s.0=2.0")
    assert document.tree["e2e_s"] == {0: 2.0}


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("engine.block_size", "expected path=value, as in engine.block_size=16"),
        ("=5", "expected path=value"),
        ("engine.=5", "expected path=value"),
        ("engine..block_size=5", "expected path=value"),
        ("name.x=5", "name has no fields"),
        ("name.x.y=5", "name has no fields"),
        ("workload.requests.2={}", "expected an index from 0 to 1"),
        ("workload.requests.x={}", "expected an index from 0 to 1"),
        ("workload.requests.-1={}", "expected an index from 0 to 1"),
        ("workload.requests.2.prompt_tokens=1", "workload.requests has no fields"),
        ("timeout=[", "the value is not valid YAML"),
        ("timeout=!x 5", "the value is not valid YAML"),
        ("timeout=" + "9" * 5000, "the value is not valid YAML"),
        ("name=&a [*a]", "an alias contains itself"),
        ("name=&a {x: *a}", "an alias contains itself"),
    ],
)
def test_rejects_invalid_overrides(document: YamlDocument, assignment: str, complaint: str) -> None:
    with pytest.raises(InputError) as raised:
        document.override(assignment)
    assert str(raised.value) == f"--set {assignment}: {complaint}" or complaint in str(raised.value)
    assert str(raised.value).startswith(f"--set {assignment[:200]}")


# Files


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "s.yaml:1: must be a mapping of fields, got nothing"),
        ("# nothing\n", "s.yaml:1: must be a mapping of fields, got nothing"),
        ("- 1\n", "s.yaml:1: must be a mapping of fields, got a list"),
        ("five\n", "s.yaml:1: must be a mapping of fields, got 'five'"),
        ("a: 1\nb: 2\na: 3\n", "s.yaml:3: not valid YAML: found duplicate key"),
        ("a: 1\n---\nb: 2\n", "s.yaml:2: not valid YAML: but found another document"),
        ("a: 1\nb: [1,\n", "s.yaml:3: not valid YAML"),
        ("a:\n\t- b\n", "s.yaml:2: not valid YAML"),
        ("a: 1\nb: *c\n", "s.yaml:2: not valid YAML: found undefined alias 'c'"),
        ("a: 1\nb: \x01\n", "s.yaml:2: not valid YAML: special characters are not allowed"),
        ("a: &a\n  <<: *a\n", "s.yaml:2: a merge key (<<) must name a mapping"),
        ("a: " + "9" * 5000 + "\n", "s.yaml:1: not valid YAML: a number has too many digits"),
        ("%YAML 9.9\n---\na: 1\n", "s.yaml:1: not valid YAML"),
        ("[" * 1000, "s.yaml:1: not valid YAML: nested deeper than 100"),
        ("a: " + "[" * 5000 + "]" * 5000, "s.yaml:1: not valid YAML: nested deeper than 100"),
        ("a:\n" + "".join(" " * i + "a:\n" for i in range(1, 500)), "s.yaml:101: not valid YAML"),
        (bytes(range(256)), "s.yaml: not UTF-8 text"),
        ("name: é".encode("latin-1"), "s.yaml: not UTF-8 text"),
        ("name: t".encode("utf-16"), "s.yaml: not UTF-8 text"),
    ],
)
def test_rejects_documents_that_are_not_mappings(
    tmp_path: Path, text: str | bytes, complaint: str
) -> None:
    assert failure(tmp_path, text).startswith(complaint)


def test_rejects_yaml_bombs_quickly(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    started = time.perf_counter()
    message = failure(tmp_path, "\n".join(lines))
    assert message == "s.yaml:7: aliases expand to more than 2,000,000 values"
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: *a}\n", "a: &a\n  b:\n  - *a\n"])
def test_accepts_lists_that_contain_themselves(tmp_path: Path, text: str) -> None:
    document = read(tmp_path, text)  # the reader omits the alias
    document.override("b=1")
    assert document.place(("a",)) == f"{document.path}:1"


def test_rejects_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: no such file or directory"):
        read_document(tmp_path / "nothing.yaml")
    with pytest.raises(InputError, match="cannot be read: is a directory"):
        read_document(tmp_path)


def test_rejects_large_files_without_parsing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "larger than the limit of 1 MiB" in failure(tmp_path, "a: " + "x" * (2 << 20))


@pytest.mark.parametrize("text", ["\ufeffname: t\n", "name: t\r\nb: 1\r\n", "name: t"])
def test_accepts_byte_order_marks_and_all_line_ends(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).tree["name"] == "t"


@pytest.mark.parametrize(
    "text",
    ["a: " + "[" * 5000 + "]" * 5000, "a: [" + "1," * 1_500_000 + "]", "a: " + "{a: " * 5000],
    ids=["brackets", "one line of 3 MB", "braces"],
)
def test_rejects_slow_documents_quickly(tmp_path: Path, text: str) -> None:
    """Without the limits, reading took 34 s and 9 s."""
    begin = time.process_time()
    assert "nested deeper than" in (why := failure(tmp_path, text)) or "larger than" in why
    with pytest.raises(InputError, match="not valid YAML"):
        YamlDocument(Path("s.yaml"), {}).override("a=" + "[" * 5000)
    assert time.process_time() - begin < 1.0


def test_accepts_usual_nesting(tmp_path: Path) -> None:
    text = "a: " + "[" * 40 + "5" + "]" * 40
    (tmp_path / "s.yaml").write_text(text)
    assert str(read_document(tmp_path / "s.yaml").tree["a"]) == "[" * 40 + "5" + "]" * 40


def test_merge_key_of_its_own_mapping_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "self.yaml"
    path.write_text("name: a\nworkload: &self\n  <<: *self\n  burst: {}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"self.yaml:3: a merge key \(<<\) must name a mapping"):
        read_document(path)
