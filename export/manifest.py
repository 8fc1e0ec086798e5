"""The manifest of a bundle, `bundle.json`: its fields, and the bounds of each.

Export and server both ask here what a field may hold, so that nothing is exported that a server would refuse. The bounds are far
beyond any model there is: with them a damaged or hostile manifest is refused before anything is made of it. `bundle.py` compares a
manifest with the files that it lists.
"""

import hashlib
import json
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from dragoman.export.tensor_names import TensorNames
from dragoman.model.card import MAX_DOMAIN_CHARACTERS
from dragoman.model.errors import InputError
from dragoman.model.text.reading import MAX_FILE_BYTES as MAX_TOKENIZER_BYTES

FORMAT_VERSION = 2
MANIFEST_FILE = "bundle.json"
PARITY_FILE = "parity.json"
TOKENIZER_DIRECTORY = "tokenizer"

MAX_LAYERS = 512
MAX_WIDTH = 1 << 16
MAX_VOCABULARY = 1 << 24
MAX_TOKENS = 1 << 20
MAX_FILES = 1024
MAX_PATH_CHARACTERS = 255
MAX_PATH_PARTS = 8
MAX_BUNDLE_BYTES = 1 << 40
MAX_GRAPH_BYTES = (1 << 31) - 1  # what a protobuf message can be
MAX_NAME_CHARACTERS = 128
# No graph has more inputs or outputs than a decode step with this many layers.
MAX_TENSORS = 4 * MAX_LAYERS + 8
# gRPC health answers for these beside the models' own names.
RESERVED_NAMES = frozenset({"liveness", "readiness"})
RESERVED_PREFIXES = ("dragoman.v", "grpc.")

Precision = Literal["fp32", "int8", "fp16", "bf16"]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
Vocabulary = Annotated[int, Meta(ge=1, le=MAX_VOCABULARY)]
TokenId = Annotated[int, Meta(ge=0, lt=MAX_VOCABULARY)]
Length = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Total = Annotated[int, Meta(ge=0, le=1 << 53)]
Difference = Annotated[float, Meta(ge=0, le=1e9)]
Change = Annotated[float, Meta(ge=-1e9, le=1e9)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Version = Annotated[str, Meta(max_length=64, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._+-]*\Z")]
TensorName = Annotated[str, Meta(max_length=64, pattern=r"\A[a-z0-9_]+\Z")]
TensorList = Annotated[list[TensorName], Meta(max_length=MAX_TENSORS)]
# One line, that changes neither a terminal nor the direction of writing, and that can be written as UTF-8.
Line = Annotated[
    str,
    Meta(max_length=MAX_DOMAIN_CHARACTERS, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]*\Z"),
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PATH_PART = re.compile(r"[A-Za-z0-9._+@=-]+")
_MAX_SHOWN_NAMES = 5


class BundleError(InputError):
    """A bundle that cannot be served; the message names the file and says why."""


class Tensors(Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs and outputs of the graphs, in the graphs' order."""

    encoder_inputs: TensorList
    encoder_outputs: TensorList
    decoder_inputs: TensorList
    decoder_outputs: TensorList
    scorer_inputs: TensorList
    scorer_outputs: TensorList

    @classmethod
    def of_layers(cls, num_decoder_layers: int) -> "Tensors":
        """Return what this format version asks of graphs with so many decoder layers."""
        return cls(*TensorNames.of_layers(num_decoder_layers))


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and SHA-256 of one file."""

    size: Annotated[int, Meta(ge=0, le=MAX_BUNDLE_BYTES)]
    sha256: Digest


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a bundle came from: the SHA-256 of the checkpoint's weights and the libraries that exported them."""

    weights_sha256: Digest
    torch: Line
    onnx: Line


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """What 8-bit arithmetic changes, compared with the model in single precision; see `dragoman.export.quality`.

    Attributes:
        num_constant_scales: Products whose input has a constant scale.
        num_row_scales: Products whose input has a scale for every row.
        num_rows: Teacher-forced rows that gave the same bits in batches of different sizes and on 1 and 2 threads.
        num_tokens: Positions compared, along the model's own greedy answers.
        agreement: Share of them at which both find the same token likeliest.
        mean_divergence: Mean Kullback–Leibler divergence from the model's next-token distribution, nats.
        mean_log_prob_difference: Mean difference of the answers' log-probabilities, nats a token.
        mean_scorer_difference: The same between the scorer and the decode step.
        bleu_change: BLEU gained or, below 0, lost on the texts that were given, if any were.
        chrf_change: The same of chrF.
    """

    num_constant_scales: Total
    num_row_scales: Total
    num_rows: Total
    num_tokens: Total
    agreement: Annotated[float, Meta(ge=0, le=1)]
    mean_divergence: Change
    mean_log_prob_difference: Change
    mean_scorer_difference: Change
    bleu_change: Change | None = None
    chrf_change: Change | None = None


class Parity(Struct, frozen=True, forbid_unknown_fields=True):
    """The headline of the parity report, which `parity.json` has in full.

    Attributes:
        tolerance: Largest difference of a log-probability or an attention weight that export accepts.
        max_log_prob_difference: Largest difference there was between the decoder and eager PyTorch.
        num_rows: Teacher-forced rows compared over the whole vocabulary.
        num_steps: Decode steps these took.
        num_sentences: Sources decoded greedily on both sides.
        num_token_mismatches: Sources whose tokens parted, each at a tie within the tolerance.
        num_pairs: Pairs scored by the scorer.
        max_score_difference: Largest difference of a target token's log-probability between the scorer and eager PyTorch.
        max_attention_difference: The same of an attention weight.
        device: What the graphs ran on, and what of them did not run.
        processor: The kind of processor that proved them, for example `avx512_vnni`; None in bundles that do not say.
        quality: What 8-bit arithmetic changes; None where there is none.
    """

    tolerance: Difference
    max_log_prob_difference: Difference
    num_rows: Total
    num_steps: Total
    num_sentences: Total
    num_token_mismatches: Total
    num_pairs: Total
    max_score_difference: Difference
    max_attention_difference: Difference
    device: Line = "cpu"
    processor: Line | None = None
    quality: Quality | None = None


class Dimensions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model's sizes and tokens, as the manifest has them.

    Attributes:
        d_model: Width of the residual streams.
        num_heads: H.
        head_dim: Dh.
        num_encoder_layers: Encoder depth.
        num_decoder_layers: Decoder depth (L).
        source_vocab_size: Ids of the source are below it.
        target_vocab_size: V.
        pad_id: Fills short rows; never a candidate.
        eos_id: Ends sources and targets.
        decoder_start_id: The first `prev_ids`.
        max_source_tokens: Longest source, end-of-sequence included.
        max_target_tokens: Most tokens that can be generated, end-of-sequence included; no cache needs more room (T).
        default_max_new_tokens: Tokens generated at the most when a request does not say.
    """

    d_model: Width
    num_heads: Width
    head_dim: Width
    num_encoder_layers: Layers
    num_decoder_layers: Layers
    source_vocab_size: Vocabulary
    target_vocab_size: Vocabulary
    pad_id: TokenId
    eos_id: TokenId
    decoder_start_id: TokenId
    max_source_tokens: Length
    max_target_tokens: Length
    default_max_new_tokens: Length

    def __post_init__(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            ValueError: Naming them.
        """
        if self.num_heads * self.head_dim != self.d_model:
            raise ValueError(f"{self.num_heads} heads of {self.head_dim} do not make a d_model of {self.d_model}")
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


class Manifest(Dimensions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `bundle.json` holds, beside the model's dimensions.

    Attributes:
        format_version: Of the bundle format.
        name: Of the model; see `check_name`.
        version: See `content_version`.
        precision: Of weights, caches and arithmetic.
        tensors: Inputs and outputs of the graphs.
        files: Every file of the bundle but the manifest, by its path relative to the bundle, with forward slashes.
        origin: Where it came from.
        parity: How close it is to the checkpoint.
        domain: What text the model knows, as its card says; empty where it does not, and in bundles older than this field.
    """

    format_version: int = FORMAT_VERSION
    name: str
    version: Version
    precision: Precision
    tensors: Tensors
    files: Annotated[dict[str, FileEntry], Meta(max_length=MAX_FILES)]
    origin: Origin
    parity: Parity
    domain: Line = ""

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
        _check_tensors(self.tensors, Tensors.of_layers(self.num_decoder_layers))


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
    if entry.size > limit:
        raise ValueError(f"files says that {path} has {entry.size} bytes; at most {limit} are allowed")


def _check_tensors(tensors: Tensors, expected: Tensors) -> None:
    """Refuse tensors that are not the ones this format version asks for."""
    for field in Tensors.__struct_fields__:
        wanted, found = getattr(expected, field), getattr(tensors, field)
        missing, unknown = set(wanted) - set(found), set(found) - set(wanted)
        if missing:
            raise ValueError(f"tensors.{field} lacks {_listed([name for name in wanted if name in missing])}")
        if unknown:
            raise ValueError(f"tensors.{field} has unknown {_listed([name for name in found if name in unknown])}")
        if len(found) > len(wanted):
            raise ValueError(f"tensors.{field} has a tensor twice")


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_SHOWN_NAMES
    return ", ".join(names[:_MAX_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def shown(given: object) -> str:
    """Return what a message may say of something given."""
    if isinstance(given, dict | list):
        return "an object" if isinstance(given, dict) else "a list"
    return one_line(json.dumps(given), 80)


def one_line(text: str, max_characters: int = 400) -> str:
    """Return a text as one line of printable ASCII, without its middle if it is too long for a message."""
    text = "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in _shortened(text, max_characters))
    return _shortened(text, max_characters)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"


def content_version(manifest: Manifest) -> str:
    """Return the version that a manifest's content gives: the first 12 hex digits of a SHA-256.

    It covers every file and every setting, so that the same model always has the same version and another model never does. The
    name, the origin, the parity report and the domain are left out: they say nothing about what the model answers.
    """
    files = {path: entry.sha256 for path, entry in sorted(manifest.files.items()) if path != PARITY_FILE}
    settings = msgspec.to_builtins(manifest)
    for field in ("name", "version", "files", "origin", "parity", "domain"):
        del settings[field]
    return hashlib.sha256(msgspec.json.encode([settings, files], order="sorted")).hexdigest()[:12]
