"""Wrong arguments of `dragoman export` are named in one line, before anything is written."""

import json
from pathlib import Path

import pytest

INT8, SHORT = "--precision int8", "--shortlist {folder}/two.txt"
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
}
OPTIONS = {
    "--precision int9": "precision must be fp32 or int8 or fp16 or bf16, not 'int9'",
    "--name a/b": "name must be letters",
    "--calibration {folder}/text.txt": "texts for calibration go with int8",
    f"{INT8} --calibration {{folder}}/empty.txt": "empty.txt: the file is empty",
    f"{INT8} --calibration {{folder}}/latin.txt": "latin.txt, line 1: not UTF-8",
    f"{INT8} --calibration {{folder}}/full": "full: Is a directory",
    f"{INT8} --quality-source {{folder}}/text.txt": "go together",
    "--quality-source {folder}/text.txt --quality-reference {folder}/two.txt": "texts for quality go with",
    f"{INT8} --weight-bits 6": "weights of int8 have 7 or 8 bits, not 6",
    "--weight-bits 7": "weights of 7 bits go with int8, not fp32",
    f"{INT8} --cache-precision fp16": "the precision of caches can be int8, not 'fp16'",
    "--precision fp16 --cache-precision int8": "caches in int8 go with int8, not fp16",
    "--shortlist-size 5": "--shortlist-size goes with --shortlist",
    f"{SHORT} --shortlist-size 0": "keeps at least 1 token of its text, not 0",
    f"{SHORT} --shortlist {{folder}}/nowhere": "nowhere: ",
    "--shortlist {folder}/empty.txt": "empty.txt: the file is empty",
}
CASES |= {f"{{checkpoint}} {{folder}}/out {options}": reason for options, reason in OPTIONS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("arguments")
    (folder / "full").mkdir()
    texts = {
        "full/letter.txt": "mine",
        "empty.txt": "",
        "text.txt": "a dog\n",
        "two.txt": "ein Hund\nzwei\n",
        "latin.txt": "caf\xe9\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="latin-1")
    config = (checkpoint_dir / "config.json").read_text()
    for name, content in {"broken": "{", "list": "[]", "unknown": json.dumps({"model": {"depth": 3}}), "half": config}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(content)
        for path in checkpoint_dir.iterdir():
            if name != "half" and path.name != "config.json":
                (folder / name / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_wrong_argument_is_named_in_one_line(run_command, folder, checkpoint_dir, case: str) -> None:
    code, out, error = run_command("export", *case.format(folder=folder, checkpoint=checkpoint_dir).split())
    assert CASES[case] in error and (code, out) == (2, "")
    assert error.startswith("dragoman: ") and error.count("\n") == 1 and not (folder / "out").exists()
