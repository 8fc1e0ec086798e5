"""The bundle: the directory that export writes and the server reads; its manifest, its checksums and the names of its tensors.

The server imports this file, so it imports neither torch nor ONNX. It does not look inside the graphs: the manifest says what they
have, and the checksums say that they are the ones it speaks of.
"""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from dragoman.export.tensor_names import TensorNames
from dragoman.export.tensor_names import cross_kv_names as cross_kv_names
from dragoman.export.tensor_names import self_kv_names as self_kv_names
from dragoman.export.tensor_names import self_kv_output_names as self_kv_output_names
from dragoman.model.card import MAX_DOMAIN_CHARACTERS
from dragoman.model.errors import InputError
from dragoman.model.tokenizer import Tokenizer, TokenizerError

FORMAT_VERSION = 2
MANIFEST_FILE = "bundle.json"
PARITY_FILE = "parity.json"
ENCODER_FILE, ENCODER_WEIGHTS_FILE = "encoder.onnx", "encoder.weights"
DECODER_FILE, DECODER_WEIGHTS_FILE = "decoder.onnx", "decoder.weights"
# The scorer reads its weights from the files of the other two graphs.
SCORER_FILE = "scorer.onnx"
TOKENIZER_DIRECTORY = "tokenizer"
REQUIRED_FILES = (ENCODER_FILE, ENCODER_WEIGHTS_FILE, DECODER_FILE, DECODER_WEIGHTS_FILE, SCORER_FILE)

Precision = Literal["fp32", "int8", "fp16", "bf16"]
Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
# One line, that changes neither a terminal nor the direction of writing.
Line = Annotated[str, Meta(max_length=MAX_DOMAIN_CHARACTERS, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*\Z")]


class BundleError(InputError):
    """A bundle that cannot be served; the message names the file and says why."""


class Tensors(Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs and outputs of the graphs, in the graphs' order."""

    encoder_inputs: list[str]
    encoder_outputs: list[str]
    decoder_inputs: list[str]
    decoder_outputs: list[str]
    scorer_inputs: list[str]
    scorer_outputs: list[str]

    @classmethod
    def of_layers(cls, num_decoder_layers: int) -> "Tensors":
        """Return what this format version asks of graphs with so many decoder layers."""
        return cls(*TensorNames.of_layers(num_decoder_layers))


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and SHA-256 of one file."""

    size: Annotated[int, Meta(ge=0)]
    sha256: Digest


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a bundle came from: the SHA-256 of the checkpoint's weights and the libraries that exported them."""

    weights_sha256: Digest
    torch: str
    onnx: str


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

    num_constant_scales: int
    num_row_scales: int
    num_rows: int
    num_tokens: int
    agreement: float
    mean_divergence: float
    mean_log_prob_difference: float
    mean_scorer_difference: float
    bleu_change: float | None = None
    chrf_change: float | None = None


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

    tolerance: float
    max_log_prob_difference: float
    num_rows: int
    num_steps: int
    num_sentences: int
    num_token_mismatches: int
    num_pairs: int
    max_score_difference: float
    max_attention_difference: float
    device: str = "cpu"
    processor: str | None = None
    quality: Quality | None = None


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `bundle.json` holds.

    Attributes:
        format_version: Of the bundle format.
        name: Of the model.
        version: See `content_version`.
        precision: Of weights, caches and arithmetic.
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
        tensors: Inputs and outputs of the graphs.
        files: Every file of the bundle but the manifest, by its path relative to the bundle, with forward slashes.
        origin: Where it came from.
        parity: How close it is to the checkpoint.
        domain: What text the model knows, as its card says; empty where it does not, and in bundles older than this field.
    """

    format_version: int = FORMAT_VERSION
    name: Annotated[str, Meta(min_length=1)]
    version: Annotated[str, Meta(min_length=1)]
    precision: Precision
    d_model: Count
    num_heads: Count
    head_dim: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    source_vocab_size: Count
    target_vocab_size: Count
    pad_id: TokenId
    eos_id: TokenId
    decoder_start_id: TokenId
    max_source_tokens: Count
    max_target_tokens: Count
    default_max_new_tokens: Count
    tensors: Tensors
    files: dict[str, FileEntry]
    origin: Origin
    parity: Parity
    domain: Line = ""

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
        for field in ("pad_id", "eos_id", "decoder_start_id"):
            if getattr(self, field) >= self.target_vocab_size:
                raise ValueError(f"{field} {getattr(self, field)} is outside the vocabulary of {self.target_vocab_size}")


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


class Bundle:
    """A bundle on disk whose files are the ones its manifest lists."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Take what `open` has checked."""
        self.directory = directory
        self.manifest = manifest

    @classmethod
    def open(cls, directory: Path, is_checked: bool = True) -> "Bundle":
        """Read the manifest and compare the directory with it; files that the manifest does not list are ignored.

        Args:
            directory: That `export` wrote.
            is_checked: Also read every file and compare its SHA-256. Without it, only presence and size are looked at.

        Raises:
            BundleError: Naming the file and why it is refused.
        """
        manifest = read_manifest(directory / MANIFEST_FILE)
        for path in (*REQUIRED_FILES, PARITY_FILE):
            if path not in manifest.files:
                raise BundleError(f"{directory / MANIFEST_FILE}: files does not list {path}")
        if not any(PurePosixPath(path).parts[:1] == (TOKENIZER_DIRECTORY,) for path in manifest.files):
            raise BundleError(f"{directory / MANIFEST_FILE}: files lists nothing in {TOKENIZER_DIRECTORY}/")
        _check_tensors(directory / MANIFEST_FILE, manifest)
        for path, entry in manifest.files.items():
            _check_file(directory, path, entry, is_checked)
        return cls(directory, manifest)

    @property
    def encoder_path(self) -> Path:
        """The encoder graph; its weights lie beside it."""
        return self.directory / ENCODER_FILE

    @property
    def decoder_path(self) -> Path:
        """The decode-step graph; its weights lie beside it."""
        return self.directory / DECODER_FILE

    @property
    def scorer_path(self) -> Path:
        """The scorer graph; its weights are those of the other two."""
        return self.directory / SCORER_FILE

    def tokenizer(self) -> Tokenizer:
        """Load the tokeniser.

        Raises:
            BundleError: If its file is not a tokeniser, or has more tokens than the model.
        """
        try:
            tokenizer = Tokenizer.load(self.directory / TOKENIZER_DIRECTORY)
        except TokenizerError as error:
            raise BundleError(str(error)) from error
        room = min(self.manifest.source_vocab_size, self.manifest.target_vocab_size)
        if tokenizer.vocab_size > room:
            directory = self.directory / TOKENIZER_DIRECTORY
            raise BundleError(f"{directory}: the tokeniser has {tokenizer.vocab_size} tokens, the model room for {room}")
        return tokenizer


def read_manifest(path: Path) -> Manifest:
    """Read `bundle.json`.

    Raises:
        BundleError: If it is missing, of another format version, or not a manifest.
    """
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("format_version", msgspec.Raw(b"null"))
        if bytes(found) != str(FORMAT_VERSION).encode():
            raise BundleError(f"{path}: format version {bytes(found).decode()}, but this release reads {FORMAT_VERSION}")
        return msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: not a bundle's manifest: {error}") from error


def _check_tensors(path: Path, manifest: Manifest) -> None:
    """Refuse tensors that are not the ones this format version asks for."""
    expected = Tensors.of_layers(manifest.num_decoder_layers)
    for field in Tensors.__struct_fields__:
        wanted, found = getattr(expected, field), getattr(manifest.tensors, field)
        missing = [name for name in wanted if name not in found]
        unknown = [name for name in found if name not in wanted]
        if missing:
            raise BundleError(f"{path}: tensors.{field} lacks {', '.join(missing)}")
        if unknown:
            raise BundleError(f"{path}: tensors.{field} has unknown {', '.join(unknown)}")


def _check_file(directory: Path, path: str, entry: FileEntry, is_hashed: bool) -> None:
    """Refuse a file that is not there, leads outside the bundle, or is not the one that was exported."""
    manifest = directory / MANIFEST_FILE
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or "\\" in path or "\0" in path or not relative.parts:
        raise BundleError(f"{manifest}: files has {path!r}, which is not a path inside the bundle")
    location = directory / relative
    try:
        if not location.resolve().is_relative_to(directory.resolve()):
            raise BundleError(f"{location}: a link that leads outside the bundle")
        if not location.is_file():
            raise BundleError(f"{location}: no such file, though {MANIFEST_FILE} lists it")
        if (size := location.stat().st_size) != entry.size:
            raise BundleError(f"{location}: {size} bytes, but {MANIFEST_FILE} says {entry.size}")
        if is_hashed and (digest := hash_file(location)) != entry.sha256:
            raise BundleError(f"{location}: SHA-256 {digest}, but {MANIFEST_FILE} says {entry.sha256}")
    except OSError as error:
        raise BundleError(f"{location}: {error.strerror}") from error


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
