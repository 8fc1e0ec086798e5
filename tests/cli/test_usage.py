"""Commands that cannot be carried out: one line on standard error that names the reason, and exit code 2, before the work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.cli import main as dragoman
from tests.cli.conftest import ROOT, assert_refused, environment

SCORE = "score --source %/two --target"
EVALUATE = "evaluate --source %/two --reference %/two"
AUGMENT = "augment --source %/two --target %/more --source-language en --output-source %/out --output-target %/out2"
TRAIN = "train %/small.toml --output"
IMPORT = "import %/checkpoint %/out"
IMPORT_INT8 = f"{IMPORT} --export %/b --precision int8"
EXPORT = f"export {ROOT}/model/pretrained/en-de"
EXPORT_INT8, SHORT = f"{EXPORT} %/out --precision int8", f"{EXPORT} %/out --shortlist %/two"
# Commands, with % for the folder of the fixture `files`, and a text that their line of error has.
WRONG = {
    "models here there": "here",
    "translate --loud hello": "--loud",
    "translate hello --model": "--model",
    "translate --timeout inf hello": "--timeout",
    "translate --server= hello": "--server",
    "translate --token=ä hello": "--token",
    "translate --ca %/nowhere hello": "nowhere",
    "translate --ca %/two hello": "%/two",
    "translate --stream --json hello": "--json",
    "translate --stream --num-beams 4 --num-return-sequences 2 hello | translate --stream --scores hello": "--stream",
    "translate --log-probs hello | translate --top-log-probs 3 hello | translate --scores --json hello": "--json",
    "translate --stream --in %/two --out %/out | translate --stream --in %/two --out -": "--stream",
    "translate --resume --in %/two --out -": "--resume",
    "translate --out %/out hello": "--in",
    "translate --in %/two --out %/out hello": "not both",
    "translate --resume hello": "--resume",
    "translate --in %/folder --out %/out | translate --in %/two --out %/folder": "%/folder",
    "translate --in %/latin1 --out %/out": "%/latin1, line 2: not UTF-8: ",
    "translate --in %/two --out %/nowhere/out": "%/nowhere/out: No such file",
    "models --ca %/two --key %/two": "--key is given without --certificate",
    "health --server-name a.example | health --certificate a --key b": "go with --ca",
    "models --wait nan": "--wait: nan is not a number of 0 or more",
    "models --server a load en-de": "--server: stands behind load, if that has it",
    "models load": "MODEL",
    "models list --server=ä:1:2": "--server",
    f"{SCORE} %/one": "%/two has 2 lines but %/one has 1",
    f"{SCORE} %/nowhere": "%/nowhere",
    f"{SCORE} %/two --alignment-layer 1": "--alignment-layer",
    "score --source %/blank --target %/two": "%/blank, line 2",
    EVALUATE: "exactly one",
    f"{EVALUATE} --bundle % --checkpoint %": "exactly one",
    f"{EVALUATE} --bundle % --length-penalty 2 | {EVALUATE} --bundle % --num-beams 1 --length-penalty 2": "--num-beams",
    f"{EVALUATE} --server a --num-beams 1 --length-penalty 2": "--length-penalty goes with --num-beams above 1",
    f"{EVALUATE} --bundle %/bundle --model en-de": "--model",
    f"{EVALUATE} --bundle %/bundle --certificate %/two": "--certificate goes with --server",
    f"{EVALUATE} --checkpoint % --from de": "--from goes with --server or --bundle",
    f"{EVALUATE} --checkpoint %/nowhere": "%/nowhere/config.json",
    f"{EVALUATE} --bundle %/bundle": "bundle.json",
    "evaluate --source %/two --reference %/one --bundle %/bundle": "2 lines",
    "evaluate --source %/two --reference %/blank --bundle %/bundle": "%/blank, line 2",
    "perplexity --target %/two": "give exactly one of --checkpoint and --server",
    "perplexity --target %/two --checkpoint a --model x": "--model goes with --server",
    "perplexity --target %/blank --checkpoint a": "blank, line 2: ",
    "perplexity --target %/two --checkpoint a --source %/one": "one has 1 lines but ",
    "attention a --output %/out": "a name that ends in .html or .png says what to write",
    "attention a --output %/out.html --kind encoder": "--kind encoder: a server tells of cross attention alone",
    "attention a b --output %/out.html --max-new-tokens 3": "--max-new-tokens goes without a target",
    "attention \udcff --output %/out.html": "source: is not UTF-8",
    "attention a --output %/out.html --checkpoint x --model m": "--model goes with a server, not with --checkpoint",
    "attention a --output %/out.png --checkpoint %/nowhere": "nowhere/config.json",
    f"{AUGMENT} --target-language fi": "'fi'",
    f"{AUGMENT} --target-language de --aligner %/nowhere": "%/nowhere",
    f"{AUGMENT} --target-language de --output-target %/two": "four files",
    f"{AUGMENT} --target-language de --output-target %/folder": "%/folder: is a directory",
    "average %/nowhere --output %/out": "%/nowhere",
    "average %/damaged --output %/out": "%/damaged/config.json",
    "add-tokens %/bundle %/two --output %/model --vocab-size 300": "%/model: there is a checkpoint already; --force",
    "add-tokens %/nowhere %/two --output %/out --vocab-size 300 | export %/nowhere %/out": "%/nowhere",
    "export %/checkpoint %/out": "config.json",
    "export %/two %/out": "%/two/config.json: Not a directory",
    f"{EXPORT} %/model": "%/model: exists and is not empty",
    f"{EXPORT} %/model --force": "%/model: exists and is not a bundle",
    f"{EXPORT} %/two | {EXPORT} %/two --force | {EXPORT} %/two/deeper/out": "%/two: exists and is not a directory",
    f"{EXPORT} %/dangling": "%/dangling: exists and is not a directory",
    f"{EXPORT} %/out --precision int9": "precision must be fp32 or int8 or fp16 or bf16, not 'int9'",
    f"{EXPORT} %/out --name a/b": "name must be letters",
    f"{EXPORT} %/out --calibration %/two": "texts for calibration go with int8",
    f"{EXPORT_INT8} --calibration %/empty | {EXPORT} %/out --shortlist %/empty": "%/empty: the file is empty",
    f"{EXPORT_INT8} --calibration %/latin1": "%/latin1, line 2: not UTF-8",
    f"{EXPORT_INT8} --calibration %/folder": "%/folder: Is a directory",
    f"{EXPORT} %/out --quality-source %/two": "go together",
    f"{EXPORT} %/out --quality-source %/two --quality-reference %/more": "texts for quality go with",
    f"{EXPORT_INT8} --cache-precision fp16": "the precision of caches can be int8 or fp32, not 'fp16'",
    f"{EXPORT} %/out --precision fp16 --cache-precision int8": "caches in int8 go with int8, not fp16",
    f"{EXPORT} %/out --shortlist-size 5": "--shortlist-size goes with --shortlist",
    f"{SHORT} --shortlist-size 0": "keeps at least 1 token of its text, not 0",
    f"{SHORT} --shortlist %/nowhere": "%/nowhere: ",
    f"{EXPORT} %/out --target-language fr": "--target-language: the model has no 'fr'; it has de",
    "train": "dragoman train --example",
    "train %/small.toml --example": "--example",
    "train %/two": "%/two",
    "train %/unknown.toml": "training.max_step: unknown setting",
    "train %/lengths.toml": "%/train.en has 27 lines but %/one has 1",
    "train %/small.toml --initial-checkpoint %/nowhere": "%/nowhere/config.json",
    f"{TRAIN} %/two": "%/two: not a directory",
    f"{TRAIN} %/two/out": "%/two is not a directory",
    f"{TRAIN} %/damaged": "no training to resume",
    "serve --models %/folder": "%/folder",
    "serve --models %/bundle": "bundle.json",
    "serve --config %/config.toml": "%/config.toml",
    "serve --models %/bundle --max-slotz 4": "max_slotz",
    "serve --max-slots": "--max-slots: lacks a value",
    "pull s3://a/b %/out --sha256 x": "--sha256: 'x' is not 64 hexadecimal digits",
    "serve --models %/bundle --port 99999 | serve --models %/bundle --port http": "--port",
    f"{IMPORT} --precision int8 | {IMPORT} --cache-precision int8": "go with --export",
    f"{IMPORT} --export %/b --cache-precision int8": "go with int8",
    f"{IMPORT} --export %/b --shortlist-size 9": "goes with --shortlist",
    f"{IMPORT} --export %/b --quality-source x": "go together",
    f"{IMPORT} --export %/out | {IMPORT} --export %/out/bundle | import %/checkpoint %/b/out --export %/b": "a place each",
    f"{IMPORT} --export %": "exists and is not empty",
    f"{IMPORT} --export %/b --shortlist %/none": "none: No such file",
    f"{IMPORT} --export %/b --shortlist %/two --shortlist-size 0": "at least 1 token",
    f"{IMPORT_INT8} --calibration %/none": "none: No such file",
    f"{IMPORT} --name a/b": "name must be",
    f"{IMPORT} --revision main": "--revision is of repositories",
    "nearest %/two %/one --reference %/two --output %/out": "%/one: 1 lines",
    "nearest %/two --reference %/two --output %/folder": "%/folder: is a directory",
    "nearest %/two --reference %/two --output %/nowhere/out": "no directory %/nowhere",
}


CASES = [(command, named) for commands, named in WRONG.items() for command in commands.split(" | ")]
# Runs each command line in turn in one process, in which modules that take seconds to load cannot be imported.
WITHOUT_TORCH = """
import contextlib, io, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnxruntime") or (name == "sacrebleu" and sys.argv[1] == "evaluate"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Blocker())
from dragoman.cli import main

results = []
for arguments in json.load(sys.stdin):
    sys.argv = ["dragoman", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main.main()
        except SystemExit as error:
            code = error.code or 0
        except AssertionError as error:
            code = str(error)
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def test_an_invalid_command_is_named_in_one_line_before_torch_is_loaded(files: Path) -> None:
    before = sorted(path.name for path in files.iterdir())
    commands = [command.replace("%", str(files)).split() for command, _ in (*CASES, (f"{TRAIN} %/out", ""))]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(commands),
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        check=True,
    )
    *results, last = json.loads(ran.stdout)
    for (_, named), result in zip(CASES, results, strict=True):
        assert_refused(tuple(result), named.replace("%", str(files)))
    assert last[0] == "torch is imported"  # where nothing is wrong
    assert sorted(path.name for path in files.iterdir()) == before


def test_a_bug_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only errors of the user, of a file and of a call become a line."""
    for error in (ValueError("bug"), ModuleNotFoundError("bug", name="bug"), TimeoutError("bug")):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(dragoman, "app", fail)
        with pytest.raises(type(error), match="bug"):
            dragoman.main()
