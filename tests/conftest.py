"""What every test folder may ask for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the fixtures load them, so that tests of the server need not wait for torch
    from transformers import MarianMTModel, PegasusForConditionalGeneration

    from model.transformer import Transformer


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """Folder of the Multi30k text: `DRAGOMAN_DATA`, else a `shared` folder beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"
    folder = Path(os.environ.get("DRAGOMAN_DATA") or beside)
    if not (folder / "train.en.gz").exists():
        pytest.skip(f"no Multi30k text in {folder}; set DRAGOMAN_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def as_transformers() -> "Callable[[Transformer], MarianMTModel | PegasusForConditionalGeneration]":
    """Build Transformers' model with our weights, in single precision: Marian, or Pegasus where norms come first."""
    from benchmarks.transformers_model import to_transformers

    return lambda ours: to_transformers(ours).float()
