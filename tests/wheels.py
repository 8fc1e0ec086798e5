"""The project as a wheel, for tests of what is installed."""

import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout in an empty folder, without the network and without a trace in the checkout."""
    (folder / "source").mkdir()
    files = "dragoman server 'model/*.py' model/training/example.toml export protos pyproject.toml README.md LICENSE"
    copy = f"git ls-files -z {files} | tar --null -T - -c | tar -x -C {shlex.quote(str(folder / 'source'))}"
    subprocess.run(["bash", "-o", "pipefail", "-c", copy], cwd=ROOT, check=True)
    build = ("wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
    subprocess.run([sys.executable, "-m", "pip", *build, "--wheel-dir", folder / "wheels", folder / "source"], check=True)
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Return a folder for PYTHONPATH with what the wheel installs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
