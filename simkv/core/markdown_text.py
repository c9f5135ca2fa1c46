"""Escape Markdown in text from users, such as request ids, file names and settings."""

from __future__ import annotations

import re

_ESCAPED = str.maketrans(
    {
        "&": "&amp;",
        "<": "&lt;",
        "|": "\\|",
        "`": "\\`",
        "\\": "\\\\",
        "[": "\\[",
        "]": "\\]",
        "*": "\\*",
    }
)


def escape_markdown(text: object) -> str:
    """Escape Markdown characters in a text. Line ends and control characters become spaces.

    The arrow ``->`` is not escaped, because it has no meaning in Markdown.
    """
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return re.sub("(?<!-)>", "&gt;", line.translate(_ESCAPED))
