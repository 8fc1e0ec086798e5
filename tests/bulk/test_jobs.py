"""`dragoman bulk`: jobs that are killed, continued and changed, on folders, object stores and a Ray cluster."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dragoman.bulk.storage import Folder, find_inputs
from dragoman.model.errors import InputError
from tests.bulk.conftest import Parallel
from tests.examples import num_examples
from tests.server.stores.conftest import BUCKET, S3, s3, s3_server  # noqa: F401

Bulk = Callable[..., tuple[int, str, str]]
NUM_ROWS = 150


@pytest.fixture
def corpus(tmp_path: Path, parallel: Parallel) -> Path:
    """A file of text, whose lines are all different."""
    path = tmp_path / "in" / "corpus.txt"
    path.parent.mkdir()
    path.write_text("".join(f"{parallel.sources[i % 25]} {i}.\n" for i in range(NUM_ROWS)))
    return path


def outputs(folder: Path) -> dict[str, bytes]:
    """Return the outputs and manifests of a job."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(("summary.", "."))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_files_of_a_folder_are_translated(bulk: Bulk, parallel: Parallel, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    (folder / "deep").mkdir(parents=True)
    (folder / "-\u3000%\n.txt").touch()
    (folder / "a.txt").write_text("\n".join([*parallel.sources, "", "dog " * 600]))
    (folder / "deep/b.jsonl").write_text("".join(json.dumps({"en": source}) + "\n" for source in parallel.sources))
    pq.write_table(pa.table({"en": parallel.sources, "id": range(25)}), folder / "c.parquet")
    (folder / "notes.doc").write_bytes(b"\0")
    columns = ["--column", "en", "--translation-column", "de"]
    code, printed, errors = bulk(folder, "--output", out, *columns, "--rows-per-shard", 10, "--price-per-hour", 2)
    assert code == 0, errors
    assert "77 rows in 10 shards, 2 with an error" in printed and "a million rows" in printed
    lines = "".join(path.read_text() for path in sorted((out / "a.txt").glob("*.txt"))).split("\n")
    assert lines == [*parallel.targets, "", "", ""]
    rows = [json.loads(line) for path in sorted((out / "deep/b.jsonl").glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert [row["de"] for row in rows] == parallel.targets and [row["en"] for row in rows] == parallel.sources
    table = pq.read_table(sorted((out / "c.parquet").glob("*.parquet")))
    assert table["de"].to_pylist() == parallel.targets and table["id"].to_pylist() == list(range(25))
    found = summary(out)
    assert found["rows"] == 77 and found["rows_with_errors"] == 2 and found["cost_per_million"] > 0
    assert found["errors"][0] == "a.txt, row 26: text: is blank" and "row 27" in found["errors"][1]
    assert "row 26" in (out / "summary.html").read_text()


def test_killed_jobs_go_on_where_they_stopped(
    bulk: Bulk, command: Callable[..., subprocess.Popen[str]], corpus: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = ["--rows-per-shard", 10, "--num-beams", 2, "--max-slots", 4]  # so that it takes longer than until a kill
    assert bulk(corpus, "--output", whole, *options)[0] == 0
    chosen = random.Random(0)
    num_kills = num_examples(3, of=20)
    for number in range(num_kills):
        if number == num_kills // 2:
            shutil.rmtree(out, ignore_errors=True)
        before = outputs(out)
        process = command(corpus, "--output", out, *options)
        while len(outputs(out)) == len(before) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chosen.uniform(0, 0.3))
        process.kill()
        process.communicate()
        assert before.items() <= outputs(out).items(), "what was done stays"
        assert all(whole_file == outputs(whole)[name] for name, whole_file in outputs(out).items()), "no half of a file"
    num_done = sum(name.endswith(".json") for name in outputs(out))
    code, printed, _ = bulk(corpus, "--output", out, *options)
    assert code == 0 and outputs(out) == outputs(whole)
    assert summary(out)["shards_kept"] == num_done and f"{summary(out)['rows_kept']:,} rows were done before" in printed


def test_engines_that_are_killed_are_replaced(
    bulk: Bulk, command: Callable[..., subprocess.Popen[str]], corpus: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert bulk(corpus, "--output", whole, "--rows-per-shard", 30)[0] == 0
    process = command(corpus, "--output", out, "--rows-per-shard", 30)

    def engines() -> list[int]:
        listed = subprocess.run(["ps", "-ww", "--ppid", str(process.pid), "-o", "pid,args"], capture_output=True, text=True).stdout
        return [int(line.split()[0]) for line in listed.splitlines() if "spawn_main" in line]

    until(engines)
    os.kill(engines()[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert outputs(out) == outputs(whole)


def test_changes_are_noticed(bulk: Bulk, corpus: Path, tmp_path: Path, shipped_bundle: Callable[..., Path]) -> None:
    out = tmp_path / "out"
    options = [corpus, "--output", out, "--rows-per-shard", 50]
    assert bulk(*options)[0] == 0
    first = outputs(out)
    lines = corpus.read_text().splitlines(keepends=True)
    corpus.write_text("".join([*lines[:60], "Two dogs.\n", *lines[61:100]]))
    assert bulk(*options)[0] == 0
    found = summary(out)
    assert (found["shards_kept"], found["remade"], found["removed"]) == (1, {"changed input": 1}, 1)
    assert len(outputs(out)) == 4 and outputs(out)["corpus.txt/part-000000.txt"] == first["corpus.txt/part-000000.txt"]
    (out / "corpus.txt/part-000001.txt").write_bytes(b"half")
    assert bulk(*options)[0] == 0 and summary(out)["remade"] == {"damaged output": 1}
    assert bulk(*options, "--max-new-tokens", 3)[0] == 0 and summary(out)["remade"] == {"changed options": 2}
    assert bulk(*options, "--max-new-tokens", 3, "--model", shipped_bundle("en-fr"))[0] == 0
    assert summary(out)["remade"] == {"changed bundle": 2}
    (tmp_path / "other.txt").write_text("A dog.\n")
    assert bulk(tmp_path / "other.txt", "--output", out)[0] == 0
    assert summary(out)["foreign"] == 4 and len(outputs(out)) == 6, "outputs of other jobs stay"


def test_a_changed_glossary_is_noticed(bulk: Bulk, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("A dog runs through the snow.\n")
    options = [tmp_path / "in.txt", "--output", tmp_path / "out", "--glossaries", tmp_path, "--glossary", "animals"]
    for target in ("Dackel", "Hund"):
        (tmp_path / "animals.tsv").write_text(f"dog\t{target}\n")
        assert bulk(*options)[0] == 0
        assert target in (tmp_path / "out/in.txt/part-000000.txt").read_text()
    assert summary(tmp_path / "out")["remade"] == {"changed options": 1}


def test_manifests_of_outputs_that_are_replaced_go_first(bulk: Bulk, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert bulk(corpus, "--output", out)[0] == 0
    output = out / "corpus.txt/part-000000.txt"
    output.unlink()
    output.mkdir()  # the job stops between its output and the manifest
    code, _, errors = bulk(corpus, "--output", out, "--max-new-tokens", 3)
    assert code == 2 and "Is a directory" in errors and list(outputs(out)) == []


def test_one_job_at_a_time_writes_to_a_folder(bulk: Bulk, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    left = out / "corpus.txt/.part-000000.txt.1.dragoman-partial"
    left.parent.mkdir(parents=True)
    left.touch()
    with Folder(str(out)).locked():
        code, _, errors = bulk(corpus, "--output", out)
    assert code == 2 and "another job is writing there" in errors
    left.touch()
    assert bulk(corpus, "--output", out)[0] == 0 and not left.exists() and summary(out)["foreign"] == 0


def test_jobs_end_at_once_when_they_are_interrupted(command: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("A dog runs through the snow.\n" * 100_000)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = command(tmp_path / "in.txt", "--output", tmp_path / "out", "--rows-per-shard", 10, "--no-cache")
        until(lambda: outputs(tmp_path / "out"))
        os.kill(process.pid, number)
        assert process.communicate(timeout=20) == ("", "") and process.returncode == code
        shutil.rmtree(tmp_path / "out/in.txt")


def test_outputs_that_cannot_be_written_stop_the_job(
    command: Callable[..., subprocess.Popen[str]], bulk: Bulk, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = [corpus, "--output", out, "--rows-per-shard", 75]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # as a full disk
    try:
        process = command(*options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith(f"dragoman: {out}/corpus.txt/part-") and "File too large" in errors
    assert not [path for path in out.rglob("*") if path.is_file()], "nothing half"
    assert bulk(*options)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["none.txt"], "none.txt: there is no such file"),
        (["*.tsv"], "*.tsv: there is no such file"),
        (["https://example.org/a.txt"], "files are read from folders, and from s3, gs, az://"),
        (["in/corpus.txt", "--sample"], "--seed: is missing"),
        (["in/corpus.txt", "--num-beams", 1000], "--num-beams: 1000 is not in"),
        (["in/corpus.txt", "--num-gpus", 1], "--num-gpus go with --ray"),
        (["in/corpus.txt", "--output", "\udcff"], "is no name in UTF-8"),
        (["bad.csv"], "bad.csv: column text: is not among a"),
        (["bad.gz"], "bad.gz: "),
        (["bad.parquet"], "bad.parquet: "),
        (["in/corpus.txt", "bad.csv", "twin/bad.csv"], "their outputs would both be called bad.csv"),
        (["in/corpus.txt", "--output", "bad.csv"], "bad.csv"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(bulk: Bulk, corpus: Path, tmp_path: Path, arguments: list[Any], reason: str) -> None:
    (tmp_path / "bad.csv").write_text("a\n1\n")
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin/bad.csv").write_text("text\n1\n")
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8b no gzip")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        code, out, errors = bulk(*arguments, *([] if "--output" in arguments else ["--output", "out"]))
    finally:
        os.chdir(before)
    assert (code, out) == (2, "") and reason in errors.splitlines()[-1]


def test_globs_and_folders(tmp_path: Path) -> None:
    for name in ("a.txt", "x/a.txt", "x/y/b.csv", "x/.hidden.txt", "x/_done.txt", "x/c.en", "[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def names(*addresses: str) -> list[str]:
        found = find_inputs([f"{tmp_path}/{each}" for each in addresses], lambda name: "en" not in name, f"{tmp_path}/x/y")
        return [source.name for source in found]

    assert names("x") == ["a.txt"], "the output folder holds no inputs"
    assert names("x/y/b.csv") == ["b.csv"], "but if they are named"
    assert names("x/*") == ["_done.txt", "a.txt", "c.en"]
    assert names("**/*.txt") == ["[1].txt", "a.txt", "x/_done.txt", "x/a.txt"]
    assert names("[1].txt", "x/c.en") == ["[1].txt", "c.en"], "a file of this name is no pattern"
    with pytest.raises(InputError, match="both be called"):
        names("a.txt", "x/a.txt")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / os.fsdecode(b"\xff.txt")).touch()
    for address, reason in {
        "x/y": "is the output folder",
        "pipe": "neither a file nor a folder",
        "\udcff.txt": "cannot have this name",
        "*/../a.txt": "cannot have this name",
        "a" * 300: "too long",
    }.items():
        with pytest.raises(InputError, match=reason):
            names(address)


def test_object_stores(s3: S3, bulk: Bulk, parallel: Parallel) -> None:  # noqa: F811
    s3.client.put_object(Bucket=BUCKET, Key="odd/what? #1 100%20.txt", Body=b"A dog.")
    assert bulk(f"s3://{BUCKET}/odd", "--output", f"s3://{BUCKET}/out")[0] == 0
    for key, content in {
        "in/a.txt": "\n".join(parallel.sources),
        "in/b/c.jsonl": json.dumps({"text": parallel.sources[0]}),
        "in/_temporary": "x",
    }.items():
        s3.client.put_object(Bucket=BUCKET, Key=key, Body=content.encode())
    options = [f"s3://{BUCKET}/in", f"s3://{BUCKET}/in/*.txt", "--output", f"s3://{BUCKET}/out", "--rows-per-shard", 10]
    for kept in (0, 4):
        code, _, errors = bulk(*options)
        assert code == 0, errors

        def read(key: str) -> bytes:
            content: bytes = s3.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            return content

        assert b"".join(read(f"out/a.txt/part-00000{n}.txt") for n in range(3)).decode().splitlines() == parallel.targets
        assert json.loads(read("out/b/c.jsonl/part-000000.jsonl"))["translation"] == parallel.targets[0]
        assert json.loads(read("out/summary.json"))["shards_kept"] == kept
    code, _, errors = bulk(f"s3://{BUCKET}/none", "--output", f"s3://{BUCKET}/out")
    assert code == 2 and "there is no such file" in errors


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes of one CPU each, on this machine."""
    pytest.importorskip("ray.data", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def test_clusters_give_the_same_files(
    cluster: Any, bulk: Bulk, command: Callable[..., subprocess.Popen[str]], corpus: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = ["--rows-per-shard", 15, "--num-threads", 1]
    assert bulk(corpus, "--output", whole, *options)[0] == 0
    process = command(corpus, "--output", out, *options, "--ray", cluster.address)
    until(lambda: len(outputs(out)) > 4 or process.poll() is not None, 600)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    cluster.add_node(num_cpus=1)
    _, errors = process.communicate(timeout=600)  # several starts of Python
    assert process.returncode == 0, errors
    assert outputs(out) == outputs(whole) and summary(out)["rows"] == NUM_ROWS, "none lost, none twice"
    code, _, errors = bulk(corpus, "--output", out, *options, "--ray", cluster.address, "--num-beams", 1000)
    assert code == 2 and "--num-beams" in errors.splitlines()[-1]
