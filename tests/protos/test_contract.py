"""The contract stands alone, its stubs are its own, and nothing that was released is taken back."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from dragoman.server.protocols.http.openapi import read_comments

pytest.importorskip("grpc_tools", reason="needs grpcio-tools")

ROOT = Path(__file__).resolve().parents[2]
FILE = "dragoman/v1/generation.proto"
RELEASED = Path(__file__).parent / "released/generation.proto"


def protoc(empty: Path, include: Path, *arguments: str) -> None:
    """Run protoc in an empty directory, with one folder to read from."""
    assert not list(empty.iterdir())
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={include}", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def described(folder: Path, include: Path, name: str = FILE) -> FileDescriptorProto:
    folder.mkdir()
    protoc(folder, include, "--descriptor_set_out=out", name)
    [file] = FileDescriptorSet.FromString((folder / "out").read_bytes()).file
    return file


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorProto:
    """The contract as it is."""
    return described(tmp_path_factory.mktemp("contract") / "empty", ROOT / "protos")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorProto:
    """The contract as it was last released."""
    return described(tmp_path_factory.mktemp("released") / "empty", RELEASED.parent, RELEASED.name)


def test_compiles_from_an_empty_directory_with_its_folder_alone(contract: FileDescriptorProto, tmp_path: Path) -> None:
    (tmp_path / "stubs").mkdir()
    protoc(tmp_path / "stubs", ROOT / "protos", "--python_out=.", "--grpc_python_out=.", FILE)
    assert {path.name for path in tmp_path.rglob("*.py")} == {"generation_pb2.py", "generation_pb2_grpc.py"}
    assert list(contract.dependency) == ["google/protobuf/any.proto"]  # which protoc brings
    admin = described(tmp_path / "admin", ROOT / "protos", "dragoman/v1/repository.proto")
    assert list(admin.dependency) == [] and [service.name for service in admin.service] == ["Repository"]


@pytest.mark.parametrize("name", [FILE, "dragoman/v1/repository.proto"])
def test_comments_in_the_openapi_document_are_those_that_protoc_finds(name: str, tmp_path: Path) -> None:
    protoc(tmp_path, ROOT / "protos", "--include_source_info", "--descriptor_set_out=out", name)
    [file] = FileDescriptorSet.FromString((tmp_path / "out").read_bytes()).file
    places = [place for place in file.source_code_info.location if list(place.path[:1]) != [3]]  # but for imports
    expected = [" ".join(place.leading_comments.split()) for place in places if place.leading_comments]
    found = read_comments((ROOT / "protos" / name).read_text(encoding="utf-8")).values()
    assert sorted(" ".join(comment.split()) for comment in found if comment) == sorted(expected)


def test_the_package_is_an_include_path_too(contract: FileDescriptorProto, tmp_path: Path) -> None:
    """As docs/call.md prints it, in a checkout and in an installed wheel."""
    documentation = (ROOT / "docs/call.md").read_text(encoding="utf-8")
    [line] = [line for line in documentation.splitlines() if "dragoman.__file__" in line]
    program = line.partition("python -c '")[2].rpartition("'")[0]
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert described(tmp_path / "empty", Path(printed.strip())) == contract


def test_the_example_for_node_is_the_program_that_is_tested_with_pinned_packages() -> None:
    [example] = re.findall(r"```js\n(.*?)```", (ROOT / "docs/call.md").read_text(encoding="utf-8"), re.DOTALL)
    folder = ROOT / "tests/protos/node"
    program = (folder / "client.js").read_text(encoding="utf-8")
    start, end = example.index("const grpc"), example.index("// The Error of a failed call")
    assert example[start:end].rstrip() in program and example[end:].rstrip() in program and start == 0
    package, lock = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("package.json", "package-lock.json"))
    assert lock["packages"][""]["dependencies"] == package["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in package["dependencies"].values())
    for name, entry in lock["packages"].items():
        assert not name or entry["integrity"].startswith("sha512-")
        assert "resolved" not in entry  # any registry will do


def generate(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(root / "protos/generate.sh"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_stubs_are_up_to_date_until_the_contract_changes(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    for package in ("v1", "inference"):
        folder = f"dragoman/{package}"
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert generate(ROOT, "--check").returncode == 0, "run: make protos"
    path = tmp_path / "protos" / FILE
    path.write_text(path.read_text().replace("string domain = 12;", "string domain = 12; string more = 99;"))
    checked = generate(tmp_path, "--check")
    assert checked.returncode == 1 and "stubs are out of date" in checked.stderr
    assert generate(tmp_path).returncode == 0 and generate(tmp_path, "--check").returncode == 0
    assert "more" in (tmp_path / "dragoman/v1/generation_pb2.pyi").read_text()


def promises(scope: str, thing: Any) -> Iterator[tuple[str, object]]:
    """Yield everything that callers rely on in a file or a message, by its name.

    Names count as numbers do: JSON, text and generated code use them. `optional` is yielded apart, as a field may become so:
    callers that know it as always present read and write the same bytes.
    """
    is_file = isinstance(thing, FileDescriptorProto)
    for message in thing.message_type if is_file else thing.nested_type:
        yield from promises(f"{scope}.{message.name}", message)
        yield f"{scope}.{message.name}", "message"
    for enum in thing.enum_type:
        yield from ((f"{scope}.{enum.name}.{value.name}", value.number) for value in enum.value)
        yield from ((f"{scope}.{enum.name}: reserved {span.start}", span.end) for span in enum.reserved_range)
    if is_file:
        yield f"{scope}: syntax", thing.syntax
        for service in thing.service:
            for method in service.method:
                types = (method.input_type, method.output_type, method.client_streaming, method.server_streaming)
                yield f"{scope}.{service.name}.{method.name}", types
        return
    yield from ((f"{scope}: reserved {span.start}", span.end) for span in thing.reserved_range)
    yield from ((f"{scope}: reserved {name}", True) for name in thing.reserved_name)
    for field in thing.field:
        oneof = thing.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") and not field.proto3_optional else None
        kind = (field.name, field.json_name, field.type, field.type_name, field.label, field.default_value, oneof)
        yield f"{scope}.{field.number}", kind
        if field.proto3_optional:
            yield f"{scope}.{field.number}: optional", True


def broken(old: FileDescriptorProto, new: FileDescriptorProto) -> set[str]:
    """Return the promises of an old contract that a new one does not keep."""
    kept = dict(promises(new.package, new))
    return {name for name, promise in promises(old.package, old) if kept.get(name) != promise}


def test_nothing_released_is_taken_back(released: FileDescriptorProto, contract: FileDescriptorProto) -> None:
    """A release puts a copy of the contract in the place of `released/generation.proto`; nothing else ever changes that file."""
    assert broken(released, contract) == set()
