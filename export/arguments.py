"""Arguments of an export, checked before slow imports: this file imports neither torch nor ONNX."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import msgspec

from dragoman.export import manifest
from dragoman.export.fields import Precision
from dragoman.export.manifest import MANIFEST_FILE, Dimensions
from dragoman.model.config import UNUSED, ModelConfig
from dragoman.model.errors import InputError
from dragoman.model.generation import Defaults, Language, Languages, LanguageTable, Template, num_forced

HEAD_DIM_MULTIPLE = 8
DEFAULT_MAX_NEW_TOKENS = 256
_MAX_LISTED = 5  # languages in a message


class ExportError(InputError):
    """An export that cannot be done; the message says why."""


@dataclass(frozen=True, slots=True)
class QualityTexts:
    """Texts and their reference translations, one by one."""

    sources: Sequence[str]
    references: Sequence[str]


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Texts in the target language whose tokens a model is to choose from."""

    texts: Sequence[str]  # lines
    size: int | None = None  # keep so many of their tokens, the most frequent; None for all

    def __post_init__(self) -> None:
        """Refuse a size that keeps nothing.

        Raises:
            ExportError: Naming it.
        """
        if self.size is not None and self.size < 1:
            raise ExportError(f"a shortlist keeps at least 1 token of its text, not {self.size}")


def check_precision(precision: str, has_calibration: bool, has_quality: bool) -> Precision:
    """Return a precision that the texts given go with.

    Raises:
        ExportError: If it is none, the texts go with another one, or the package that scores them is missing.
    """
    found: Precision | None = next((known for known in get_args(Precision) if known == precision), None)
    if found is None:
        raise ExportError(f"precision must be {' or '.join(get_args(Precision))}, not {precision!r}")
    if found != "int8" and has_calibration:
        raise ExportError(f"texts for calibration go with int8, not {found}")
    if found == "fp32" and has_quality:
        raise ExportError("texts for quality go with int8, fp16 and bf16, not fp32")
    if has_quality and find_spec("sacrebleu") is None:
        raise ExportError("BLEU and chrF need sacrebleu, of the extra `evaluate`")
    return found


def check_cache_precision(precision: Precision, cache_precision: str | None) -> None:
    """Refuse a precision of caches that is none, or that a precision of weights does not go with.

    Raises:
        ExportError: If it is one.
    """
    if cache_precision not in (None, "int8", "fp32"):
        raise ExportError(f"the precision of caches can be int8 or fp32, not {cache_precision!r}")
    if precision != "int8" and cache_precision is not None:
        raise ExportError(f"caches in {cache_precision} go with int8, not {precision}")


def check_name(name: str) -> None:
    """Refuse a name that a model cannot be served by.

    Raises:
        ExportError: If it is one.
    """
    try:
        manifest.check_name(name)
    except ValueError as error:
        raise ExportError(str(error)) from error


def check_dimensions(
    config: ModelConfig, template: Template | None = None, languages: Languages | None = None, defaults: Defaults | None = None
) -> Dimensions:
    """Return a model's dimensions as the manifest has them.

    Args:
        config: Of the model.
        template: What is said to it around every text; answers have that much less room.
        languages: Those it knows, if any; likewise.
        defaults: What a request means that does not say.

    Raises:
        ExportError: If no server would take a bundle that has them.
    """
    room = max(config.max_target_positions - num_forced(template or Template(), languages), 1)
    usual = DEFAULT_MAX_NEW_TOKENS if defaults is None or defaults.max_new_tokens is None else defaults.max_new_tokens
    fields = {
        "d_model": config.d_model,
        "num_encoder_layers": 0 if "num_encoder_layers" in UNUSED[config.architecture] else config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "source_vocab_size": config.source_vocab_size,
        "target_vocab_size": config.target_vocab_size,
        "pad_id": config.pad_id,
        "eos_id": config.eos_id,
        "decoder_start_id": config.decoder_start_id,
        "max_source_tokens": config.max_source_positions,
        "max_target_tokens": config.max_target_positions,
        "default_max_new_tokens": min(usual, room),
    }
    try:
        return msgspec.convert(fields, Dimensions)
    except ValueError as error:
        raise ExportError(f"the model cannot be served: {error}") from error


def check_output(output: Path, is_forced: bool) -> None:
    """Refuse an output that holds something, unless it is a bundle to be replaced, or that has no place.

    Raises:
        ExportError: Naming what is in the way.
    """
    if os.path.lexists(output):
        if not output.is_dir():
            raise ExportError(f"{output}: exists and is not a directory")
        if any(output.iterdir()):
            if not is_forced:
                raise ExportError(f"{output}: exists and is not empty")
            if not (output / MANIFEST_FILE).is_file():
                raise ExportError(f"{output}: exists and is not a bundle; it will not be replaced")
    place = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not place.is_dir():
        raise ExportError(f"{place}: exists and is not a directory")
    if not os.access(place, os.W_OK):
        raise ExportError(f"{place}: cannot be written to")


def check_heads(config: ModelConfig) -> None:
    """Refuse heads that ONNX Runtime's attention cannot do.

    Raises:
        ExportError: Naming their number.
    """
    if config.head_dim % HEAD_DIM_MULTIPLE:
        raise ExportError(
            f"heads must be a multiple of {HEAD_DIM_MULTIPLE} wide for ONNX Runtime's attention; "
            f"{config.num_heads} heads of a d_model of {config.d_model} are not"
        )


def with_asked_languages(languages: Languages | None, source: str, target: str) -> Languages | None:
    """Return a checkpoint's languages with those that the user names (empty: none): its only ones, or the default ones of several.

    Raises:
        InputError: If it has languages, and not this one; for text that is no code; or where names are to be looked up and the
            library that knows them is not installed.
    """
    changed = Languages() if languages is None else languages
    for side, asked in (("source", source), ("target", target)):
        if not asked:
            continue
        known: list[Language] = getattr(changed, side)
        if not known:
            changed = msgspec.structs.replace(changed, **{side: [_language(side, asked)]})
            continue
        language = LanguageTable(known).find(asked)
        if language is None:
            codes = ", ".join(one.code for one in known[:_MAX_LISTED]) + (" and others" if len(known) > _MAX_LISTED else "")
            raise InputError(f"--{side}-language: the model has no {asked!r}; it has {codes}")
        changed = msgspec.structs.replace(changed, **{f"default_{side}": language.code if len(known) > 1 else ""})
    return changed if source or target else languages


def _language(side: str, code: str) -> Language:
    """Return a language by its code, with its other names."""
    try:
        from dragoman.model.importers.language_names import other_names
    except ModuleNotFoundError as error:
        raise InputError(f"--{side}-language: needs {error.name}: pip install 'dragoman[import]'") from error
    try:
        return msgspec.convert({"code": code, "names": other_names([code])[0]}, Language)
    except msgspec.ValidationError as error:
        raise InputError(f"--{side}-language: {code!r:.80} is no code of a language: {error}") from error
