"""Tests of axes, grids and samples."""

from __future__ import annotations

import pytest

from simkv.core.errors import InputError
from simkv.scenario.yaml_document import YamlDocument
from simkv.study.sweep_axes import (
    SampleSpec,
    format_assignment,
    grid,
    make_axis,
    parse_axis,
    parse_sample,
    sample_points,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,8", (1, 2, 8)),
        ("a,1.5,true,null,'x,y',.inf", ("a", 1.5, True, None, "x,y", float("inf"))),
        ("1..4:1", (1, 2, 3, 4)),
        ("64..256:64", (64, 128, 192, 256)),
        ("1..10:4", (1, 5, 9)),
        ("0.1..0.5:0.1", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("0..1:0.25", (0.0, 0.25, 0.5, 0.75, 1.0)),
        ("-1..1:1", (-1, 0, 1)),
        ("1..10:n=4", (1, 4, 7, 10)),
        ("0.0..1:n=3", (0.0, 0.5, 1.0)),
        ("1..64:log=7", (1, 2, 4, 8, 16, 32, 64)),
        ("0.01..100:log=5", (0.01, 0.1, 1.0, 10.0, 100.0)),
    ],
)
def test_parses_values(text: str, values: tuple[object, ...]) -> None:
    axis = parse_axis(f"a.b={text}")
    assert axis.path == "a.b"
    assert axis.values == values
    assert [type(value) for value in axis.values] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a.b", "expected path=values"),
        ("a..b=1", "expected path=values"),
        ("a=", "expected path=values"),
        ("a=1,1", "a value is listed twice"),
        ("a={x: 1}", "list a,b,c of scalars"),
        ("a=[", "not valid YAML"),
        ("a=5..1:1", "the lower end 5 must be below 1"),
        ("a=1..5:0", "LOW..HIGH:STEP"),
        ("a=1..5:x=3", "LOW..HIGH:STEP"),
        ("a=1..5:n=1", "count from 2"),
        ("a=0..5:log=3", "must begin above 0"),
        ("a=0..1:n=5", "fewer than 5 whole numbers"),
        ("a=0..1:1e-9", "more than 100,000"),
        ("variants=1,2", "names of variants"),
    ],
)
def test_rejects_invalid_axes(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_axis(text)


@pytest.mark.parametrize("text", ["lhs", "lhs:0", "sobol:8", "random:-1", "random:9999999"])
def test_rejects_invalid_samples(text: str) -> None:
    with pytest.raises(InputError, match="expected random:N or lhs:N"):
        parse_sample(text)


def test_last_axis_of_grid_changes_fastest() -> None:
    points = grid([parse_axis("a=1,2"), parse_axis("b=x,y")])
    assert points == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    assert grid([]) == [{}]
    assert [point["a"] for point in grid([parse_axis("a=3..5")])] == [3, 4, 5]


@pytest.mark.parametrize("text", ["a=0.5..1.5", "a=1..8:log", "a=1..900000"])
def test_grid_requires_steps(text: str) -> None:
    with pytest.raises(InputError, match="requires --sample"):
        grid([parse_axis(text)])


def test_rejects_too_large_grid() -> None:
    with pytest.raises(InputError, match="1,000,000 points"):
        grid([parse_axis("a=1..1000"), parse_axis("b=1..1000")])


def test_latin_hypercube_has_one_point_per_cell() -> None:
    axes = [parse_axis("a=0.0..1.0"), parse_axis("b=1..20"), parse_axis("c=1.0..1024.0:log")]
    points = sample_points(axes, SampleSpec("lhs", 20), seed=3)
    assert sorted(int(float(str(point["a"])) * 20) for point in points) == list(range(20))
    assert sorted(int(str(point["b"])) for point in points) == list(range(1, 21))
    halves = [float(str(point["c"])) < 32 for point in points]
    assert sum(halves) == 10
    assert points == sample_points(axes, SampleSpec("lhs", 20), seed=3)
    assert points != sample_points(axes, SampleSpec("lhs", 20), seed=4)


def test_random_sample_covers_range() -> None:
    axes = [parse_axis("a=1..4"), parse_axis("b=x,y"), parse_axis("c=1..3:log")]
    points = sample_points(axes, SampleSpec("random", 400), seed=0)
    assert {point["a"] for point in points} == {1, 2, 3, 4}
    assert {point["b"] for point in points} == {"x", "y"}
    assert {point["c"] for point in points} == {1, 2, 3}


@pytest.mark.parametrize(
    "value",
    [1, -3, 1.5, 1e-07, 1e22, float("inf"), True, None, "a", "null", "1", "0.33.0", "x: y", "é ü"],
)
def test_assignment_round_trips(value: object) -> None:
    document = YamlDocument(None, {})  # type: ignore[arg-type]
    document.override(format_assignment("a.b", value))
    found = document.tree["a"]["b"]
    assert found == value
    assert type(found) is type(value)


def test_axes_from_python() -> None:
    assert make_axis("a", "1..3:1").values == (1, 2, 3)
    assert make_axis("a", range(3)).values == (0, 1, 2)
    assert make_axis("a", ["x, y", None]).values == ("x, y", None)
    for values in ([], [[1]], [1, 1]):
        with pytest.raises(InputError):
            make_axis("a", values)
