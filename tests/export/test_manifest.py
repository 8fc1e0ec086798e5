"""Manifests out of bounds or in contradiction are refused in one printable line that names the file and the field."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.export.arguments import ExportError, check_dimensions, check_name
from dragoman.export.fields import MAX_LAYERS, MAX_TOKENS, MAX_VOCABULARY, MAX_WIDTH, BundleError
from dragoman.export.manifest import (
    CARD_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    PARITY_FILE,
    SAMPLES_FILE,
    Manifest,
    content_version,
    parse_manifest,
    read_manifest_bytes,
    told,
)
from dragoman.export.proof.report import Parity, Quality
from dragoman.export.tensors import LOG_PROBS_OUTPUT, Cache, Tensors, attention_caches
from dragoman.model.config import ModelConfig
from dragoman.server.protocols.grpc.health import LIVENESS, OVERALL

Fields = dict[str, Any]
DIGEST = "0" * 64
ENTRY = {"size": 1, "sha256": DIGEST}
NOT_COUNTS = [0, -1, 10**30, 1.5, True, None, "1", [], {}]
NOT_LINES = ["two\nlines", "at the end\n", "\x1b[2J", "\u202etxet", "\ud800", "x" * 201, 1, None]
NOT_NUMBERS = ["1", True, None, [], 1e300, 10**30]
NOT_FLAGS = [0, 1, "true"]
RESERVED = ["dragoman.v1.Generation", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", LIVENESS, *OVERALL]
NOT_NAMES = [
    "",
    "liveness",
    "Readiness",
    "x" * 129,
    "x" * 100_000,
    "a/b",
    "a b",
    "a\nb",
    "a\n",
    "-a",
    ".a",
    "ä",
    "\ud800",
    *RESERVED,
]
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
NOT_SHAPES = [None, {}, [], "T", ["U"], ["S"], [None], [1.5], [[4]], ["T", 4, "T"], [0], [-1], [True], [2**16 + 1]]
NOT_SHAPES += [[2**10, "T", 2**7], [1] * 7, [10**30]]
NOT_IDS = [None, {}, 1, [None], [-1], [1.5], [True], ["1"], [300], [2**24], [1] * 65]
CACHE = {"name": "x", "role": "self", "shape": [4, "T", 8]}
TABLES = [None, {}, 1, [None], [{}], [{"code": str(i)} for i in range(1025)]]
ITEMS = [None, [], {}, {"code": "en", "surprise": 1}]


def each(names: str, values: list[Any], within: str = "") -> dict[str, list[Any]]:
    return {f"{within}{name}": values for name in names.split()}


def of_affixes(field: str) -> dict[str, list[Any]]:
    starts = {f"{field}.decoder_start_id": [-1, 1.5, True, "1", 300, 2**24]}
    return each("source_prefix source_suffix target_prefix", NOT_IDS, f"{field}.") | starts


# For each field: values that it must not have. `*` stands for the first item.
WRONG: dict[str, list[Any]] = {
    "surprise": [1],
    "format_version": [1, 2, 3, 5, 0, -1, 10**30, 4.0, True, None, "4", [], {}],
    "name": [*NOT_NAMES, 1, None],
    "version": ["", "a b", "a\n", "x" * 65, "../x", "\x1b", 1, None],
    "precision": ["", "fp12", "FP32", "x" * 100_000, "\ud800", 1, None],
    "weight_bits": [*NOT_COUNTS, 6, 7, 9],  # 7 goes with int8 alone
    "is_pair_safe": [*NOT_FLAGS, None, True],  # likewise
    "architecture": ["", "Transformer", "lstm", 1, None],
    "has_prompts": [*NOT_FLAGS, None, True],  # True is what no bundle with an encoder has
    "num_attention_layers": [-1, 10**30, 1.5, True, "1", [], MAX_LAYERS + 1],
    "d_model": [*NOT_COUNTS, MAX_WIDTH + 1],
    **each("num_encoder_layers num_decoder_layers", [*NOT_COUNTS, MAX_LAYERS + 1]),
    **each("source_vocab_size target_vocab_size", [*NOT_COUNTS, MAX_VOCABULARY + 1]),
    "num_choices": [*NOT_COUNTS, MAX_VOCABULARY + 1, 301],
    **each("pad_id eos_id decoder_start_id", [*NOT_COUNTS[1:], 300]),
    **each("max_source_tokens max_target_tokens default_max_new_tokens", [*NOT_COUNTS, MAX_TOKENS + 1]),
    "domain": NOT_LINES,
    "caches": [None, [], {}, [CACHE] * 2049, [CACHE, CACHE]],
    "caches.*": [None, [], {}, {"name": "x"}, CACHE | {"surprise": 1}],
    "caches.*.name": ["", "a b", "x" * 65, "Ä", "a\n", "candidate_ids", "prev_ids", 1, None],
    "caches.*.role": ["", "Self", "both", 1, None],
    "caches.*.shape": NOT_SHAPES,
    "caches.*.precision": ["", "fp32", "int8", "INT8", 8, True],  # int8 goes with int8 alone
    "template": [None, [], 1],
    **of_affixes("template"),
    "template.task": [None, 1, "\0", "\ud800", "x" * 1025],
    "languages": [[], 1, "de"],
    **each("source target", TABLES, "languages."),
    **each("source.* target.*", ITEMS, "languages."),
    "languages.default_source": [None, 1, "fr", "EN", "x" * 65],
    "languages.default_target": [None, 1, "en", "FR", "x" * 65],
    **each("source.*.code target.*.code", ["", None, 1, "x" * 65, "a\n", "-"], "languages."),
    **each("source.*.names target.*.names", [None, {}, [1], [""], ["de"] * 65, ["x" * 65]], "languages."),
    **each("source.*.label target.*.label", [None, 1, "x" * 65, "a\n"], "languages."),
    **of_affixes("languages.source.*"),
    **of_affixes("languages.target.*"),
    "defaults": [None, [], 1],
    "defaults.num_beams": [0, -1, 1.5, "1", True, 10**30],
    "defaults.num_return_sequences": [0, -1, 1.5, "1", True, 10**30, 2],
    "defaults.length_penalty": [-10.1, 10.1, "1", True, 1e300],
    **each("early_stopping do_sample", [*NOT_FLAGS, []], "defaults."),
    **each("temperature repetition_penalty", [0, -1, 101, "1", True, 1e300], "defaults."),
    "defaults.top_k": [-1, 1.5, "1", True, 301, 10**30],
    "defaults.top_p": [0, -1, 1.1, "1", True],
    "defaults.min_new_tokens": [-1, 1.5, "1", True, 20, 10**30],
    "defaults.max_new_tokens": [0, -1, 1.5, "1", True, 21, 10**30],
    "defaults.no_repeat_ngram_size": [-1, 1.5, "1", True, 21, 10**30],
    "defaults.suppressed_tokens": [None, {}, 1, [-1], [1.5], [300], [2**24], list(range(257))],
    "defaults.is_end_forced": [*NOT_FLAGS, None],
    "tensors": [None, [], {}],
    **{f"tensors.{name}": [None, {}, "x", [1], ["x" * 65], ["a\nb"], [""], ["x"] * 3000] for name in Tensors.__struct_fields__},
    "files": [None, [], {str(number): {"size": 0, "sha256": DIGEST} for number in range(1025)}],
    "files.*": [None, [], {}, {"size": 1}, {"size": 1, "sha256": DIGEST, "mode": 1}],
    "files.*.size": [-1, 10**30, 2**41, 1.5, True, None, "1"],
    "files.*.sha256": ["", "0" * 63, "0" * 65, "A" * 64, DIGEST + "\n", 0, None],
    "origin": [None, [], {}],
    "origin.weights_sha256": ["", "0" * 65, None, 0],
    **each("torch onnx", NOT_LINES, "origin."),
    "parity": [None, [], {}],
    **{f"parity.{name}": NOT_NUMBERS for name in Parity.__struct_fields__ if name.startswith(("num_", "max_", "tol"))},
    "parity.device": NOT_LINES,
    "parity.processor": NOT_LINES[:-1],
    "parity.quality": [[], {}, 1],
    **{f"parity.quality.{name}": NOT_NUMBERS for name in Quality.__struct_fields__ if "change" not in name},
    "parity.quality.agreement": [1.1, -0.1],
    **each("bleu_change chrf_change", ["1", True, [], 1e300], "parity.quality."),
}


@pytest.fixture(scope="module")
def manifest(exported: Path) -> Manifest:
    return parse_manifest((exported / MANIFEST_FILE).read_bytes(), MANIFEST_FILE)


@pytest.fixture
def good(exported: Path) -> Fields:
    """A valid manifest that has every optional part."""
    found: Fields = json.loads((exported / MANIFEST_FILE).read_text())
    found["parity"]["quality"] = dict.fromkeys(Quality.__struct_fields__, 0)
    found |= {"architecture": "transformer", "has_prompts": False, "num_attention_layers": None, "template": {}, "defaults": {}}
    found["languages"] = {"source": [{"code": "en"}, {"code": "de"}], "target": [{"code": "fr"}, {"code": "it"}]}
    assert parsed(found).name == "tiny"
    return found


def parsed(fields: Fields) -> Manifest:
    return parse_manifest(json.dumps(fields).encode(), "bundle.json")


def refusal(given: Fields | bytes) -> str:
    with pytest.raises(BundleError) as caught:
        parse_manifest(given if isinstance(given, bytes) else json.dumps(given).encode(), "bundle.json")
    message = str(caught.value)
    assert message.startswith("bundle.json: ") and message.isprintable() and message.isascii() and len(message) < 700
    return message


@pytest.mark.parametrize("field", WRONG)
def test_value_out_of_bounds_is_refused_and_its_field_named(good: Fields, field: str) -> None:
    item: Any = "decoder.weights" if field.startswith("files") else 0
    *parents, last = [item if part == "*" else part for part in field.split(".")]
    for value in WRONG[field]:
        changed = copy.deepcopy(good)
        holder = changed
        for name in parents:
            holder = holder[name]
        holder[last] = value
        message = refusal(changed).replace("format version", "format_version")
        assert (last if isinstance(last, str) else parents[0]) in message, value


LIST = list(range(64))
MANY_CACHES = msgspec.to_builtins(attention_caches(MAX_LAYERS, 4, 8))
SUPPRESSED = "suppressed_tokens of defaults leave nothing of 2 tokens"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"template": {"source_prefix": LIST[:23]}}, "put 23 tokens around a source, which may have 24"),
        ({"template": {"source_suffix": LIST[:23]}}, "put 23 tokens around a source, which may have 24"),
        ({"template": {"target_prefix": LIST[:20]}}, "force 20 tokens of a target, which may have 20"),
        ({"template": {"target_prefix": LIST[:1]}}, "default_max_new_tokens 20 and 1 forced tokens are over max_target_tokens 20"),
        ({"default_max_new_tokens": 5, "defaults": {"min_new_tokens": 5}}, "min_new_tokens of defaults is 5, which is not"),
        ({"default_max_new_tokens": 21}, "default_max_new_tokens 21"),
        ({"num_choices": 2, "defaults": {"suppressed_tokens": [3, 4]}}, SUPPRESSED),
        ({"num_choices": 2, "defaults": {"suppressed_tokens": [3, 3], "min_new_tokens": 1}}, SUPPRESSED),
        ({"source_vocab_size": 1, "eos_id": 1}, "eos_id 1 is outside the vocabulary of 1"),
        ({"pad_id": 1, "eos_id": 1}, "pad_id and eos_id are both 1"),
        ({"num_choices": 301}, "num_choices 301 is over the vocabulary of 300"),
        ({"format_version": FORMAT_VERSION - 1, "later": 1}, "format version 3, but this release reads 4; export the checkpoint"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(good: Fields, changes: Fields, reason: str) -> None:
    assert reason in refusal(good | changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.pop("eos_id"), "eos_id"),
        (lambda m: m.update(format_version=FORMAT_VERSION + 1, later=1), "format version 5, but this release reads 4"),
        (lambda m: m["caches"].insert(0, m["caches"].pop()), "caches that steps write come before those that the encoder gives"),
        (lambda m: m["caches"][1].update(name="self_k_0"), '"self_k_0" twice'),
        (lambda m: m["caches"][1].update(name="self_k_0_out"), '"self_k_0_out" twice'),
        (lambda m: m["caches"][0].update(name="mine"), "tensors.decoder_inputs lacks mine"),
        (lambda m: m["caches"].pop(), "tensors.decoder_inputs has unknown cross_v_1"),
        (lambda m: m["caches"][-1].update(shape=[4, "T", 8]), "shape of cross_v_1 may have 'S' once, not 'T'"),
        (lambda m: m["caches"][0].update(shape=["T", 4, "T"]), "shape of self_k_0 may have 'T' once, not 'T', 'T'"),
        (lambda m: m["caches"][0].update(shape=[65536, "T", 2]), "shape of self_k_0 has 131072 numbers a position, over 65536"),
        (lambda m: m["tensors"]["encoder_outputs"].append("memory"), "tensors.encoder_outputs has unknown memory"),
        (lambda m: m["tensors"].update(decoder_outputs=m["tensors"]["decoder_outputs"] * 2), "decoder_outputs has a tensor twice"),
        (lambda m: m.update(alignment=[{"layer": 0, "head": 0}]), "tensors.decoder_outputs lacks alignment_queries"),
        (lambda m: m.update(num_choices=200), "tensors.decoder_outputs has unknown all_log_probs"),
        (lambda m: m.update(alignment=[{"layer": 2, "head": 0}]), "alignment has layer 2, head 0, whose keys are in no cache"),
        (lambda m: m.update(alignment=[{"layer": 0, "head": 4}]), "alignment has layer 0, head 4, whose keys are in no cache"),
        (lambda m: m.update(caches=MANY_CACHES), "decoder_inputs lacks self_k_2, self_v_2, self_k_3, self_v_3, self_k_4 and 2035"),
        (lambda m: m["files"]["decoder.onnx"].update(size=2**31), "decoder.onnx has 2147483648 bytes"),
        (lambda m: m["files"]["tokenizer/tokenizer.json"].update(size=2**26 + 1), "tokenizer/tokenizer.json has 67108865 bytes"),
        (lambda m: [m["files"][f"{x}.weights"].update(size=2**39 + 1) for x in ("decoder", "encoder")], "bytes together"),
        *((lambda m, path=path: m["files"].update({path: ENTRY}), "which is not a path inside the bundle") for path in NOT_PATHS),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(good: Fields, change: Callable[[Fields], object], reason: str) -> None:
    change(good)
    assert reason in refusal(good)


def test_tokens_that_languages_add_are_counted_on_their_side(good: Fields) -> None:
    """A source has the target language's prefix and the source language's affixes, an answer the target language's prefix."""
    good |= {"default_max_new_tokens": 10, "template": {"source_prefix": LIST[:2], "target_prefix": LIST[:2]}}
    source = {"code": "en", "source_prefix": LIST[:10], "source_suffix": LIST[:3], "target_prefix": LIST[:30]}
    target = {"code": "fr", "source_prefix": LIST[:7], "source_suffix": LIST[:30], "target_prefix": LIST[:8]}
    good["languages"] = {"source": [{"code": "x"}, source], "target": [target, {"code": "y"}]}
    assert parsed(good).languages is not None
    source["source_suffix"] = LIST[:4]
    assert "put 23 tokens around a source" in refusal(good)
    source["source_suffix"], target["target_prefix"] = LIST[:3], LIST[:9]
    assert "default_max_new_tokens 10 and 11 forced tokens" in refusal(good)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda text: b"\xef\xbb\xbf" + text, "BOM"),
        (lambda text: text + b"\xff", "utf-8"),
        (lambda text: b"[" * 100_000, "nested too deeply"),
        (lambda text: text.replace(b'"name"', b'"name": "other", "name"', 1), '"name" is said twice'),
        (lambda text: text.replace(b'"size"', b'"size": 1, "size"', 1), '"size" is said twice'),
        (lambda text: text.replace(b'"tolerance": ', b'"tolerance": NaN, "was": '), "NaN is no number"),
        (lambda text: text.replace(b'"tolerance": ', b'"tolerance": -Infinity, "was": '), "-Infinity is no number"),
        (lambda text: text.replace(b'"tolerance": ', b'"tolerance": 1e999, "was": '), "tolerance"),
        (lambda text: text.replace(b'"d_model": ', b'"d_model": ' + b"9" * 5000 + b', "was": '), "not a bundle's manifest"),
        (lambda text: text.replace(b'"name"', b'"' + b"\\n" * 1000 + b'": 1, "name"', 1), "unknown field"),
        (lambda text: b"", "not a bundle's manifest"),
        (lambda text: b"{", "not a bundle's manifest"),
        (lambda text: b"[]", "not a JSON object"),
        (lambda text: b'{"format_version": 4}', "not a bundle's manifest"),
    ],
)
def test_json_that_is_no_manifest_is_refused(exported: Path, make: Callable[[bytes], bytes], reason: str) -> None:
    assert reason in refusal(make((exported / MANIFEST_FILE).read_bytes()))


def test_manifest_of_the_largest_model_can_be_read_and_a_larger_file_is_refused(exported: Path, tmp_path: Path) -> None:
    content, path = (exported / MANIFEST_FILE).read_bytes(), tmp_path / MANIFEST_FILE
    path.write_bytes(content + b" " * (MAX_MANIFEST_BYTES - len(content)))
    assert parse_manifest(read_manifest_bytes(path), path).name == "tiny"
    path.write_bytes(content + b" " * (MAX_MANIFEST_BYTES - len(content) + 1))
    with pytest.raises(BundleError, match=f"more than {MAX_MANIFEST_BYTES} bytes"):
        read_manifest_bytes(path)
    largest = msgspec.to_builtins([Tensors.of_layers(MAX_LAYERS), attention_caches(MAX_LAYERS, 64, 128)])
    assert len(json.dumps(largest, indent=2)) < MAX_MANIFEST_BYTES * 3 / 4
    assert msgspec.convert(largest[0], Tensors) == Tensors.of_layers(MAX_LAYERS)


def test_export_refuses_the_names_that_a_server_refuses() -> None:
    for name in NOT_NAMES:
        with pytest.raises(ExportError, match="name must"):
            check_name(name)
    for name in ("en-de", "base_endless.v2", "3", "x" * 128, "Liveness2", "dragoman", "grpc"):
        check_name(name)


LIMITS = {"num_decoder_layers": MAX_LAYERS, "max_source_positions": MAX_TOKENS, "source_vocab_size": MAX_VOCABULARY}
LIMITS |= {"d_model": MAX_WIDTH}


@pytest.mark.parametrize("field", LIMITS)
def test_export_refuses_the_dimensions_that_a_server_refuses(field: str) -> None:
    fields: Fields = {"source_vocab_size": 300, "target_vocab_size": 300, "is_embedding_shared": False}
    check_dimensions(ModelConfig(**fields | {field: LIMITS[field]}))
    with pytest.raises(ExportError, match="the model cannot be served: Expected `int` <="):
        check_dimensions(ModelConfig(**fields | {field: 2 * LIMITS[field]}))


@pytest.fixture
def of_prompts(good: Fields) -> Fields:
    """A valid manifest whose encoder reads prompts and whose scorer gives no attention."""
    caches = [cache for cache in attention_caches(2, 4, 8) if cache.role == "self"]
    tensors = Tensors.of_caches(caches, has_prompts=True, has_attention=False)
    good |= {"architecture": "decoder", "has_prompts": True, "num_attention_layers": 0, "num_encoder_layers": 0}
    good |= {"max_source_tokens": 20, "caches": msgspec.to_builtins(caches), "tensors": msgspec.to_builtins(tensors)}
    found = parsed(good)
    assert (found.has_prompts, found.attention_layers, found.num_encoder_layers) == (True, 0, 0)
    return good


GIVEN = {"name": "cross_k_0", "role": "cross", "shape": [4, "S", 8]}
STATE = {"name": "memory", "role": "self", "shape": [8]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_prompts": False}, "num_encoder_layers is 0, which goes with has_prompts"),
        ({"has_prompts": False, "num_encoder_layers": 2}, "caches has none that the encoder gives, which goes with has_prompts"),
        ({"caches": [CACHE, GIVEN]}, "caches has cross_k_0, which an encoder gives; with has_prompts there is none"),
        ({"source_vocab_size": 299}, "source_vocab_size 299 is not target_vocab_size 300"),
        ({"max_source_tokens": 21, "max_target_tokens": 20}, "max_source_tokens 21 is over max_target_tokens 20; with has_prompts"),
        ({"caches": [CACHE, STATE]}, "caches has memory without positions; with has_prompts each has those of a prompt"),
        ({"precision": "fp16"}, "has_prompts goes with fp32 and int8, not fp16"),
        ({"num_attention_layers": 1}, "tensors.scorer_outputs lacks attention"),
        ({"num_attention_layers": None}, "tensors.scorer_outputs lacks attention"),
    ],
)
def test_fields_that_do_not_go_with_prompts_are_refused(of_prompts: Fields, change: Fields, reason: str) -> None:
    assert reason in refusal(of_prompts | change)


def test_caches_of_the_encoder_have_one_precision(good: Fields) -> None:
    for cache in good["caches"][:-1]:
        cache["precision"] = "int8"
    assert "caches that the encoder gives have different precisions" in refusal(good | {"precision": "int8"})


def test_manifest_of_an_older_bundle_without_all_log_probabilities_is_read(good: Fields) -> None:
    good["tensors"]["decoder_outputs"].remove(LOG_PROBS_OUTPUT)
    assert LOG_PROBS_OUTPUT not in parsed(good).tensors.decoder_outputs


def test_manifest_of_recurrent_states_is_read(good: Fields) -> None:
    caches = [Cache("state_0", "self", [8]), Cache("start_0", "cross", [8]), Cache("values", "cross", ["S", 8])]
    said = {"architecture": "rnn", "num_attention_layers": 1, "tensors": msgspec.to_builtins(Tensors.of_caches(caches))}
    found = parsed(good | said | {"caches": msgspec.to_builtins(caches)})
    assert (found.has_prompts, found.attention_layers, found.num_decoder_layers) == (False, 1, 2)


def test_manifest_survives_a_round_trip_and_omits_what_a_transformer_does_not_need(exported: Path, manifest: Manifest) -> None:
    said = json.loads((exported / MANIFEST_FILE).read_text())
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
    assert not {"architecture", "has_prompts", "num_attention_layers"} & said.keys() and told(manifest) == said
    for change in ({"architecture": "rnn"}, {"num_attention_layers": 1}):
        other = msgspec.structs.replace(manifest, **change)
        assert change.items() <= told(other).items() and content_version(other) != manifest.version


def test_version_follows_what_the_model_answers_and_nothing_else(manifest: Manifest) -> None:
    def version(**changes: Any) -> str:
        return content_version(msgspec.structs.replace(manifest, **changes))

    def other(path: str) -> Fields:
        return {"files": manifest.files | {path: msgspec.structs.replace(manifest.files[path], sha256="0" * 64)}}

    def without(path: str) -> Fields:
        return {"files": {name: entry for name, entry in manifest.files.items() if name != path}}

    same: list[Fields] = [
        {},
        {"name": "other"},
        {"domain": "other"},
        {"one_sentence": True},
        {"files": dict(reversed(manifest.files.items()))},
    ]
    same += [change(path) for path in (PARITY_FILE, SAMPLES_FILE, CARD_FILE) for change in (other, without)]
    assert {version(**change) for change in same} == {manifest.version}
    changed: list[Fields] = [other("decoder.weights"), other("tokenizer/tokenizer.json"), {"decoder_start_id": 3}]
    assert len({manifest.version, *(version(**change) for change in changed)}) == 4


def test_version_of_an_old_manifest_with_required_fields_alone_has_not_changed() -> None:
    parity = dict.fromkeys((name for name in Parity.__struct_fields__ if name.startswith("num_")), 1)
    parity |= {"num_token_mismatches": 0, "tolerance": 1.0}
    parity |= dict.fromkeys((name for name in Parity.__struct_fields__ if name.startswith("max_")), 0.0)
    least = {
        "format_version": 4,
        **each("name version", "x"),  # type: ignore[arg-type]
        "precision": "fp32",
        "d_model": 8,
        **each("num_encoder_layers num_decoder_layers", 1),  # type: ignore[arg-type]
        **each("source_vocab_size target_vocab_size num_choices", 3),  # type: ignore[arg-type]
        **{"pad_id": 0, "eos_id": 1, "decoder_start_id": 2},
        **each("max_source_tokens max_target_tokens default_max_new_tokens", 4),  # type: ignore[arg-type]
        "caches": msgspec.to_builtins(attention_caches(1, 1, 8)),
        "tensors": msgspec.to_builtins(Tensors.of_layers(1)),
        "files": {"encoder.onnx": {"size": 1, "sha256": DIGEST}},
        "origin": {"weights_sha256": DIGEST, "torch": "2", "onnx": "1"},
        "parity": parity,
    }
    found = parsed(least)
    assert (content_version(found), found.domain) == ("a2f50c008db8", "")


PACKED = ["src_ids", "positions", "cells", "grid", "src_lens"]
PADDED = ["src_ids", "src_lens"]
STEP = ["prev_ids", "positions", "src_lens", "num_candidates"]
CANDIDATES = ["candidate_ids", "candidate_log_probs"]
STATES = [Cache("state_even_0", "self", [8]), Cache("state_odd_0", "self", [8])]
STATES_OUT = ["state_even_0_out", "state_odd_0_out"]
START, KEYS, VALUES = Cache("start_0", "cross", [8]), Cache("keys", "cross", ["S", 6]), Cache("values", "cross", ["S", 8])
CROSS = ["cross_k_0", "cross_v_0", "cross_k_1", "cross_v_1"]
SELF = ["self_k_0", "self_v_0", "self_k_1", "self_v_1"]
SELF_OUT = [f"{name}_out" for name in SELF]
TEXT = [cache for cache in attention_caches(2, 2, 8) if cache.role == "self"]


RNN_STEP = [*STEP, "state_even_0", "state_odd_0", "start_0"]
TENSORS = [
    (Tensors.of_layers(2), PACKED, ["cross_kv"], [*STEP, *SELF, *CROSS], SELF_OUT, True),
    (Tensors.of_layers(2, False), PADDED, CROSS, [*STEP, *SELF, *CROSS], SELF_OUT, True),
    (Tensors.of_caches([*STATES, START]), PACKED, ["source_states"], RNN_STEP, STATES_OUT, True),
    (
        *(Tensors.of_caches([*STATES, START, KEYS, VALUES], has_attention=False), PACKED, ["cross_kv", "source_states"]),
        *([*RNN_STEP, "keys", "values"], STATES_OUT, False),
    ),
    (
        *(Tensors.of_caches([*STATES, START, KEYS], is_packed=False), PADDED, ["start_0", "keys"]),
        *([*RNN_STEP, "keys"], STATES_OUT, True),
    ),
    (
        *(Tensors.of_caches(TEXT, has_prompts=True, has_attention=False), ["src_ids", "positions", "src_lens", *SELF], SELF_OUT),
        *([*STEP, *SELF], SELF_OUT, False),
    ),
]


@pytest.mark.parametrize(("tensors", "inputs", "outputs", "step_inputs", "written", "has_attention"), TENSORS)
def test_names_follow_from_caches(
    tensors: Tensors, inputs: list[str], outputs: list[str], step_inputs: list[str], written: list[str], has_attention: bool
) -> None:
    assert (tensors.encoder_inputs, tensors.encoder_outputs) == (inputs, outputs)
    assert (tensors.decoder_inputs, tensors.decoder_outputs) == (step_inputs, [*CANDIDATES, *written])
    assert tensors.scorer_inputs == ["src_ids", "src_lens", "tgt_ids", "tgt_lens", "labels"]
    assert tensors.scorer_outputs == ["label_log_probs", *["attention"] * has_attention]
    assert Tensors.of_caches(attention_caches(2, 2, 8)) == Tensors.of_layers(2)
