"""Everything that was written for `--help` is shown as it was written, and nothing else."""

import re
from collections.abc import Callable

import pytest
from typer import main as typer_main

from dragoman.cli import main as dragoman
from dragoman.load.command import app as load_app
from dragoman.load.command import compare_app

Run = Callable[..., tuple[int, str, str]]
APP = typer_main.get_command(dragoman.app)
COMMANDS = [*APP.commands, *(f"models {name}" for name in APP.commands["models"].commands)]
# Commands of apps of their own, which are loaded when they are called.
ELSEWHERE = {"load": typer_main.get_command(load_app), "load-compare": typer_main.get_command(compare_app)}
PANELS = ["Call a server", "Serve", "Train and export", "Measure"]
# Of Unicode, where emoji are.
EMOJI = re.compile("[\u2600-\u27bf\U0001f000-\U0001faff]")


def words(text: str) -> str:
    """Return a text without colours, escapes, the frames of a table and the places where lines break."""
    return " ".join(re.sub(r"[\u2500-\u257f]", " ", re.sub(r"\x1b\[[0-9;]*m|\[/?none\]", "", text)).split())


def test_without_arguments_the_commands_are_listed_by_what_they_are_for(run_command: Run) -> None:
    code, out, _ = run_command("--version")
    assert code == 0 and re.fullmatch(r"\d+\.\d+\S*\n", out)
    code, out, err = run_command()
    assert (code, err) == (0, "") and run_command("-h")[0] == 0
    places = [out.index(f" {panel} ") for panel in PANELS]
    assert places == sorted(places)
    assert len(APP.commands) > 10 and all(f" {command} " in out for command in APP.commands)


def test_help_is_printed_as_it_is_written(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would take `:A:` for an emoji and `[x]` for a style, and cut long names on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    for command in COMMANDS:
        code, out, err = run_command(*command.split(), "--help")
        assert run_command(*command.split(), "-h") == (code, out, err) == (0, out, "") and f"Usage: dragoman {command}" in out
        described = ELSEWHERE.get(command, APP)
        for name in command.split() if described is APP else ():
            described = described.commands[name]
        out = words(out)
        assert not EMOJI.search(out) and words(described.help.split("\n\n")[0]) in out
        for parameter in described.params:
            assert words(getattr(parameter, "help", None) or "") in out, parameter.name
            assert parameter.param_type_name == "argument" or all(name in out for name in parameter.opts + parameter.secondary_opts)
    for command in ("serve --models x -h", "translate hello -h", "load --rate 1 -h"):
        code, out, _ = run_command(*command.split())
        assert code == 0 and "Usage: dragoman" in out
