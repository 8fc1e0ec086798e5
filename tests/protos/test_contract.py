"""The contract stands alone, its stubs are its own, and nothing that was released is taken back."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from tests.protos.compatibility import breaks

pytest.importorskip("grpc_tools", reason="needs grpcio-tools")

ROOT = Path(__file__).resolve().parents[2]
FILE = "dragoman/v1/generation.proto"
RELEASED = Path(__file__).parent / "released/generation.proto"


def protoc(empty: Path, include: Path, *arguments: str) -> None:
    """Run protoc in a directory of its own, with one folder to read from and nothing else in sight."""
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


@pytest.fixture(scope="session")
def contract(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorProto:
    """The contract as it is."""
    return described(tmp_path_factory.mktemp("contract") / "empty", ROOT / "protos")


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorProto:
    """The contract as it was last released."""
    return described(tmp_path_factory.mktemp("released") / "empty", RELEASED.parent, RELEASED.name)


def test_compiles_from_an_empty_directory_with_its_folder_alone(tmp_path: Path) -> None:
    protoc(tmp_path, ROOT / "protos", "--python_out=.", "--grpc_python_out=.", FILE)
    assert {path.name for path in tmp_path.rglob("*.py")} == {"generation_pb2.py", "generation_pb2_grpc.py"}


def test_the_admin_service_stands_alone_too(tmp_path: Path) -> None:
    file = described(tmp_path / "empty", ROOT / "protos", "dragoman/v1/repository.proto")
    assert list(file.dependency) == [] and [service.name for service in file.service] == ["Repository"]


def test_imports_nothing_but_what_protoc_brings(contract: FileDescriptorProto) -> None:
    assert list(contract.dependency) == ["google/protobuf/any.proto"]


def test_the_package_is_an_include_path_too(contract: FileDescriptorProto, tmp_path: Path) -> None:
    """As docs/api.md prints it, in a checkout and in an installed wheel."""
    documentation = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    [line] = [line for line in documentation.splitlines() if "dragoman.__file__" in line]
    program = line.partition("python -c '")[2].rpartition("'")[0]
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert described(tmp_path / "empty", Path(printed.strip())) == contract


def test_the_example_for_node_is_the_program_that_is_tested() -> None:
    [example] = re.findall(r"```js\n(.*?)```", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.DOTALL)
    program = (ROOT / "tests/protos/node/client.js").read_text(encoding="utf-8")
    start, end = example.index("const grpc"), example.index("// What a failed call")
    assert example[start:end].rstrip() in program and example[end:].rstrip() in program and start == 0


def test_packages_for_node_are_pinned_and_may_come_from_any_registry() -> None:
    folder = ROOT / "tests/protos/node"
    package, lock = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("package.json", "package-lock.json"))
    assert lock["packages"][""]["dependencies"] == package["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in package["dependencies"].values())
    for name, entry in lock["packages"].items():
        assert not name or entry["integrity"].startswith("sha512-")
        assert "resolved" not in entry


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What `generate.sh` reads and writes, to be changed."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    (tmp_path / "dragoman").mkdir()
    (tmp_path / "server/faces/http").mkdir(parents=True)
    shutil.copytree(ROOT / "dragoman/v1", tmp_path / "dragoman/v1", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def generate(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(root / "protos/generate.sh"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_stubs_are_up_to_date() -> None:
    assert generate(ROOT, "--check").returncode == 0, "run: make protos"


def test_stubs_of_another_contract_are_not_up_to_date_until_generated(copy: Path) -> None:
    path = copy / "protos" / FILE
    path.write_text(path.read_text().replace("string domain = 12;", "string domain = 12; string more = 99;"))
    checked = generate(copy, "--check")
    assert checked.returncode == 1 and "stubs are out of date" in checked.stderr
    assert generate(copy).returncode == 0
    assert generate(copy, "--check").returncode == 0
    assert "more" in (copy / "dragoman/v1/generation_pb2.pyi").read_text()


def test_nothing_released_is_taken_back(released: FileDescriptorProto, contract: FileDescriptorProto) -> None:
    """A release puts a copy of the contract in the place of `released/generation.proto`; nothing else ever changes that file."""
    assert breaks(released, contract) == []


def test_callers_with_the_released_contract_say_what_they_did(released: FileDescriptorProto, contract: FileDescriptorProto) -> None:
    """Fields that became `optional` since are written and read as before; what such a caller leaves out is the model's to say."""
    old, new = (classes(file)["GenerateRequest"] for file in (released, contract))
    said = new.FromString(old(text="a", early_stopping=True, top_k=5).SerializeToString())
    assert (said.early_stopping, said.top_k) == (True, 5)
    assert not (said.HasField("do_sample") or said.HasField("min_new_tokens"))
    read = old.FromString(new(text="a", early_stopping=True, top_k=0, source_language="de").SerializeToString())
    assert (read.text, read.early_stopping, read.top_k, read.do_sample) == ("a", True, 0, False)


def classes(file: FileDescriptorProto) -> dict[str, Any]:
    """Return the classes of a contract's messages by their names."""
    pool = DescriptorPool()
    any_pb2.DESCRIPTOR.CopyToProto(imported := FileDescriptorProto())
    pool.Add(imported)
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in names}


# What follows tests the comparison itself, on this contract with something changed.

Change = Callable[[FileDescriptorProto], object]


def message(file: FileDescriptorProto, name: str) -> Any:
    return next(message for message in file.message_type if message.name == name)


def field(file: FileDescriptorProto, where: str) -> Any:
    """Return a field by `Message.field`."""
    of, _, name = where.partition(".")
    return next(field for field in message(file, of).field if field.name == name)


def method(file: FileDescriptorProto, name: str) -> Any:
    return next(method for method in file.service[0].method if method.name == name)


def add_field(file: FileDescriptorProto, of: str, number: int, name: str = "added", label: int = 1) -> None:
    message(file, of).field.add(name=name, json_name=name, number=number, type=FieldDescriptorProto.TYPE_STRING, label=label)


def make_optional(file: FileDescriptorProto, where: str) -> Any:
    """Do to a field what the word `optional` before it does, and return it: it gets a oneof of its own."""
    of = message(file, where.partition(".")[0])
    made = field(file, where)
    made.proto3_optional, made.oneof_index = True, len(of.oneof_decl)
    of.oneof_decl.add(name=f"_{made.name}")
    return made


def changed(contract: FileDescriptorProto, change: Change) -> FileDescriptorProto:
    copy = FileDescriptorProto()
    copy.CopyFrom(contract)
    change(copy)
    assert copy != contract
    return copy


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: setattr(f, "package", "dragoman.v2"), "package dragoman.v1 became dragoman.v2"),
        (lambda f: setattr(f, "syntax", "proto2"), "syntax proto3 became proto2"),
        (lambda f: f.message_type.remove(message(f, "Usage")), "dragoman.v1.Usage: removed"),
        (lambda f: setattr(message(f, "Usage"), "name", "Use"), "dragoman.v1.Usage: removed"),
        (lambda f: message(f, "Model").field.remove(field(f, "Model.device")), "dragoman.v1.Model.device = 5: removed"),
        (lambda f: setattr(field(f, "Model.device"), "number", 99), "dragoman.v1.Model.device = 5: removed"),
        (lambda f: setattr(field(f, "Model.device"), "name", "place"), "dragoman.v1.Model.device = 5: name device became place"),
        (lambda f: setattr(field(f, "Model.device"), "json_name", "d"), "dragoman.v1.Model.device = 5: json_name device became d"),
        (
            lambda f: setattr(field(f, "Model.max_slots"), "type", FieldDescriptorProto.TYPE_UINT64),
            "dragoman.v1.Model.max_slots = 9: type uint32 became uint64",
        ),
        (
            lambda f: setattr(field(f, "GenerateResponse.usage"), "type_name", ".dragoman.v1.Timings"),
            "dragoman.v1.GenerateResponse.usage = 8: type_name .dragoman.v1.Usage became .dragoman.v1.Timings",
        ),
        (
            lambda f: setattr(field(f, "Answer.text"), "label", FieldDescriptorProto.LABEL_REPEATED),
            "dragoman.v1.Answer.text = 1: label optional became repeated",
        ),
        (
            lambda f: setattr(field(f, "Answer.tokens"), "label", FieldDescriptorProto.LABEL_OPTIONAL),
            "dragoman.v1.Answer.tokens = 2: label repeated became optional",
        ),
        (
            lambda f: (
                setattr(field(f, "GenerateRequest.seed"), "proto3_optional", False)
                or field(f, "GenerateRequest.seed").ClearField("oneof_index")
            ),
            "dragoman.v1.GenerateRequest.seed = 15: optional True became False",
        ),
        (
            lambda f: setattr(field(f, "GenerateRequest.suppressed_tokens"), "proto3_optional", True),
            "dragoman.v1.GenerateRequest.suppressed_tokens = 19: optional False became True",
        ),
        (
            lambda f: setattr(field(f, "GenerateBatchResponse.error"), "proto3_optional", True),
            "dragoman.v1.GenerateBatchResponse.error = 3: optional False became True",
        ),
        (
            lambda f: setattr(make_optional(f, "Model.max_slots"), "type", FieldDescriptorProto.TYPE_UINT64),
            "dragoman.v1.Model.max_slots = 9: type uint32 became uint64",
        ),
        (
            lambda f: field(f, "GenerateBatchResponse.error").ClearField("oneof_index"),
            "dragoman.v1.GenerateBatchResponse.error = 3: oneof outcome became None",
        ),
        (
            lambda f: setattr(field(f, "GenerateBatchResponse.request_id"), "oneof_index", 0),
            "dragoman.v1.GenerateBatchResponse.request_id = 1: oneof None became outcome",
        ),
        (
            lambda f: setattr(message(f, "GenerateBatchResponse").oneof_decl[0], "name", "ending"),
            "dragoman.v1.GenerateBatchResponse.error = 3: oneof outcome became ending",
        ),
        (lambda f: add_field(f, "Error", 4), "dragoman.v1.Error.added = 4: was reserved"),
        (lambda f: add_field(f, "Model", 99, label=2), "dragoman.v1.Model.added = 99: is new and required"),
        (lambda f: message(f, "Error").ClearField("reserved_range"), "dragoman.v1.Error: the numbers from 4 are reserved no more"),
        (lambda f: f.enum_type.remove(f.enum_type[0]), "dragoman.v1.FinishReason: removed"),
        (lambda f: f.enum_type[0].value.pop(), "dragoman.v1.FinishReason.FINISH_REASON_LENGTH = 2: removed"),
        (
            lambda f: setattr(f.enum_type[0].value[1], "number", 3),
            "dragoman.v1.FinishReason.FINISH_REASON_EOS = 1: number 1 became 3",
        ),
        (
            lambda f: setattr(f.enum_type[0].value[1], "name", "FINISH_REASON_END"),
            "dragoman.v1.FinishReason.FINISH_REASON_EOS = 1: removed",
        ),
        (lambda f: f.service.remove(f.service[0]), "dragoman.v1.Generation: removed"),
        (lambda f: setattr(f.service[0], "name", "GenerationService"), "dragoman.v1.Generation: removed"),
        (lambda f: f.service[0].method.remove(method(f, "Score")), "dragoman.v1.Generation.Score: removed"),
        (
            lambda f: setattr(method(f, "Score"), "input_type", ".dragoman.v1.GenerateRequest"),
            "dragoman.v1.Generation.Score: input_type .dragoman.v1.ScoreRequest became .dragoman.v1.GenerateRequest",
        ),
        (
            lambda f: setattr(method(f, "GetModel"), "output_type", ".dragoman.v1.Usage"),
            "dragoman.v1.Generation.GetModel: output_type .dragoman.v1.Model became .dragoman.v1.Usage",
        ),
        (
            lambda f: setattr(method(f, "Generate"), "server_streaming", True),
            "dragoman.v1.Generation.Generate: server_streaming False became True",
        ),
        (
            lambda f: setattr(method(f, "GenerateBatch"), "client_streaming", False),
            "dragoman.v1.Generation.GenerateBatch: client_streaming True became False",
        ),
    ],
)
def test_each_kind_of_break_is_told(contract: FileDescriptorProto, change: Change, sentence: str) -> None:
    assert sentence in breaks(contract, changed(contract, change))


def test_no_message_field_value_or_method_can_go_unnoticed(contract: FileDescriptorProto) -> None:
    def listed(file: FileDescriptorProto) -> list[tuple[Any, int]]:
        lists = [file.message_type, file.enum_type, file.service]
        lists += [message.field for message in file.message_type]
        lists += [part for enum in file.enum_type for part in [enum.value]] + [service.method for service in file.service]
        return [(things, index) for things in lists for index in range(len(things))]

    assert len(listed(contract)) > 100
    for position in range(len(listed(contract))):

        def remove(file: FileDescriptorProto, position: int = position) -> None:
            things, index = listed(file)[position]
            del things[index]

        assert breaks(contract, changed(contract, remove))


def nested(file: FileDescriptorProto) -> None:
    """Put a message and an enum with reserved numbers and names into a message."""
    inner = message(file, "Model").nested_type.add(name="Inner", reserved_name=["old"])
    inner.field.add(name="x", json_name="x", number=1, type=FieldDescriptorProto.TYPE_BOOL, label=1)
    kind = message(file, "Model").enum_type.add(name="Kind", reserved_name=["KIND_OLD"])
    kind.value.add(name="KIND_NONE", number=0)
    kind.reserved_range.add(start=5, end=7)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.nested_type.pop(), "dragoman.v1.Model.Inner: removed"),
        (lambda m: m.nested_type[0].field.pop(), "dragoman.v1.Model.Inner.x = 1: removed"),
        (
            lambda m: m.nested_type[0].field.add(name="old", number=9, type=FieldDescriptorProto.TYPE_BOOL, label=1),
            "dragoman.v1.Model.Inner.old = 9: was reserved",
        ),
        (lambda m: m.nested_type[0].reserved_name.pop(), "dragoman.v1.Model.Inner: old is reserved no more"),
        (lambda m: m.enum_type.pop(), "dragoman.v1.Model.Kind: removed"),
        (lambda m: m.enum_type[0].value.add(name="KIND_NEW", number=7), "dragoman.v1.Model.Kind.KIND_NEW = 7: was reserved"),
        (lambda m: m.enum_type[0].value.add(name="KIND_OLD", number=2), "dragoman.v1.Model.Kind.KIND_OLD = 2: was reserved"),
        (
            lambda m: setattr(m.enum_type[0].reserved_range[0], "end", 6),
            "dragoman.v1.Model.Kind: the numbers from 5 are reserved no more",
        ),
    ],
)
def test_breaks_are_told_of_what_lies_inside_messages(contract: FileDescriptorProto, change: Any, sentence: str) -> None:
    old = changed(contract, nested)
    assert breaks(old, changed(old, lambda file: change(message(file, "Model")))) == [sentence]


@pytest.mark.parametrize(
    "change",
    [
        nested,
        lambda f: add_field(f, "Model", 99),
        lambda f: add_field(f, "Model", 99, label=3),
        lambda f: add_field(f, "Error", 17),
        lambda f: make_optional(f, "Model.max_slots"),
        lambda f: make_optional(f, "GenerateBatchResponse.index"),
        lambda f: f.message_type.add(name="New"),
        lambda f: f.message_type.insert(0, f.message_type.pop()),
        lambda f: message(f, "Model").reserved_range.add(start=50, end=60),
        lambda f: message(f, "Error").reserved_range.add(start=20, end=30),
        lambda f: f.enum_type[0].value.add(name="FINISH_REASON_NEW", number=9),
        lambda f: f.enum_type.add(name="NewKind"),
        lambda f: f.service[0].method.add(name="New", input_type=".dragoman.v1.Usage", output_type=".dragoman.v1.Usage"),
        lambda f: f.service.add(name="Another"),
        lambda f: f.dependency.append("google/protobuf/duration.proto"),
        lambda f: setattr(f.options, "java_package", "org.example"),
    ],
)
def test_additions_break_nothing(contract: FileDescriptorProto, change: Change) -> None:
    assert breaks(contract, changed(contract, change)) == []
