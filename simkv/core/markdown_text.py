"""Escape Markdown in text from users, such as request ids, file names and settings."""

from __future__ import annotations

_ESCAPED = str.maketrans(
    {
        "&": "&amp;",
        "<": "&lt;",
        ">": "&gt;",
        "|": "\\|",
        "`": "\\`",
        "\\": "\\\\",
        "[": "\\[",
        "]": "\\]",
        "*": "\\*",
    }
)


def escape_markdown(text: object) -> str:
    """Escape Markdown characters in a text. Line ends and control characters become spaces."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return line.translate(_ESCAPED)
