"""Foreign folders of every family and variant, as their libraries write them, with random weights and tokenisers of their own."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dragoman.model.importers.importing import ImportOptions, import_checkpoint
from dragoman.model.importers.report import Report
from tests.oracles.checkpoints import Layout, make_checkpoint
from tests.shelf import Shelf

Folders = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Transformers draws progress bars and tells of what it does not load."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture(scope="session")
def foreign(shelf: Shelf) -> Folders:

    def folder(variant: str, layout: Layout = "hub") -> Path:
        return shelf.get(f"foreign-{variant}-{layout}", lambda path: make_checkpoint(path, variant, layout=layout))

    return folder


@pytest.fixture
def copied(foreign: Folders, tmp_path: Path) -> Folders:

    def copy(variant: str, layout: Layout = "hub") -> Path:
        return Path(shutil.copytree(foreign(variant, layout), tmp_path / variant))

    return copy


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., tuple[Path, Report]]:

    def run(folder: Path, **order: Any) -> tuple[Path, Report]:
        output = tmp_path / "imported"
        return output, import_checkpoint(folder, output, ImportOptions(**order))

    return run


def change_json(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file; None takes one away."""
    said = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps({name: value for name, value in said.items() if value is not None}), encoding="utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return path
