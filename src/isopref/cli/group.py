"""The group of all commands: their order in the help, and advice for a config field that was passed as an option."""

from typing import Any

from typer.core import TyperGroup

from isopref.config.load import homes, override_form

# The order in which a project uses them. Commands that are not listed come last.
ORDER = (
    "init",
    "config",
    "data",
    "plan",
    "train",
    "eval",
    "ls",
    "report",
    "compare",
    "push",
    "merge",
    "score",
    "sample",
    "judge",
    "rounds",
)


class Commands(TyperGroup):
    """The command group; explains how to set a config field that was passed as an option."""

    def list_commands(self, ctx: Any) -> list[str]:
        known = super().list_commands(ctx)
        return [name for name in ORDER if name in known] + [name for name in known if name not in ORDER]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # By name: the class is click's, or that of the click bundled with newer versions of typer.
            if type(error).__name__ == "NoSuchOption":
                _explain_overrides(error)
            raise


def _explain_overrides(error: Any) -> None:
    takes_overrides = any(param.name == "overrides" for param in error.ctx.command.params)
    name = error.option_name.lstrip("-").replace("-", "_")
    if takes_overrides and (homes(name) or not error.possibilities):  # not a misspelt option
        error.message = f"{error.message.rstrip('.')}. To set a config field, {override_form(name)}"
        error.possibilities = []  # typer would suggest --help for --lr
