"""A folder of models whose versions go forwards and back: the second comes, and goes again."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

FIRST, SECOND = "1", "2"

MAX_LATENCY_FACTOR = 10
"""Single precision after 8 bits is slower by nature, several times where the cores have little to spare."""


class Folder:
    """See above.

    Attributes:
        path: Of the folder.
        asked: Times at which something was done to a model's folder, seconds since 1970.
    """

    def __init__(self, path: Path, models: Mapping[str, tuple[Path, Path]], probation_seconds: float) -> None:
        """Put down the first version of each.

        Args:
            path: Where it shall lie.
            models: Two bundles of each, versions of it.
            probation_seconds: Of versions that come.
        """
        self.path, self._models = path, models
        self.asked: dict[str, list[float]] = {name: [] for name in models}
        for name, (first, _) in models.items():
            (path / name).mkdir(parents=True)
            swap = f"[swap]\nprobation_seconds = {probation_seconds}\nmax_latency_factor = {MAX_LATENCY_FACTOR}\n"
            (path / name / "model.toml").write_text(swap, encoding="utf-8")
            self._put(name, FIRST, first)

    def swap(self, model: str) -> None:
        """Put down the second version, or take it away where it is there."""
        self.asked[model].append(time.time())
        if self.has_second(model):
            gone = self.path / f".gone-{model}"
            os.rename(self.path / model / SECOND, gone)
            shutil.rmtree(gone)
        else:
            self._put(model, SECOND, self._models[model][1])

    def has_second(self, model: str) -> bool:
        """Whether a model's second version is there."""
        return (self.path / model / SECOND).exists()

    def wanted(self) -> dict[str, str]:
        """Return the version that is each model's policy's, by its content."""
        return {name: content_of(bundles[self.has_second(name)]) for name, bundles in self._models.items()}

    def _put(self, model: str, version: str, bundle: Path) -> None:
        """Put down a version, whole at once."""
        scratch = self.path / f".{model}-{version}"
        shutil.copytree(bundle, scratch)
        os.rename(scratch, self.path / model / version)


def content_of(bundle: Path) -> str:
    """Return the version that a bundle's content gives."""
    return str(json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["version"])
