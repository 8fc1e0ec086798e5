"""Every field of a manifest and every file of a bundle beyond its bounds: refused in one line that names the file and the field."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.export.arguments import ExportError, check_dimensions, check_name
from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError, Manifest, Tensors, hash_file
from dragoman.export.manifest import MAX_LAYERS, MAX_TOKENS, MAX_VOCABULARY, MAX_WIDTH, Dimensions, Origin, Parity, Quality
from dragoman.export.manifest_file import MAX_MANIFEST_BYTES, read_manifest
from dragoman.model.config import ModelConfig
from dragoman.model.text import reading
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.server.faces.grpc.health import LIVENESS, OVERALL

DIGEST = "0" * 64
NOT_COUNTS = [0, -1, 10**30, 1.5, True, None, "1", [], {}]
NOT_LINES = ["two\nlines", "\x1b[2J", "\u202etxet", "\ud800", "x" * 201, 1, None]
NOT_NUMBERS = ["1", True, None, [], 1e300, 10**30]
NOT_NAMES = ["", "liveness", "Readiness", "x" * 129, "x" * 100_000, "a/b", "a b", "a\nb", "-a", ".a", "ä", "a\0", "\ud800", 1, None]
NOT_NAMES += ["dragoman.v1.Generation", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
NOT_PATHS = [
    "/x",
    "../x",
    "a/../x",
    "./x",
    "a//x",
    "a/",
    "",
    "a\\x",
    "a\0x",
    "a\nx",
    "ä",
    "x" * 256,
    "/".join("x" * 9),
    MANIFEST_FILE,
]
# For each field: values that it must not have. `*` stands for each item.
WRONG: dict[str, list[Any]] = {
    "format_version": [1, 3, 10**30, 2.0, True, None, "2", [], {}],
    "name": NOT_NAMES,
    "version": ["", "a b", "a\n", "x" * 65, "../x", "\x1b", 1, None],
    "precision": ["", "fp12", "FP32", "x" * 100_000, "\ud800", 1, None],
    "d_model": [*NOT_COUNTS, MAX_WIDTH + 1],
    "num_heads": [*NOT_COUNTS, MAX_WIDTH + 1],
    "head_dim": [*NOT_COUNTS, MAX_WIDTH + 1],
    "num_encoder_layers": [*NOT_COUNTS, MAX_LAYERS + 1],
    "num_decoder_layers": [*NOT_COUNTS, MAX_LAYERS + 1, 3 * 10**6],
    "source_vocab_size": [*NOT_COUNTS, MAX_VOCABULARY + 1],
    "target_vocab_size": [*NOT_COUNTS, MAX_VOCABULARY + 1],
    "pad_id": [*NOT_COUNTS[1:], 300],
    "eos_id": [*NOT_COUNTS[1:], 300],
    "decoder_start_id": [*NOT_COUNTS[1:], 300],
    "max_source_tokens": [*NOT_COUNTS, MAX_TOKENS + 1],
    "max_target_tokens": [*NOT_COUNTS, MAX_TOKENS + 1],
    "default_max_new_tokens": [*NOT_COUNTS, MAX_TOKENS + 1],
    "domain": NOT_LINES,
    "tensors": [None, [], {}],
    **{f"tensors.{name}": [None, {}, "x", [1], ["x" * 65], ["a\nb"], [""], ["x"] * 3000] for name in Tensors.__struct_fields__},
    "files": [None, [], {}, {str(number): {"size": 0, "sha256": DIGEST} for number in range(1025)}],
    "files.*": [None, [], {}, {"size": 1}, {"size": 1, "sha256": DIGEST, "mode": 1}],
    "files.*.size": [-1, 10**30, 2**41, 1.5, True, None, "1"],
    "files.*.sha256": ["", "0" * 63, "0" * 65, "A" * 64, DIGEST + "\n", 0, None],
    "origin": [None, [], {}],
    "origin.weights_sha256": ["", "0" * 65, None, 0],
    "origin.torch": NOT_LINES,
    "origin.onnx": NOT_LINES,
    "parity": [None, [], {}],
    **{f"parity.{name}": NOT_NUMBERS for name in Parity.__struct_fields__ if name.startswith(("num_", "max_", "tol"))},
    "parity.device": NOT_LINES,
    "parity.processor": NOT_LINES[:-1],
    "parity.quality": [[], {}, 1],
    **{f"parity.quality.{name}": NOT_NUMBERS for name in Quality.__struct_fields__ if "change" not in name},
    "parity.quality.agreement": [1.1, -0.1],
    "parity.quality.bleu_change": ["1", True, [], 1e300],
    "parity.quality.chrf_change": ["1", True, [], 1e300],
}


def content(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / MANIFEST_FILE).read_text())
    found["parity"]["quality"] = dict.fromkeys(Quality.__struct_fields__, 0)
    return found


def refusal(directory: Path, text: str | bytes) -> str:
    path = directory / MANIFEST_FILE
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BundleError) as caught:
        Bundle.open(directory, is_checked=False)
    message = str(caught.value)
    assert message.startswith(str(directory))
    rest = message.removeprefix(str(directory))
    assert rest.isprintable() and rest.isascii() and len(rest) < 700
    return rest


def fields_of(struct: type[msgspec.Struct], prefix: str = "") -> set[str]:
    inner = {"tensors": Tensors, "origin": Origin, "parity": Parity, "quality": Quality}
    found = {f"{prefix}{name}" for name in struct.__struct_fields__}
    return found.union(*(fields_of(inner[name], f"{prefix}{name}.") for name in struct.__struct_fields__ if name in inner))


def test_every_field_has_values_that_are_refused() -> None:
    assert WRONG.keys() == fields_of(Manifest) | {"files.*", "files.*.size", "files.*.sha256"}


@pytest.mark.parametrize("field", WRONG)
def test_value_out_of_bounds_is_refused_and_its_field_named(bundle_dir: Path, field: str) -> None:
    good = content(bundle_dir)
    *parents, last = ["decoder.weights" if part == "*" else part for part in field.split(".")]
    for value in WRONG[field]:
        changed = json.loads(json.dumps(good))
        holder = changed
        for name in parents:
            holder = holder[name]
        holder[last] = value
        message = refusal(bundle_dir, json.dumps(changed)).replace("format version", "format_version")
        assert last in message, value


def test_the_manifest_that_the_table_changes_is_a_good_one(bundle_dir: Path) -> None:
    (bundle_dir / MANIFEST_FILE).write_text(json.dumps(content(bundle_dir)))
    assert Bundle.open(bundle_dir).manifest.name == "tiny"


@pytest.mark.parametrize("path", NOT_PATHS)
def test_path_that_is_none_inside_the_bundle_is_refused(bundle_dir: Path, path: str) -> None:
    changed = content(bundle_dir)
    changed["files"][path] = {"size": 1, "sha256": DIGEST}
    assert "files has " in (message := refusal(bundle_dir, json.dumps(changed)))
    assert "which is not a path inside the bundle" in message


@pytest.mark.parametrize(("path", "size"), [("decoder.onnx", 2**31), ("tokenizer/tokenizer.json", 2**26 + 1)])
def test_file_that_is_larger_than_its_kind_can_be_is_refused(bundle_dir: Path, path: str, size: int) -> None:
    changed = content(bundle_dir)
    changed["files"][path]["size"] = size
    assert f"{path} has {size} bytes" in refusal(bundle_dir, json.dumps(changed))


def test_files_that_are_too_large_together_are_refused(bundle_dir: Path) -> None:
    changed = content(bundle_dir)
    for path in ("decoder.weights", "encoder.weights"):
        changed["files"][path]["size"] = 2**39 + 1
    assert "bytes together" in refusal(bundle_dir, json.dumps(changed))


def test_token_outside_of_the_sources_vocabulary_is_refused(bundle_dir: Path) -> None:
    changed = content(bundle_dir) | {"source_vocab_size": 1, "eos_id": 1}
    assert "eos_id 1 is outside the vocabulary of 1" in refusal(bundle_dir, json.dumps(changed))


def test_padding_that_ends_is_refused(bundle_dir: Path) -> None:
    assert "pad_id and eos_id are both 1" in refusal(bundle_dir, json.dumps(content(bundle_dir) | {"pad_id": 1, "eos_id": 1}))


def test_tensor_that_comes_twice_is_refused_and_many_are_not_all_listed(bundle_dir: Path) -> None:
    changed = content(bundle_dir)
    changed["tensors"]["decoder_outputs"] *= 2
    assert "tensors.decoder_outputs has a tensor twice" in refusal(bundle_dir, json.dumps(changed))
    changed = content(bundle_dir) | {"num_decoder_layers": MAX_LAYERS}
    assert "tensors.encoder_outputs lacks cross_k_2, cross_v_2, cross_k_3, cross_v_3, cross_k_4 and 1015 more" in refusal(
        bundle_dir, json.dumps(changed)
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda text: b"\xef\xbb\xbf" + text, "BOM"),
        (lambda text: text.decode().encode("utf-16"), "utf-8"),
        (lambda text: text + b"\xff", "utf-8"),
        (lambda text: b"[" * 100_000, "nested too deeply"),
        (lambda text: b'{"name": ' * 100_000, "nested too deeply"),
        (lambda text: text.replace(b'"name"', b'"name": "other", "name"', 1), '"name" is said twice'),
        (lambda text: text.replace(b'"size"', b'"size": 1, "size"', 1), '"size" is said twice'),
        (lambda text: text.replace(b'"tolerance": ', b'"tolerance": NaN, "was": '), "NaN is no number"),
        (lambda text: text.replace(b'"tolerance": ', b'"tolerance": -Infinity, "was": '), "-Infinity is no number"),
        (lambda text: text.replace(b'"tolerance": ', b'"tolerance": 1e999, "was": '), "tolerance"),
        (lambda text: text.replace(b'"d_model": ', b'"d_model": ' + b"9" * 5000 + b', "was": '), "not a bundle's manifest"),
        (lambda text: text.replace(b'"name"', b'"' + b"\\n" * 1000 + b'": 1, "name"', 1), "unknown field"),
        (lambda text: text + b" " * MAX_MANIFEST_BYTES, f"more than {MAX_MANIFEST_BYTES} bytes"),
        (lambda text: b"", "not a bundle's manifest"),
        (lambda text: b"[]", "not a JSON object"),
        (lambda text: b'"bundle"', "not a JSON object"),
    ],
)
def test_json_that_is_not_what_it_should_be_is_refused(bundle_dir: Path, make: Callable[[bytes], bytes], reason: str) -> None:
    assert reason in refusal(bundle_dir, make((bundle_dir / MANIFEST_FILE).read_bytes()))


@pytest.mark.parametrize("path", [MANIFEST_FILE, "encoder.onnx", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "circle", "dangling", "outside"])
def test_what_is_no_file_of_the_bundle_is_refused_and_never_waited_for(bundle_dir: Path, path: str, kind: str) -> None:
    place = bundle_dir / path
    place.rename(bundle_dir.parent / "away")
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "directory":
            place.mkdir()
        case _:
            target = {"device": "/dev/zero", "circle": place.name, "dangling": "nothing", "outside": bundle_dir.parent / "away"}
            place.symlink_to(target[kind])
    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle_dir)
    assert str(place) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises((BundleError, OSError)) if kind != "outside" else pytest.raises(BundleError):
        Bundle.open(bundle_dir, is_checked=False)


def test_file_that_grows_while_it_is_read_is_not_followed(bundle_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle_dir / "decoder.weights"
    sha256, first = hashlib.sha256, path.read_bytes()

    def growing(*_: object) -> Any:
        """What hashes the first chunk makes the file longer than was looked at."""
        with path.open("ab") as file:
            file.write(b"more")
        return sha256()

    monkeypatch.setattr(hashlib, "sha256", growing)
    found = hash_file(path)
    assert path.stat().st_size == len(first) + 4
    assert found == sha256(first).hexdigest()


@pytest.mark.parametrize("name", [name for name in NOT_NAMES if isinstance(name, str)])
def test_export_refuses_the_names_that_a_server_refuses(name: str) -> None:
    with pytest.raises(ExportError, match="name must"):
        check_name(name)


@pytest.mark.parametrize("name", (LIVENESS, *OVERALL))
def test_no_model_can_be_called_as_health_calls_the_service(name: str) -> None:
    with pytest.raises(ExportError, match="name must"):
        check_name(name)


@pytest.mark.parametrize("name", ["en-de", "base_endless.v2", "3", "x" * 128, "Liveness2", "dragoman", "grpc"])
def test_names_that_models_have_are_taken(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_decoder_layers", MAX_LAYERS + 1),
        ("max_source_positions", MAX_TOKENS + 1),
        ("source_vocab_size", MAX_VOCABULARY + 1),
        ("d_model", 2 * MAX_WIDTH),
    ],
)
def test_export_refuses_the_dimensions_that_a_server_refuses(field: str, value: int) -> None:
    fields = {"source_vocab_size": 300, "target_vocab_size": 300, "is_embedding_shared": False}
    check_dimensions(ModelConfig(**fields))
    with pytest.raises(ExportError, match="the model cannot be served: Expected `int` <="):
        check_dimensions(ModelConfig(**fields | {field: value}))


def test_largest_model_that_is_allowed_is_read_at_once() -> None:
    """Its tensors are named, and the manifest is within the bytes that are read."""
    tensors = msgspec.to_builtins(Tensors.of_layers(MAX_LAYERS))
    assert len(json.dumps(tensors)) < MAX_MANIFEST_BYTES / 2
    assert msgspec.convert(tensors, Tensors) == Tensors.of_layers(MAX_LAYERS)
    assert Dimensions.__struct_fields__


def test_not_a_number_in_a_report_is_not_written_as_one(bundle_dir: Path) -> None:
    manifest = read_manifest(bundle_dir / MANIFEST_FILE)
    broken = msgspec.structs.replace(manifest, parity=msgspec.structs.replace(manifest.parity, tolerance=math.nan))
    assert "parity.tolerance" in refusal(bundle_dir, msgspec.json.encode(broken))


def test_tokeniser_is_not_parsed_when_it_is_too_large(bundle_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(bundle_dir)
    path = bundle_dir / "tokenizer/tokenizer.json"
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(BundleError, match=rf"tokenizer\.json: more than {path.stat().st_size - 1} bytes"):
        bundle.tokenizers()


@pytest.mark.parametrize("text", ["[" * 100_000, "\ufeff{}", '{"model": "\\ud800"}', "{}\n{}", "null", '{"version": "1.0"}'])
def test_hostile_tokeniser_is_refused_in_one_line(bundle_dir: Path, text: str) -> None:
    bundle = Bundle.open(bundle_dir)
    (bundle_dir / "tokenizer/tokenizer.json").write_text(text)
    with pytest.raises(BundleError) as caught:
        bundle.tokenizers()
    message = str(caught.value)
    assert "tokenizer.json: not a byte-level tokeniser: " in message and message.isprintable() and len(message) < 600


def test_tokeniser_neither_cuts_nor_fills_up(bundle_dir: Path) -> None:
    path = bundle_dir / "tokenizer/tokenizer.json"
    fields = json.loads(path.read_text())
    ids = ByteLevelTokenizer.load(path.parent).encode("two dogs run over the grass")
    fields["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fields["padding"] = {
        "strategy": {"Fixed": 10_000_000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    path.write_text(json.dumps(fields))
    assert ByteLevelTokenizer.load(path.parent).encode("two dogs run over the grass") == ids
