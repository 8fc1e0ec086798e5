"""What is asked of an export, checked before anything slow is loaded: this file imports neither torch nor ONNX."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from dragoman.export.bundle import MANIFEST_FILE, TOKENIZER_DIRECTORY, Precision
from dragoman.model.config import ModelConfig
from dragoman.model.errors import InputError

HEAD_DIM_MULTIPLE = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# A checkpoint's files; `model.checkpoint`, which reads them, loads torch.
CONFIG_FILE = "config.json"
CHECKPOINT_FILES = (CONFIG_FILE, f"{TOKENIZER_DIRECTORY}.json", "model.safetensors")


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


def check_checkpoint(directory: Path) -> None:
    """Refuse a directory that is no checkpoint, as far as that shows without reading the weights.

    Raises:
        InputError: Naming the file that is missing, or what its configuration lacks.
    """
    for name in CHECKPOINT_FILES:
        path = directory / name
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise ExportError(f"{path}: {error.strerror}") from error
    path = directory / CONFIG_FILE
    try:
        description = json.loads(path.read_bytes())
        if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
            raise ExportError(f"{path}: model is missing or is not a dict")
        check_heads(ModelConfig.from_dict(description["model"]))
    except InputError as error:
        raise error if isinstance(error, ExportError) else ExportError(f"{path}: {error}") from error
    except ValueError as error:
        raise ExportError(f"{path}: not JSON: {error}") from error
