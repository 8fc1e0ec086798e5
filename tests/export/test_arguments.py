"""Wrong arguments of `dragoman export` are named in one line before anything slow is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Runs the command line with each list of arguments, in a Python that cannot import what takes seconds.
PROGRAM = """
import contextlib, io, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript"):
            raise AssertionError(f"{name} was imported before the arguments were checked")

sys.meta_path.insert(0, Blocker())
from dragoman.cli.main import main
results = []
for arguments in json.load(sys.stdin):
    sys.argv[1:] = ["export", *arguments]
    out, error, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as end:
            code = end.code
        except AssertionError as failure:
            print(failure, file=sys.stderr)
    results.append((code, out.getvalue(), error.getvalue()))
json.dump(results, sys.stdout)
"""
TO = "{checkpoint} {folder}/out "
CASES = {
    "{folder}/nowhere {folder}/out": "nowhere/config.json: No such file",
    "{folder}/text.txt {folder}/out": "text.txt/config.json: Not a directory",
    "{folder}/half {folder}/out": "half/tokenizer.json: no such file",
    "{folder}/broken {folder}/out": "broken/config.json: not JSON",
    "{folder}/list {folder}/out": "list/config.json: not a checkpoint of format version",
    "{folder}/unknown {folder}/out": "unknown/config.json: ",
    "{checkpoint} {folder}/full": "full: exists and is not empty",
    "{checkpoint} {folder}/full --force": "full: exists and is not a bundle",
    "{checkpoint} {folder}/text.txt": "text.txt: exists and is not a directory",
    "{checkpoint} {folder}/text.txt/deeper/out": "text.txt: exists and is not a directory",
    f"{TO} --precision int9": "precision must be fp32 or int8 or fp16 or bf16, not 'int9'",
    f"{TO} --name a/b": "name must be letters",
    f"{TO} --calibration {{folder}}/text.txt": "texts for calibration go with int8",
    f"{TO} --precision int8 --calibration {{folder}}/empty.txt": "empty.txt: the file is empty",
    f"{TO} --precision int8 --calibration {{folder}}/latin.txt": "latin.txt, line 1: not UTF-8",
    f"{TO} --precision int8 --calibration {{folder}}/full": "full: Is a directory",
    f"{TO} --precision int8 --quality-source {{folder}}/text.txt": "go together",
    f"{TO} --quality-source {{folder}}/text.txt --quality-reference {{folder}}/two.txt": "texts for quality go with",
    f"{TO} --precision int8 --weight-bits 6": "weights of int8 have 7 or 8 bits, not 6",
    f"{TO} --weight-bits 7": "weights of 7 bits go with int8, not fp32",
    f"{TO} --precision int8 --cache-precision fp16": "the precision of caches can be int8, not 'fp16'",
    f"{TO} --precision fp16 --cache-precision int8": "caches in int8 go with int8, not fp16",
    f"{TO} --shortlist-size 5": "--shortlist-size goes with --shortlist",
    f"{TO} --shortlist {{folder}}/two.txt --shortlist-size 0": "keeps at least 1 token of its text, not 0",
    f"{TO} --shortlist {{folder}}/two.txt --shortlist {{folder}}/nowhere": "nowhere: ",
    f"{TO} --shortlist {{folder}}/empty.txt": "empty.txt: the file is empty",
    TO: "was imported before the arguments were checked",  # sound ones go on to what is blocked
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, checkpoint_dir: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("arguments")
    (folder / "full").mkdir()
    texts = {"full/letter.txt": "mine", "empty.txt": "", "text.txt": "a dog\n", "two.txt": "ein Hund\nzwei\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    for name, config in {"broken": "{", "list": "[]", "unknown": json.dumps({"model": {"depth": 3}}), "half": ""}.items():
        (folder / name).mkdir()
        if config:
            for path in checkpoint_dir.iterdir():
                (folder / name / path.name).symlink_to(path)
            (folder / name / "config.json").unlink()
            (folder / name / "config.json").write_text(config)
    (folder / "half/config.json").symlink_to(checkpoint_dir / "config.json")
    lists = [[part.format(folder=folder, checkpoint=checkpoint_dir) for part in case.split()] for case in CASES]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(lists),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not (folder / "out").exists()
    return dict(zip(CASES, json.loads(found.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_wrong_argument_is_named_in_one_line_before_torch_is_loaded(results: dict[str, Any], case: str) -> None:
    code, out, error = results[case]
    assert CASES[case] in error and out == ""
    assert case == TO or (code == 2 and error.startswith("dragoman: ") and error.count("\n") == 1)
