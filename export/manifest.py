"""The manifest of a bundle, `bundle.json`: its fields, how they fit together, and how it is read.

Export and server both use these checks, so nothing is exported that a server would refuse. `bundle.py` compares a manifest with the
files that it lists.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta, Struct

from dragoman.export.fields import (
    MAX_BUNDLE_BYTES,
    MAX_FILES,
    MAX_GRAPH_BYTES,
    MAX_LAYERS,
    MAX_NAME_CHARACTERS,
    MAX_PATH_CHARACTERS,
    MAX_PATH_PARTS,
    MAX_SAMPLES_BYTES,
    MAX_WIDTH,
    BundleError,
    Digest,
    Layers,
    Length,
    Line,
    Precision,
    TokenId,
    Version,
    Vocabulary,
    WeightBits,
    Width,
    listed,
    one_line,
    shown,
)
from dragoman.export.proof.report import Parity
from dragoman.export.tensors import (
    LOG_PROBS_OUTPUT,
    CacheList,
    Tensors,
    check_caches,
    check_tensors,
    cross_key_name,
    is_packed,
    names_of,
)
from dragoman.model.card import MAX_CARD_BYTES
from dragoman.model.config import Architecture
from dragoman.model.files import read_given
from dragoman.model.generation import Affixes, Defaults, Language, Languages, Template, num_forced
from dragoman.model.text.tokenizer import MAX_FILE_BYTES as MAX_TOKENIZER_BYTES

FORMAT_VERSION = 4
MAX_ALIGNMENT_HEADS = 8
MANIFEST_FILE = "bundle.json"
PARITY_FILE = "parity.json"
# Answers that a running engine has to give again, see `samples`.
SAMPLES_FILE = "samples.json"
# The checkpoint's card, for people.
CARD_FILE = "card.md"
TOKENIZER_DIRECTORY = "tokenizer"

# gRPC health answers for these beside the models' own names.
RESERVED_NAMES = frozenset({"liveness", "readiness", "inference.grpcinferenceservice"})
RESERVED_PREFIXES = ("dragoman.v", "grpc.")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PATH_PART = re.compile(r"[A-Za-z0-9._+@=-]+")
# Fields that are left out where they have their default values, so that the bundles of a Transformer are what they ever were.
_LATER_FIELDS = (
    "architecture",
    "has_prompts",
    "is_pair_safe",
    "num_attention_layers",
    "alignment",
    "can_skip_log_probs",
    "one_sentence",
)
MAX_MANIFEST_BYTES = 1 << 20


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and SHA-256 of one file."""

    size: Annotated[int, Meta(ge=0, le=MAX_BUNDLE_BYTES)]
    sha256: Digest


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """Origin of a bundle: the SHA-256 of the checkpoint's weights and the libraries that exported them."""

    weights_sha256: Digest
    torch: Line
    onnx: Line


class Dimensions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model's sizes and tokens, as the manifest has them."""

    d_model: Width  # width of the residual streams
    # Encoder depth; 0 where there is no encoder, which is so of prompts alone.
    num_encoder_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    num_decoder_layers: Layers  # decoder depth (L)
    source_vocab_size: Vocabulary  # ids of the source are below it
    target_vocab_size: Vocabulary  # V
    pad_id: TokenId  # fills short rows; never a candidate
    eos_id: TokenId  # ends sources and targets
    decoder_start_id: TokenId  # the first `prev_ids`
    max_source_tokens: Length  # longest source, end-of-sequence included
    # Most tokens that can be generated, end-of-sequence included; no cache needs more room (T). Where the source is a prompt, its
    # tokens count, too.
    max_target_tokens: Length
    default_max_new_tokens: Length  # tokens generated at the most when a request does not say

    def __post_init__(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            ValueError: Naming them.
        """
        if self.default_max_new_tokens > self.max_target_tokens:
            raise ValueError(
                f"default_max_new_tokens {self.default_max_new_tokens} is over max_target_tokens {self.max_target_tokens}"
            )
        both = min(self.source_vocab_size, self.target_vocab_size)
        for field, size in (("pad_id", both), ("eos_id", both), ("decoder_start_id", self.target_vocab_size)):
            if getattr(self, field) >= size:
                raise ValueError(f"{field} {getattr(self, field)} is outside the vocabulary of {size}")
        if self.pad_id == self.eos_id:
            raise ValueError(f"pad_id and eos_id are both {self.eos_id}: padding is never a candidate, so nothing would end")


class AlignmentHead(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A head of encoder-decoder attention that aligns tokens of target and source."""

    layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
    head: Annotated[int, Meta(ge=0, lt=MAX_WIDTH)]
    is_next: bool = False  # whether a token is aligned by the step that reads it, not by the step that generates it


class Manifest(Dimensions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of `bundle.json`, beside the model's dimensions."""

    format_version: int = FORMAT_VERSION  # of the bundle format
    name: str  # of the model; see `check_name`
    version: Version  # see `content_version`
    precision: Precision  # of weights, caches and arithmetic; caches of an int8 bundle say their own
    weight_bits: WeightBits = 8  # Of the weights of 8-bit products; 7 in older bundles alone.
    # Whether the fast 8-bit kernels of every processor are exact with these weights, see `quantize`; older bundles do not say.
    is_pair_safe: bool = False
    architecture: Architecture = "transformer"  # of the model, for people to read; what follows from it, other fields say
    # Whether a source is a prompt: the encoder's graph writes the caches that steps write, and the room T of a row holds source and
    # answer together.
    has_prompts: bool = False
    # Layers of the attention that the scorer tells; None for as many as the decoder has, 0 where it tells none.
    num_attention_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)] | None = None
    # Heads whose queries the decode step outputs, see `export.alignment`; none in older bundles and in those for devices.
    alignment: Annotated[tuple[AlignmentHead, ...], Meta(max_length=MAX_ALIGNMENT_HEADS)] = ()
    # Whether a decode step takes 0 for `num_candidates`: the likeliest token without its log-probability; not in older bundles.
    can_skip_log_probs: bool = False
    # Caches of a row, in the graphs' order: those that steps write, then those of the encoder.
    caches: CacheList
    num_choices: Vocabulary  # tokens that a step chooses from: V, or the length of the model's shortlist
    tensors: Tensors  # inputs and outputs of the graphs
    # Every file of the bundle but the manifest, by its path relative to the bundle, with forward slashes.
    files: Annotated[dict[str, FileEntry], Meta(max_length=MAX_FILES)]
    origin: Origin  # where it came from
    parity: Parity  # closeness to the checkpoint
    domain: Line = ""  # domain of text, from the card; empty where it names none
    one_sentence: bool = False  # whether it knows one sentence at a time, as its card says
    template: Template = Template()  # tokens around every text
    languages: Languages | None = None  # those it reads and writes; None where it is not told them
    defaults: Defaults = Defaults()  # values for fields that a request leaves out

    def __post_init__(self) -> None:
        """Refuse a name, paths, sizes and tensors that no bundle can have, and fields that contradict each other.

        Raises:
            ValueError: Naming them.
        """
        Dimensions.__post_init__(self)
        check_name(self.name)
        for path, entry in self.files.items():
            _check_entry(path, entry)
        if (total := sum(entry.size for entry in self.files.values())) > MAX_BUNDLE_BYTES:
            raise ValueError(f"files are {total} bytes together; at most {MAX_BUNDLE_BYTES} are allowed")
        if self.num_choices > self.target_vocab_size:
            raise ValueError(f"num_choices {self.num_choices} is over the vocabulary of {self.target_vocab_size}")
        self._check_generation()
        self._check_precision()
        check_caches(self.caches)
        self._check_source()
        self._check_alignment()
        is_whole = self.num_choices == self.target_vocab_size  # without a shortlist
        expected = Tensors.of_caches(
            self.caches,
            self.is_packed,
            has_prompts=self.has_prompts,
            has_attention=self.attention_layers > 0,
            has_queries=bool(self.alignment),
            has_log_probs=is_whole and LOG_PROBS_OUTPUT in self.tensors.decoder_outputs,  # not of older bundles
        )
        check_tensors(self.tensors, expected)

    @property
    def is_packed(self) -> bool:
        """Whether the encoder takes sources packed, see `is_packed`."""
        return is_packed(self.precision)

    @property
    def attention_layers(self) -> int:
        """Layers of the attention that the scorer tells."""
        return self.num_decoder_layers if self.num_attention_layers is None else self.num_attention_layers

    @property
    def num_weight_bytes(self) -> int:
        """Size of its weights."""
        return sum(entry.size for path, entry in self.files.items() if path.endswith(".weights"))

    @property
    def cache_precision(self) -> Precision:
        """Number format of its caches: 8 bits if any has them, or that of the arithmetic between products."""
        if any(cache.precision is not None for cache in self.caches):
            return "int8"
        return "fp32" if self.precision == "int8" else self.precision

    @property
    def can_overflow(self) -> bool:
        """Whether its products may overflow on processors that sum pairs in 16 bits: 2 · 255 · 127 is more than they hold."""
        return self.precision == "int8" and self.weight_bits == 8 and not self.is_pair_safe

    def _check_precision(self) -> None:
        """Refuse fewer bits in a bundle that is not of 8-bit products, and several kinds of numbers in an encoder's one output."""
        if self.is_packed and len({cache.precision for cache in self.caches if cache.role == "cross"}) > 1:
            raise ValueError("caches that the encoder gives have different precisions")
        if self.precision == "int8":
            return
        if self.weight_bits != 8:
            raise ValueError(f"weight_bits {self.weight_bits} go with int8, not {self.precision}")
        if self.is_pair_safe:
            raise ValueError(f"is_pair_safe goes with int8, not {self.precision}")
        if any(cache.precision is not None for cache in self.caches):
            raise ValueError(f"caches have precision int8 in a bundle of int8 alone, not in {self.precision}")

    def _check_alignment(self) -> None:
        """Refuse heads that no cache has the keys of."""
        shapes = {cache.name: cache.shape for cache in self.caches if cache.position_axis == 1 and len(cache.shape) == 3}
        found = [shapes.get(cross_key_name(head.layer), [0, 0, 0]) for head in self.alignment]
        for head, (num_heads, _, width) in zip(self.alignment, found, strict=True):
            if not self.is_packed or head.head >= int(num_heads) or width != found[0][2]:
                raise ValueError(f"alignment has layer {head.layer}, head {head.head}, whose keys are in no cache")

    def _check_source(self) -> None:
        """Refuse prompts that others than steps read, and sources that nothing reads."""
        given = names_of(self.caches, "cross")
        if not self.has_prompts:
            if not self.num_encoder_layers:
                raise ValueError("num_encoder_layers is 0, which goes with has_prompts")
            if not given:
                raise ValueError("caches has none that the encoder gives, which goes with has_prompts")
            return
        if given:
            raise ValueError(f"caches has {listed(given)}, which an encoder gives; with has_prompts there is none")
        if self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                f"source_vocab_size {self.source_vocab_size} is not target_vocab_size {self.target_vocab_size}; with has_prompts "
                "what is read is what is written"
            )
        if states := [cache.name for cache in self.caches if cache.position_axis is None]:
            raise ValueError(f"caches has {listed(states)} without positions; with has_prompts each has those of a prompt")
        if self.max_source_tokens > self.max_target_tokens:
            raise ValueError(
                f"max_source_tokens {self.max_source_tokens} is over max_target_tokens {self.max_target_tokens}; with has_prompts "
                "a prompt is part of that"
            )
        if not self.is_packed:
            raise ValueError(f"has_prompts goes with fp32 and int8, not {self.precision}")

    def _check_generation(self) -> None:
        """Refuse a template, languages and defaults that the model cannot do."""
        read, written = ([], []) if self.languages is None else (self.languages.source, self.languages.target)
        self._check_ids(read, written)
        of_read = max((len(language.source_prefix) + len(language.source_suffix) for language in read), default=0)
        of_written = max((len(language.source_prefix) for language in written), default=0)
        around = len(self.template.source_prefix) + len(self.template.source_suffix) + of_read + of_written
        if around and around + 2 > self.max_source_tokens:  # no room for one token and end-of-sequence
            raise ValueError(f"template and languages put {around} tokens around a source, which may have {self.max_source_tokens}")
        forced = num_forced(self.template, self.languages)
        if forced + 1 > self.max_target_tokens:
            raise ValueError(f"template and languages force {forced} tokens of a target, which may have {self.max_target_tokens}")
        if self.default_max_new_tokens + forced > self.max_target_tokens:
            raise ValueError(
                f"default_max_new_tokens {self.default_max_new_tokens} and {forced} forced tokens are over max_target_tokens "
                f"{self.max_target_tokens}"
            )
        self._check_defaults(forced)

    def _check_ids(self, read: Sequence[Language], written: Sequence[Language]) -> None:
        """Refuse tokens around a text that the model does not have."""
        named: list[tuple[str, Affixes]] = [("template", self.template)]
        named += [(f"source language {language.code!r}", language) for language in read]
        named += [(f"target language {language.code!r}", language) for language in written]
        for name, affixes in named:
            _check_below(f"source_prefix of {name}", affixes.source_prefix, self.source_vocab_size)
            _check_below(f"source_suffix of {name}", affixes.source_suffix, self.source_vocab_size)
            _check_below(f"target_prefix of {name}", affixes.target_prefix, self.target_vocab_size)
            start = affixes.decoder_start_id
            _check_below(f"decoder_start_id of {name}", [] if start is None else [start], self.target_vocab_size)

    def _check_defaults(self, forced: int) -> None:
        """Refuse defaults that a request could not ask for, whose answer is forced to begin with so many tokens."""
        defaults, longest = self.defaults, self.max_target_tokens
        limits = {"max_new_tokens": longest - forced, "no_repeat_ngram_size": longest, "top_k": self.target_vocab_size}
        for name, most in limits.items():
            value = getattr(defaults, name)
            if value is not None and value > most:
                raise ValueError(f"{name} of defaults is {value}; at most {most} are possible")
        most = self.default_max_new_tokens if defaults.max_new_tokens is None else defaults.max_new_tokens
        min_new_tokens = defaults.min_new_tokens or 0
        if min_new_tokens >= most:
            raise ValueError(f"min_new_tokens of defaults is {min_new_tokens}, which is not less than max_new_tokens, {most}")
        suppressed = set(defaults.suppressed_tokens)
        _check_below("suppressed_tokens of defaults", suppressed, self.target_vocab_size)
        if len(suppressed) + (min_new_tokens > 0) >= self.num_choices:
            raise ValueError(f"suppressed_tokens of defaults leave nothing of {self.num_choices} tokens")


def check_name(name: str) -> None:
    """Refuse a name that a model cannot be served by: health services, labels of metrics and folders bear it.

    Raises:
        ValueError: If it is one.
    """
    if len(name) > MAX_NAME_CHARACTERS or _NAME.fullmatch(name) is None:
        rule = f"letters, digits, '.', '_' and '-', at most {MAX_NAME_CHARACTERS} of them"
        raise ValueError(f"name must be {rule}, and begin with a letter or a digit, not {shown(name)}")
    if name.lower() in RESERVED_NAMES or name.lower().startswith(RESERVED_PREFIXES):
        raise ValueError(f"name must not be {name!r}: gRPC health answers for it already")


def _check_entry(path: str, entry: FileEntry) -> None:
    """Refuse a path that leads out of the bundle, that is another path's second spelling, or that no file system has, and sizes."""
    parts = path.split("/")
    if len(path) > MAX_PATH_CHARACTERS or len(parts) > MAX_PATH_PARTS or {".", ".."} & set(parts) or path == MANIFEST_FILE:
        raise ValueError(f"files has {shown(path)}, which is not a path inside the bundle")
    if not all(map(_PATH_PART.fullmatch, parts)):
        raise ValueError(f"files has {shown(path)}, which is not a path inside the bundle")
    is_of_tokenizer = parts[0] == TOKENIZER_DIRECTORY
    limit = MAX_TOKENIZER_BYTES if is_of_tokenizer else MAX_GRAPH_BYTES if path.endswith(".onnx") else MAX_BUNDLE_BYTES
    limit = {SAMPLES_FILE: MAX_SAMPLES_BYTES, CARD_FILE: MAX_CARD_BYTES}.get(path, limit)
    if entry.size > limit:
        raise ValueError(f"files says that {path} has {entry.size} bytes; at most {limit} are allowed")


def told(manifest: Manifest) -> dict[str, Any]:
    """Return what `bundle.json` says, ready for JSON."""
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    defaults = {field.name: field.default for field in msgspec.structs.fields(Manifest)}
    return {name: value for name, value in fields.items() if name not in _LATER_FIELDS or value != defaults[name]}


def content_version(manifest: Manifest) -> str:
    """Return the version that a manifest's content gives: the first 12 hex digits of a SHA-256.

    It covers every file and every setting, so that the same model always has the same version and another model never does. The
    name, the origin, the parity report, the sample answers, the card, the domain and `one_sentence` are left out: they
    change nothing of what it answers.
    """
    tells = PARITY_FILE, SAMPLES_FILE, CARD_FILE
    files = {path: entry.sha256 for path, entry in sorted(manifest.files.items()) if path not in tells}
    settings = told(manifest)
    for field in ("name", "version", "files", "origin", "parity", "domain", "one_sentence"):
        settings.pop(field, None)
    return hashlib.sha256(msgspec.json.encode([settings, files], order="sorted")).hexdigest()[:12]


def _check_below(field: str, ids: Iterable[int], vocab_size: int) -> None:
    if (largest := max(ids, default=-1)) >= vocab_size:
        raise ValueError(f"{field} has {largest}, which is outside the vocabulary of {vocab_size}")


def read_manifest_bytes(path: Path) -> bytes:
    """Return what `bundle.json` holds, for one who checks or compares it before it is believed.

    Raises:
        BundleError: If it is missing, cannot be read, or is larger than any manifest.
    """
    return read_given(path, MAX_MANIFEST_BYTES, BundleError)


def parse_manifest(content: bytes, path: Path | str) -> Manifest:
    """Return what the bytes of a manifest say.

    Args:
        content: The bytes.
        path: Where they were read, for messages.

    Raises:
        BundleError: If they are of another format version, or not a manifest; it names the field.
    """
    try:
        fields = _parse(content)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
        raise BundleError(f"{path}: not a bundle's manifest: {reason}") from error
    found = fields.get("format_version")
    if type(found) is not int or found != FORMAT_VERSION:
        raise BundleError(f"{path}: format version {shown(found)}, but this release reads {FORMAT_VERSION}{_advice(found)}")
    try:
        return msgspec.convert(fields, Manifest)
    except msgspec.ValidationError as error:
        raise BundleError(f"{path}: not a bundle's manifest: {_explain(error, fields)}") from error


def _advice(found: object) -> str:
    """Return what to do about another format version."""
    return "; export the checkpoint again" if type(found) is int and 0 < found < FORMAT_VERSION else ""


def _parse(content: bytes) -> dict[str, Any]:
    """Return what a JSON object holds that says nothing twice, and no number that JSON does not have."""
    fields = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{shown(name)} is said twice")
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            raise ValueError(f"{shown(name)} is no Unicode text")
        fields[name] = value
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _explain(error: msgspec.ValidationError, fields: dict[str, Any]) -> str:
    """Return what is wrong; msgspec does not say of which file."""
    for path, entry in fields["files"].items() if "$.files[...]" in str(error) else ():
        try:
            msgspec.convert(entry, FileEntry)
        except msgspec.ValidationError as reason:
            wrong, _, field = str(reason).partition(" - at `$")
            return f"{one_line(wrong)} - at `$.files[{shown(path)}]{field or '`'}"
    return one_line(str(error))
