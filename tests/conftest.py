"""What every test folder may ask for."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """Folder of the Multi30k text: `DRAGOMAN_DATA`, else a `shared` folder beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"
    folder = Path(os.environ.get("DRAGOMAN_DATA") or beside)
    if not (folder / "train.en.gz").exists():
        pytest.skip(f"no Multi30k text in {folder}; set DRAGOMAN_DATA to its folder")
    return folder
