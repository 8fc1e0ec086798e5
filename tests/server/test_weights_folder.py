"""The folder in which engines share weights: the configured one, or that of temporary files where it lies on a disk."""

import tempfile
from pathlib import Path

import pytest

from dragoman.server.runtime.weights_cache import weights_folder

HERE, ABOVE = "{here}", "{above}"


@pytest.mark.parametrize(
    ("setting", "num_engines", "mounts", "is_shared"),
    [
        ("auto", 2, ["/ ext4", "/proc proc"], True),
        ("auto", 1, ["/ ext4", "/proc proc"], False),
        ("auto", 2, ["/ ext4", f"{ABOVE} xfs"], True),
        ("auto", 2, ["/ ext4", f"{ABOVE} tmpfs"], False),
        ("auto", 2, ["/ ext4", f"{ABOVE} ramfs"], False),
        ("auto", 2, [f"{HERE} tmpfs", f"{ABOVE} ext4"], False),
        ("auto", 2, [f"{HERE} xfs", f"{ABOVE} tmpfs"], True),
        ("auto", 2, ["/ tmpfs", f"{ABOVE}-other tmpfs", f"{ABOVE} ext4"], True),
        ("auto", 2, [f"{ABOVE} ext4", f"{ABOVE} tmpfs"], False),  # the last one lies on top
        ("auto", 2, [], False),
        ("auto", 2, None, False),
        ("off", 4, ["/ ext4"], False),
    ],
)
def test_weights_are_shared_on_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, num_engines: int, mounts: list[str] | None, is_shared: bool
) -> None:
    here, file = tmp_path / "above it" / "a b", tmp_path / "mounts"
    here.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    if mounts is not None:
        names = {"here": str(here).replace(" ", "\\040"), "above": str(here.parent).replace(" ", "\\040")}
        file.write_text("".join(f"device {line.format(**names)} rw 0 0\n" for line in mounts))
    assert weights_folder(setting, num_engines, file) == (str(here) if is_shared else "")
    assert weights_folder("/var/cache/weights", num_engines, file) == "/var/cache/weights"
