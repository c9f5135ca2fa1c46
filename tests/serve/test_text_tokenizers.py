"""Tests of tokenizers, and of prefixes that occurred before."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.core.request import Segment
from simkv.serve.prompt_prefixes import PromptTree
from simkv.serve.text_tokenizers import FourByteTokenizer, load_tokenizer


def tokens(*values: int) -> array[int]:
    return array("q", values)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_text_round_trips(text: str) -> None:
    rule = FourByteTokenizer()
    assert rule.decode(rule.encode(text)) == text
    assert len(rule.encode(text)) == -(-len(text.encode()) // 4)


def test_emitted_tokens_match_words() -> None:
    rule = FourByteTokenizer()
    text = "".join(rule.word(7, place) for place in range(50))
    assert rule.encode(text) == rule.emitted(7, 50)
    assert rule.emitted(7, 50) != rule.emitted(8, 50)


def test_tokenizer_file(tmp_path: Path) -> None:
    package = pytest.importorskip("tokenizers", reason="needs pip install 'simkv[serve]'")
    made = package.Tokenizer(package.models.WordLevel({"[UNK]": 0, "a": 1, "the": 2}, "[UNK]"))
    made.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path / "tokenizer.json")
    assert found.encode("a the a \ud800") == tokens(1, 2, 1, 0)
    assert len(found.emitted(0, 5)) == 5
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"bad\.json: .*expected a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")


def test_equal_prefixes_have_equal_names() -> None:
    known = PromptTree()
    assert known.segments_of(tokens(1, 2, 3), "u0") == []
    assert known.segments_of(tokens(1, 2, 9), "u1") == [Segment("u0", 0, 2), Segment("u1", 0, 1)]
    assert known.segments_of(tokens(1, 2, 3), "u2") == [Segment("u0", 0, 2), Segment("u0", 2, 3)]
    known.add_reply(tokens(1, 2, 9), tokens(4, 5), "o1")
    said = known.segments_of(tokens(1, 2, 9, 4, 5, 6), "u3")
    assert said == [
        Segment("u0", 0, 2),
        Segment("u1", 0, 1),
        Segment("o1", 0, 2),
        Segment("u3", 0, 1),
    ]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=20))
def test_names_are_equal_only_for_equal_prefixes(prompts: list[list[int]]) -> None:
    known = PromptTree()
    seen: list[tuple[list[int], list[tuple[str, int]]]] = []
    for number, prompt in enumerate(prompts):
        own = f"u{number}"
        segments = known.segments_of(tokens(*prompt), own) or [Segment(own, 0, len(prompt))]
        names = [(s.stream, place) for s in segments for place in range(s.start, s.end)]
        assert len(names) == len(prompt)
        for other, others in seen:
            for place in range(min(len(prompt), len(other))):
                same = prompt[: place + 1] == other[: place + 1]
                assert (names[: place + 1] == others[: place + 1]) is same
        seen.append((prompt, names))


def test_drops_least_recent_prefixes() -> None:
    known = PromptTree(most=100)
    for number in range(50):
        known.segments_of(tokens(*[number] * 10), f"u{number}")
    assert known.size <= 100
    assert known.segments_of(tokens(*[0] * 10), "again") == []
    assert known.segments_of(tokens(*[49] * 10), "again") == [Segment("u49", 0, 10)]
