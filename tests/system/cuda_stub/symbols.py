"""What a build of ONNX Runtime's CUDA provider asks of NVIDIA's libraries, read off its binary.

What it is linked with is in its symbol table, versions included. What it asks of libraries that it opens itself, where they are
installed, is among its strings.
"""

import mmap
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROVIDER = "libonnxruntime_providers_cuda.so"
DRIVER = "libcuda.so.1"
NVIDIA = re.compile(r"lib(?:cu|nv)[A-Za-z]+\.so\.\d+")
LINKED = re.compile(r"^\s+[Uw] (?P<name>\w+)(?:@(?P<version>\S+))?$", re.MULTILINE)
NEEDED = re.compile(r"\(NEEDED\).*\[(?P<library>[^\]]+)\]")
# What it opens itself, by the beginning of its names: the files' names are put together in the code, where nothing finds them.
OPENED = {"cudnn": "libcudnn.so.9", "cufft": "libcufft.so.12"}
FOUND = re.compile(rb"(?<=\0)((?:" + "|".join(OPENED).encode() + rb")[A-Z]\w*)(?=\0)")


@dataclass(frozen=True, slots=True)
class Library:
    """A library that has to be there.

    Attributes:
        name: Of the file, as the linker asks for it.
        symbols: By the version that they are asked for with, which is empty for those without.
        is_optional: Whether the provider does without.
    """

    name: str
    symbols: dict[str, list[str]]
    is_optional: bool = False


def libraries_of(provider: Path) -> list[Library]:
    """Return what a provider needs, and what it takes where it is there.

    Raises:
        subprocess.CalledProcessError: If the file is no shared object.
    """
    needed = [name for name in NEEDED.findall(_output("readelf", "--dynamic", "--wide", str(provider))) if NVIDIA.fullmatch(name)]
    symbols: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in needed}
    for found in LINKED.finditer(_output("nm", "--dynamic", "--undefined-only", "--with-symbol-versions", str(provider))):
        name, version = found["name"], (found["version"] or "").lstrip("@")
        if version in symbols:  # NVIDIA names a version after the library that has it
            symbols[version][version].append(name)
        elif not version and re.match(r"cu[A-Z]", name) and DRIVER in symbols:
            symbols[DRIVER][""].append(name)
    linked = [Library(name, {version: sorted(names) for version, names in found.items()}) for name, found in symbols.items()]
    return [*linked, *_opened(provider)]


def _opened(provider: Path) -> list[Library]:
    """Find what a provider asks of libraries that it opens by itself: it has the names among its strings."""
    with provider.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        names = sorted({name.decode() for name in FOUND.findall(data)})
    found = {file: [name for name in names if name.startswith(prefix)] for prefix, file in OPENED.items()}
    return [Library(file, {"": symbols}, is_optional=True) for file, symbols in found.items() if symbols]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
