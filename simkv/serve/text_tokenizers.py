"""Text and tokens: how many tokens a text has, and filler text for tokens that are emitted.

rule = FourBytes()
rule.encode("Hello, world")      # array('q', [...]), three tokens
rule.decode(rule.encode("abc"))  # 'abc'
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from simkv.core.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: A role and what it said.
RoleMessage = tuple[str, str]


class TextTokenizer(Protocol):
    """How texts become tokens; ``rule`` says it in a sentence."""

    rule: str

    def encode(self, text: str) -> array[int]:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """A text that has these tokens, where they are of one."""

    def chat(self, messages: Iterable[RoleMessage]) -> array[int]:
        """The tokens of a conversation, up to where the assistant is to speak."""

    def word(self, request: int, place: int) -> str:
        """The text of a token that is emitted; printable ASCII without quotes and backslashes."""

    def emitted(self, request: int, count: int) -> array[int]:
        """The tokens that ``count`` of those words are."""


#: Seventy syllables, of which filler words are made.
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


class FourByteTokenizer:
    """A token for every four bytes of UTF-8, which is four characters of English.

    Parts of a conversation begin with a token of their own, so that what one answer was is found
    again in the prompt of the next turn.
    """

    rule = "a token for every four bytes of UTF-8 (four characters of English)"

    def encode(self, text: str) -> array[int]:
        data = text.encode("utf-8", "surrogatepass")
        data += bytes(-len(data) % 4)
        return array("q", memoryview(data).cast("I"))

    def decode(self, tokens: Sequence[int]) -> str:
        data = b"".join((token & 0xFFFFFFFF).to_bytes(4, "little") for token in tokens)
        return data.replace(b"\0", b"").decode("utf-8", "replace")

    def chat(self, messages: Iterable[RoleMessage]) -> array[int]:
        tokens = array("q")
        for role, content in messages:
            tokens += self.encode(f"<{role}>")
            tokens += self.encode(content)
        return tokens + self.encode("<assistant>")

    def word(self, request: int, place: int) -> str:
        own = request * 31 + place * 17
        return SYLLABLES[own % 70] + SYLLABLES[(own // 70 + request) % 70][0] + " "

    def emitted(self, request: int, count: int) -> array[int]:
        return self.encode("".join(self.word(request, place) for place in range(count)))


class FileTokenizer:
    """The tokens of a tokenizer file (``tokenizer.json`` of a model)."""

    #: Words of which the first is taken that stays one token when it is said again and again.
    _WORDS = (" the", " a", " hello", "a", ".", "0")

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self._tokenizer = tokenizer
        self.rule = f"the tokenizer of {path.name}"
        alike = (word for word in self._WORDS if len(self.encode(word * 32)) == 32)
        self._word = next(alike, self._WORDS[0])

    def encode(self, text: str) -> array[int]:
        text = text.encode("utf-8", "replace").decode()
        return array("q", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        size = self._tokenizer.get_vocab_size()
        return str(self._tokenizer.decode([token for token in tokens if token < size]))

    def chat(self, messages: Iterable[RoleMessage]) -> array[int]:
        turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
        return self.encode(f"{turns}<|im_start|>assistant\n")

    def word(self, request: int, place: int) -> str:  # noqa: ARG002
        return self._word

    def emitted(self, request: int, count: int) -> array[int]:  # noqa: ARG002
        return self.encode(self._word * count)


def load_tokenizer(path: Path | None) -> TextTokenizer:
    """By a tokenizer file, or by the rule. Raises InputError if the file cannot be used."""
    if path is None:
        return FourByteTokenizer()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError(
            "--tokenizer: needs the package tokenizers: pip install 'simkv[serve]'"
        ) from error
    if not path.is_file():
        raise InputError(f"--tokenizer {path}: there is no such file; expected a tokenizer.json")
    try:
        return FileTokenizer(Tokenizer.from_file(str(path)), path)
    except Exception as error:  # the package raises Exception itself
        raise InputError(f"--tokenizer {path}: {error}; expected a tokenizer.json") from error
