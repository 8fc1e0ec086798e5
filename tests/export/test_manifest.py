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
from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError, FileEntry, Manifest, Tensors, hash_file
from dragoman.export.caches import Cache, attention_caches
from dragoman.export.evidence import Origin, Parity, Quality
from dragoman.export.fields import MAX_LAYERS, MAX_TOKENS, MAX_VOCABULARY, MAX_WIDTH
from dragoman.export.manifest import Dimensions, content_version, told
from dragoman.export.manifest_file import MAX_MANIFEST_BYTES, read_manifest
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Defaults, Language, Languages, Template
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
NOT_SHAPES = [None, {}, [], "T", ["U"], ["t"], ["S"], [None], [1.5], [[4]], ["T", "T"], [0], [-1], [True], [2**16 + 1]]
NOT_SHAPES += [[2**10, "T", 2**7], [1] * 7, [2**16] * 6, [10**30]]
CACHE = {"name": "x", "role": "self", "shape": [4, "T", 8]}
CACHES_OF_BOTH = [
    {"name": "self_k_0", "role": "self", "shape": [4, "T", 8]},
    {"name": "cross_k_0", "role": "cross", "shape": [4, "S", 8]},
]
CACHES_OF_STATES = [CACHES_OF_BOTH[0], {"name": "memory", "role": "self", "shape": [8]}]
NOT_IDS = [None, {}, 1, [None], [-1], [1.5], [True], ["1"], [300], [2**24], [1] * 65]


def wrong_affixes(field: str) -> dict[str, list[Any]]:
    affixes = {f"{field}.{name}": NOT_IDS for name in ("source_prefix", "source_suffix", "target_prefix")}
    return affixes | {f"{field}.decoder_start_id": [-1, 1.5, True, "1", 300, 2**24]}


# For each field: values that it must not have. `*` stands for each item.
WRONG: dict[str, list[Any]] = {
    "format_version": [1, 2, 3, 5, 10**30, 4.0, True, None, "4", [], {}],
    "name": NOT_NAMES,
    "version": ["", "a b", "a\n", "x" * 65, "../x", "\x1b", 1, None],
    "precision": ["", "fp12", "FP32", "x" * 100_000, "\ud800", 1, None],
    "weight_bits": [*NOT_COUNTS, 6, 7, 9, 10**30],  # 7 likewise
    "architecture": ["", "Transformer", "lstm", 1, None],
    "has_prompts": [0, 1, "true", None, True],  # True is what no bundle with an encoder has
    "num_attention_layers": [-1, 10**30, 1.5, True, "1", [], MAX_LAYERS + 1],
    "d_model": [*NOT_COUNTS, MAX_WIDTH + 1],
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
    "caches": [None, [], {}, [CACHE] * 2049, [CACHE, CACHE]],
    "caches.*": [None, [], {}, {"name": "x"}, CACHE | {"surprise": 1}],
    "caches.*.name": ["", "a b", "x" * 65, "Ä", "a\n", "candidate_ids", 1, None],
    "caches.*.role": ["", "Self", "both", 1, None],
    "caches.*.shape": NOT_SHAPES,
    "caches.*.precision": ["", "fp32", "int8", "INT8", 8, True],  # int8 is what no bundle of another precision has
    "num_choices": [*NOT_COUNTS, MAX_VOCABULARY + 1, 301],
    "template": [None, [], 1],
    **wrong_affixes("template"),
    "template.task": [None, 1, "\0", "\ud800", "x" * 1025],
    "languages": [[], 1, "de"],
    "languages.source": [None, {}, 1, [None], [{}], [{"code": str(i)} for i in range(1025)]],
    "languages.target": [None, {}, 1, [None], [{}], [{"code": str(i)} for i in range(1025)]],
    "languages.source.*": [None, [], {}, {"code": "en", "surprise": 1}],
    "languages.target.*": [None, [], {}, {"code": "en", "surprise": 1}],
    "languages.default_source": [None, 1, "fr", "EN", "x" * 65],
    "languages.default_target": [None, 1, "en", "FR", "x" * 65],
    **{
        f"languages.{side}.*.{name}": values
        for side in ("source", "target")
        for name, values in {
            "code": ["", None, 1, "x" * 65, "a\n", "-"],
            "names": [None, {}, [1], [""], ["de"] * 65, ["x" * 65]],
            "label": [None, 1, "x" * 65, "a\n"],
        }.items()
    },
    **wrong_affixes("languages.source.*"),
    **wrong_affixes("languages.target.*"),
    "defaults": [None, [], 1],
    "defaults.num_beams": [0, -1, 1.5, "1", True, 10**30],
    "defaults.num_return_sequences": [0, -1, 1.5, "1", True, 10**30, 2],
    "defaults.length_penalty": [-10.1, 10.1, "1", True, 1e300],
    "defaults.early_stopping": [0, 1, "true", []],
    "defaults.do_sample": [0, 1, "true", []],
    "defaults.temperature": [0, -1, 101, "1", True, 1e300],
    "defaults.top_k": [-1, 1.5, "1", True, 301, 10**30],
    "defaults.top_p": [0, -1, 1.1, "1", True],
    "defaults.repetition_penalty": [0, -1, 101, "1", True],
    "defaults.min_new_tokens": [-1, 1.5, "1", True, 20, 10**30],
    "defaults.max_new_tokens": [0, -1, 1.5, "1", True, 21, 10**30],
    "defaults.no_repeat_ngram_size": [-1, 1.5, "1", True, 21, 10**30],
    "defaults.suppressed_tokens": [None, {}, 1, [-1], [1.5], [300], [2**24], list(range(257))],
    "defaults.is_end_forced": [None, 0, 1, "true"],
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
    found["template"], found["defaults"] = {}, {}
    found |= {"architecture": "transformer", "has_prompts": False, "num_attention_layers": None}
    found["languages"] = {"source": [{"code": "en"}, {"code": "de"}], "target": [{"code": "fr"}, {"code": "it"}]}
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
    inner: dict[str, type[msgspec.Struct]] = {"tensors": Tensors, "origin": Origin, "parity": Parity, "quality": Quality}
    inner |= {"template": Template, "languages": Languages, "defaults": Defaults}
    found = {f"{prefix}{name}" for name in struct.__struct_fields__}
    return found.union(*(fields_of(inner[name], f"{prefix}{name}.") for name in struct.__struct_fields__ if name in inner))


def test_every_field_has_values_that_are_refused() -> None:
    items = {"files.*": FileEntry, "caches.*": Cache, "languages.source.*": Language, "languages.target.*": Language}
    of_items = {f"{item}.{name}" for item, struct in items.items() for name in struct.__struct_fields__}
    assert WRONG.keys() == fields_of(Manifest) | items.keys() | of_items


@pytest.mark.parametrize("field", WRONG)
def test_value_out_of_bounds_is_refused_and_its_field_named(bundle_dir: Path, field: str) -> None:
    good = content(bundle_dir)
    item: Any = "decoder.weights" if field.startswith("files") else 0
    *parents, last = [item if part == "*" else part for part in field.split(".")]
    for value in WRONG[field]:
        changed = json.loads(json.dumps(good))
        holder = changed
        for name in parents:
            holder = holder[name]
        holder[last] = value
        message = refusal(bundle_dir, json.dumps(changed)).replace("format version", "format_version")
        assert (last if isinstance(last, str) else parents[0]) in message, value


def test_the_manifest_that_the_table_changes_is_a_good_one(bundle_dir: Path) -> None:
    (bundle_dir / MANIFEST_FILE).write_text(json.dumps(content(bundle_dir)))
    assert Bundle.open(bundle_dir).manifest.name == "tiny"


LIST = list(range(64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"template": {"source_prefix": LIST[:23]}}, "put 23 tokens around a source, which may have 24"),
        ({"template": {"source_suffix": LIST[:23]}}, "put 23 tokens around a source, which may have 24"),
        ({"template": {"target_prefix": LIST[:20]}}, "force 20 tokens of a target, which may have 20"),
        ({"template": {"target_prefix": LIST[:1]}}, "default_max_new_tokens 20 and 1 forced tokens are over max_target_tokens 20"),
        (
            {"default_max_new_tokens": 5, "defaults": {"min_new_tokens": 5}},
            "min_new_tokens of defaults is 5, which is not",
        ),
        ({"languages": {"source": [{"code": "en"}, {"code": "EN"}]}}, "means two languages: 'en' and 'EN'"),
        ({"languages": {"target": [{"code": "en", "names": ["De"]}]}}, "must be written 'de'"),
        ({"num_choices": 2, "defaults": {"suppressed_tokens": [3, 4]}}, "suppressed_tokens of defaults leave nothing of 2 tokens"),
        (
            {"num_choices": 2, "defaults": {"suppressed_tokens": [3, 3], "min_new_tokens": 1}},
            "suppressed_tokens of defaults leave nothing of 2 tokens",
        ),
    ],
)
def test_generation_that_the_model_cannot_do_is_refused(bundle_dir: Path, changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(bundle_dir, json.dumps(content(bundle_dir) | changes))


def test_what_languages_add_counts_where_it_is_said(bundle_dir: Path) -> None:
    """A source has the target language's prefix and the source language's affixes, an answer the target language's prefix."""
    fields = content(bundle_dir) | {
        "default_max_new_tokens": 10,
        "template": {"source_prefix": LIST[:2], "target_prefix": LIST[:2]},
    }
    source = {"code": "en", "source_prefix": LIST[:10], "source_suffix": LIST[:3], "target_prefix": LIST[:30]}
    target = {"code": "fr", "source_prefix": LIST[:7], "source_suffix": LIST[:30], "target_prefix": LIST[:8]}
    fields["languages"] = {"source": [{"code": "x"}, source], "target": [target, {"code": "y"}]}
    (bundle_dir / MANIFEST_FILE).write_text(json.dumps(fields))
    assert Bundle.open(bundle_dir).manifest.languages is not None
    source["source_suffix"] = LIST[:4]
    assert "put 23 tokens around a source" in refusal(bundle_dir, json.dumps(fields))
    source["source_suffix"], target["target_prefix"] = LIST[:3], LIST[:9]
    assert "default_max_new_tokens 10 and 11 forced tokens" in refusal(bundle_dir, json.dumps(fields))


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
    changed = content(bundle_dir) | {"caches": msgspec.to_builtins(attention_caches(MAX_LAYERS, 4, 8))}
    assert "tensors.decoder_inputs lacks self_k_2, self_v_2, self_k_3, self_v_3, self_k_4 and 2035 more" in refusal(
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
    caches = msgspec.to_builtins(attention_caches(MAX_LAYERS, 64, 128))
    assert len(json.dumps([tensors, caches], indent=2)) < MAX_MANIFEST_BYTES * 3 / 4
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


def prompts_of(directory: Path) -> dict[str, Any]:
    """Return what a manifest says whose encoder reads prompts, and whose scorer tells no attention."""
    caches = [cache for cache in attention_caches(2, 4, 8) if cache.role == "self"]
    tensors = Tensors.of_caches(caches, has_prompts=True, has_attention=False)
    said: dict[str, Any] = {"architecture": "decoder", "has_prompts": True, "num_attention_layers": 0, "num_encoder_layers": 0}
    said["max_source_tokens"] = 20
    return content(directory) | said | {"caches": msgspec.to_builtins(caches), "tensors": msgspec.to_builtins(tensors)}


def test_manifest_of_prompts_is_read(bundle_dir: Path) -> None:
    (bundle_dir / MANIFEST_FILE).write_text(json.dumps(prompts_of(bundle_dir)))
    manifest = read_manifest(bundle_dir / MANIFEST_FILE)
    assert (manifest.has_prompts, manifest.attention_layers, manifest.num_encoder_layers) == (True, 0, 0)


def test_manifest_of_states_is_read(bundle_dir: Path) -> None:
    caches = [Cache("state_0", "self", [8]), Cache("start_0", "cross", [8]), Cache("values", "cross", ["S", 8])]
    said = {"architecture": "rnn", "num_attention_layers": 1, "tensors": msgspec.to_builtins(Tensors.of_caches(caches))}
    (bundle_dir / MANIFEST_FILE).write_text(json.dumps(content(bundle_dir) | said | {"caches": msgspec.to_builtins(caches)}))
    manifest = read_manifest(bundle_dir / MANIFEST_FILE)
    assert (manifest.has_prompts, manifest.attention_layers, manifest.num_decoder_layers) == (False, 1, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_prompts": False}, "num_encoder_layers is 0, which goes with has_prompts"),
        ({"has_prompts": False, "num_encoder_layers": 2}, "caches has none that the encoder gives, which goes with has_prompts"),
        ({"caches": CACHES_OF_BOTH}, "caches has cross_k_0, which an encoder gives; with has_prompts there is none"),
        ({"source_vocab_size": 299}, "source_vocab_size 299 is not target_vocab_size 300"),
        ({"max_source_tokens": 21, "max_target_tokens": 20}, "max_source_tokens 21 is over max_target_tokens 20; with has_prompts"),
        ({"caches": CACHES_OF_STATES}, "caches has memory without positions; with has_prompts each has those of a prompt"),
        ({"precision": "fp16"}, "has_prompts goes with fp32 and int8, not fp16"),
        ({"num_attention_layers": 1}, "tensors.scorer_outputs lacks attention"),
        ({"num_attention_layers": None}, "tensors.scorer_outputs lacks attention"),
    ],
)
def test_what_does_not_go_with_prompts_is_refused(bundle_dir: Path, change: dict[str, Any], reason: str) -> None:
    assert reason in refusal(bundle_dir, json.dumps(prompts_of(bundle_dir) | change))


def test_bundle_of_a_transformer_says_nothing_of_what_others_have(exported: Path) -> None:
    said = json.loads((exported / MANIFEST_FILE).read_text())
    assert not {"architecture", "has_prompts", "num_attention_layers"} & said.keys()
    assert told(read_manifest(exported / MANIFEST_FILE)) == said


@pytest.mark.parametrize("change", [{"architecture": "rnn"}, {"num_attention_layers": 1}])
def test_what_others_have_is_told_and_gives_another_version(exported: Path, change: dict[str, Any]) -> None:
    manifest = read_manifest(exported / MANIFEST_FILE)
    other = msgspec.structs.replace(manifest, **change)
    assert change.items() <= told(other).items()
    assert content_version(other) != content_version(manifest)
