"""The project as a wheel, for tests of what is installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, without the network and without a trace in the checkout.

    Args:
        folder: An empty folder.
    """
    files = subprocess.run(
        ["git", "ls-files", "-z", "dragoman", "server", "model/*.py", "export", "protos", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.split(b"\0")
    source = folder / "source"
    source.mkdir()
    archive = folder / "source.tar"
    subprocess.run(["tar", "--null", "-T", "-", "-cf", archive], cwd=ROOT, input=b"\0".join(filter(None, files)), check=True)
    subprocess.run(["tar", "-xf", archive, "-C", source], check=True)
    build = ("wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
    subprocess.run([sys.executable, "-m", "pip", *build, "--wheel-dir", folder / "wheels", source], check=True)
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Return a folder for PYTHONPATH with what the wheel installs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
