"""Command groups with help under headings and one-line usage errors."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from simkv.cli.command_support import print_error
from simkv.core.errors import InputError, simplify_pydantic_message, spelling_hint


class Commands(TyperGroup):
    """Group of commands with help under headings and one-line errors for unknown commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write one section of commands per heading, as typer does with rich, but without rich."""
        shown = {name: one for name, one in self.commands.items() if not one.hidden}
        width = max(map(len, shown), default=0)
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in shown.items():
            heading = getattr(command, "rich_help_panel", None)
            line = command.get_short_help_str(formatter.width - 6 - width)
            sections.setdefault(heading if isinstance(heading, str) else "Commands", []).append(
                (name.ljust(width), line)
            )
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as click does; raise InputError for an unknown command."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise InputError(
                f"{args[0]}: there is no such command{spelling_hint(args[0], self.commands)}; "
                f"{ctx.command_path} --help lists them"
            )
        return super().resolve_command(ctx, args)


def print_usage_error(error: Any) -> None:
    """Print click's usage error to standard error, or the help if no command was given."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        print_error(describe_usage_error(error))


def describe_usage_error(error: Any) -> str:
    """Return click's usage error as one line: ``run --foo: there is no …``."""
    context = error.ctx
    if context is None:
        return str(error.format_message())
    command = context.command_path.partition(" ")[2]
    help_ = f"{context.command_path} --help"
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        name = error.option_name
        known = [option for one in context.command.params for option in one.opts]
        return (
            f"{command} {name}: there is no such option{spelling_hint(name, known)}; {help_} "
            "lists them"
        ).lstrip()
    what, colon, found = error.format_message().rstrip(".").partition(": ")
    message = (
        what[:1].lower() + what[1:] + colon + (simplify_pydantic_message(found) if colon else "")
    )
    return f"{command}: {message}; see {help_}" if command else f"{message}; see {help_}"
