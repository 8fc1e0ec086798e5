"""What `--help` says: everything that was written for it, and nothing else."""

import re

import pytest
from typer import main as typer_main

from dragoman.cli import main as dragoman

COMMANDS = [
    command.name or command.callback.__name__.replace("_", "-")
    for group in dragoman.app.registered_groups
    for command in group.typer_instance.registered_commands
] + [
    several.typer_instance.info.name
    for group in dragoman.app.registered_groups
    for several in group.typer_instance.registered_groups
]
PANELS = ["Call a server", "Serve", "Train and export", "Measure"]
# Of Unicode, where emoji are.
EMOJI = re.compile("[\u2600-\u27bf\U0001f000-\U0001faff]")


def words(text: str) -> str:
    """Text without the frames of a table and the places where lines break."""
    return " ".join(re.sub(r"[\u2500-\u257f]", " ", text).split())


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")


def test_without_arguments_the_commands_are_listed_by_what_they_are_for(run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    places = [out.index(f" {panel} ") for panel in PANELS]
    assert places == sorted(places)
    assert len(COMMANDS) == len(set(COMMANDS)) > 10
    for command in COMMANDS:
        assert f" {command} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_h_is_help_and_exits_well(run, command: str) -> None:
    short, long = run(command, "-h"), run(command, "--help")
    assert short == long
    assert short[0] == 0 and short[2] == "" and f"Usage: dragoman {command}" in short[1]


def test_h_after_other_arguments_is_help_too(run) -> None:
    assert run("-h")[0] == 0
    for command in ("serve --models x -h", "translate hello -h", "load --rate 1 -h"):
        code, out, _ = run(*command.split())
        assert code == 0 and "Usage: dragoman" in out


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"load", "load-compare"}))
def test_help_is_printed_as_it_is_written(run, wide, command: str) -> None:
    """Rich would take `:A:` for an emoji and `[x]` for a style."""
    described = typer_main.get_command(dragoman.app).commands[command]
    out = words(run(command, "--help")[1])
    assert not EMOJI.search(out)
    assert words(described.help.split("\n\n")[0]) in out
    for parameter in described.params:
        assert words(getattr(parameter, "help", None) or "") in out, parameter.name
