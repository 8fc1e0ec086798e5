"""The commands of docs/load-testing.md, taken from the page and read by the real command line."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.cli import main as dragoman
from dragoman.load import compare_command
from dragoman.load.plan import Plan
from dragoman.load.result import write_result
from dragoman.load.session import Session, SessionOptions

PAGE = Path(__file__).resolve().parents[2] / "docs/load-testing.md"


def commands() -> list[str]:
    """Return every command of the page."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_page_has_its_commands() -> None:
    assert len([command for command in commands() if command.startswith("dragoman load ")]) >= 6
    assert commands()[0].startswith("dragoman load ")


@pytest.fixture
def performed(monkeypatch) -> list[tuple[Plan, SessionOptions]]:
    """Have runs be noted instead of made."""
    noted = []

    def perform(self, out) -> int:
        noted.append((self._plan, self._options))
        return 0

    monkeypatch.setattr(Session, "perform", perform)
    return noted


def test_every_command_is_understood_one_after_another(performed, make_result, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("before.json", "after.json"):
        write_result(Path(name), make_result([[0.1] * 5] * 20))
    num_runs = 0
    for command in commands():
        words = shlex.split(command, comments=True)
        if words[0] != "dragoman":
            subprocess.run(["bash", "-c", command], check=True)
            continue
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            dragoman.main()
        assert not ended.value.code, (command, capsys.readouterr().err)
        num_runs += words[1] == "load"
    assert len(performed) == num_runs
    for plan, options in performed:
        plan.check()
        assert plan.work.model and options.is_probed  # `make serve` has several models
    assert (tmp_path / "difference.html").exists()


@pytest.mark.parametrize("name", ["load", "load-compare"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_shown_as_it_was_written(name: str, flag: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["dragoman", name, flag])
    with pytest.raises(SystemExit) as ended:
        dragoman.main()
    assert not ended.value.code
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert shown.isascii() or not re.findall(r"[^\x00-\x7f─-╿…]", shown)  # frames, but no pictures
    if name == "load":
        for text in ("uniform:A:B, normal:M:D or lognormal:M:D", "e2e=500ms,ttft=100ms,itl=20ms", "[default: uniform:5:25]"):
            assert text in shown, text


def test_markup_in_help_is_text(capsys) -> None:
    import typer

    from dragoman.load.plain_help import PlainCommand

    app = typer.Typer(add_completion=False)
    written = "A:B: [x] [/x] [red]a[/red] :smile: \\[b] end\\"

    @app.command(cls=PlainCommand, help=f"Of all: {written}")
    def command(option: str = typer.Option("", help=written)) -> None: ...

    app(["--help"], standalone_mode=False)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = shown.replace("│", " ")
    assert " ".join(lines.split()).count("A:B: [x] [/x] [red]a[/red] :smile: \\[b] end\\") == 2


def test_comparisons_have_units(make_result, tmp_path, capsys) -> None:
    result = make_result([[0.1] * 5] * 20)
    compare_command.print_comparison(compare_command.compare(result, result), sys.stdout)
    assert "e2e p50 (ms)" in capsys.readouterr().out
