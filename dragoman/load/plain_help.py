"""A command whose help is plain text; rich cuts long names of options on a narrow terminal, and reads `[x]` and `:A:` as markup."""

from typing import Any

from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """A command whose options are listed under the panels that they name."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords | {"rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, each panel's below its name."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            described = parameter.get_help_record(ctx)
            if described:
                panel = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or panel, []).append(described)
        for panel, options in panels.items():
            with formatter.section(panel):
                formatter.write_dl(options)
