"""What is asked of an export, checked before anything slow is loaded: this file imports neither torch nor ONNX."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from dragoman.export.bundle import MANIFEST_FILE, Precision
from dragoman.model.config import ModelConfig
from dragoman.model.errors import InputError

HEAD_DIM_MULTIPLE = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ExportError(InputError):
    """An export that cannot be done; the message says why."""


@dataclass(frozen=True, slots=True)
class QualityTexts:
    """Texts and their reference translations, one by one."""

    sources: Sequence[str]
    references: Sequence[str]


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


def check_name(name: str) -> None:
    """Refuse a name that a model cannot be served by.

    Raises:
        ExportError: If it is one.
    """
    if NAME.fullmatch(name) is None:
        raise ExportError(f"name must be letters, digits, '.', '_' and '-', at most 128 of them, not {name!r}")


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
