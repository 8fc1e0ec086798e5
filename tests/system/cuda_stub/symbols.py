"""Names that a build of ONNX Runtime's CUDA provider asks of NVIDIA's libraries, read off its binary.

Those of libraries that it is linked with are in its symbol table, versions included. Those of libraries that it opens itself, where
they are installed, are among its strings.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

PROVIDER = "libonnxruntime_providers_cuda.so"
DRIVER = "libcuda.so.1"
NVIDIA = re.compile(r"lib(?:cu|nv)[A-Za-z]+\.so\.\d+")
LINKED = re.compile(r"^\s+[Uw] (?P<name>\w+)(?:@(?P<version>\S+))?$", re.MULTILINE)
NEEDED = re.compile(r"\(NEEDED\).*\[(?P<library>[^\]]+)\]")
# Libraries that it opens, by the beginning of their names: the files' names are put together in the code, where nothing finds them.
OPENED = {"cudnn": "libcudnn.so.9", "cufft": "libcufft.so.12"}
FOUND = re.compile(rb"(?<=\0)((?:" + "|".join(OPENED).encode() + rb")[A-Z]\w*)(?=\0)")


class Library(NamedTuple):
    """A library by the name of its file, and its symbols by the version that they are asked for with, empty for none."""

    name: str
    symbols: tuple[tuple[str, tuple[str, ...]], ...]


def libraries_of(provider: Path) -> list[Library]:
    """Return the libraries that a provider needs or takes where they are."""
    needed = [name for name in NEEDED.findall(_output("readelf", "--dynamic", "--wide", str(provider))) if NVIDIA.fullmatch(name)]
    symbols: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in needed}
    for found in LINKED.finditer(_output("nm", "--dynamic", "--undefined-only", "--with-symbol-versions", str(provider))):
        name, version = found["name"], (found["version"] or "").lstrip("@")
        if version in symbols:  # NVIDIA names a version after the library that has it
            symbols[version][version].append(name)
        elif not version and re.match(r"cu[A-Z]", name) and DRIVER in symbols:
            symbols[DRIVER][""].append(name)
    opened = sorted({name.decode() for name in FOUND.findall(provider.read_bytes())})
    for prefix, file in OPENED.items():
        if names := [name for name in opened if name.startswith(prefix)]:
            symbols[file] = {"": names}
    versioned = {name: tuple((version, tuple(sorted(each))) for version, each in found.items()) for name, found in symbols.items()}
    return [Library(*pair) for pair in versioned.items()]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
