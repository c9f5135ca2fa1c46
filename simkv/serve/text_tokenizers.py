"""Convert between text and tokens, and generate filler text for emitted tokens.

rule = FourByteTokenizer()
rule.encode("Hello, world")      # array('q', [...]), three tokens
rule.decode(rule.encode("abc"))  # 'abc'
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from simkv.core.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The role and the content of a message.
RoleMessage = tuple[str, str]


class TextTokenizer(Protocol):
    """Interface for the conversion between text and tokens.

    ``rule`` describes the conversion to users.
    """

    rule: str

    def encode(self, text: str) -> array[int]:
        """Return the tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens. Tokens that represent no text are omitted."""

    def chat(self, messages: Iterable[RoleMessage]) -> array[int]:
        """Return the tokens of a conversation, up to the start of the assistant's reply."""

    def word(self, request: int, place: int) -> str:
        """Return the filler text of the token at ``place`` in the output of a request.

        The text is printable ASCII without quotes and backslashes.
        """

    def emitted(self, request: int, count: int) -> array[int]:
        """Return the tokens of the filler text for the first ``count`` output tokens of a
        request.
        """


#: Seventy syllables for filler words.
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


class FourByteTokenizer:
    """Tokenizer with one token per four bytes of UTF-8.

    A token never spans two messages, so a reply has the same tokens in the next prompt.
    """

    rule = "one token per four bytes of UTF-8 (about four English characters)"

    def encode(self, text: str) -> array[int]:
        data = text.encode("utf-8", "surrogatepass")
        data += bytes(-len(data) % 4)
        return array("q", memoryview(data).cast("I"))

    def decode(self, tokens: Sequence[int]) -> str:
        data = np.asarray(tokens, np.int64).astype("<u4").tobytes()
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
    """Tokenizer that is loaded from a file, such as the ``tokenizer.json`` of a model."""

    #: Candidates for the filler word; the first candidate that stays a single token when repeated
    #: is used.
    _WORDS = (" the", " a", " hello", "a", ".", "0")

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self._tokenizer = tokenizer
        self.rule = f"tokenizer {path.name}"
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
    """Return the tokenizer in a file, or the four-byte tokenizer if ``path`` is None.

    Raises InputError if the file or the package ``tokenizers`` cannot be used.
    """
    if path is None:
        return FourByteTokenizer()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError(
            "--tokenizer: the package tokenizers is not installed; run pip install 'simkv[serve]'"
        ) from error
    if not path.is_file():
        raise InputError(f"--tokenizer {path}: no such file; expected a tokenizer.json")
    try:
        return FileTokenizer(Tokenizer.from_file(str(path)), path)
    except Exception as error:  # the package raises Exception itself, not a subclass
        raise InputError(f"--tokenizer {path}: {error}; expected a tokenizer.json") from error
