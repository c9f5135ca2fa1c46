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
    """Escape the characters that Markdown interprets as HTML, links, code, emphasis or the end of a
    cell.

    Line ends and control characters become spaces.
    """
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return line.translate(_ESCAPED)
