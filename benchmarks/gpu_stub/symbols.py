"""What a build of ONNX Runtime's CUDA provider asks of NVIDIA's libraries, read off its binary.

Names of libraries that it is linked with, and their versions, are in its symbol table. Those that it opens itself, where they are
installed, are strings among its data.
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
OPENED = re.compile(rb"\0(lib(?:cudnn|cufft)[A-Za-z_]*\.so\.\d+)\0")
PREFIXES = {"cudnn": "libcudnn", "cufft": "libcufft"}
FOUND = re.compile(rb"(?<=\0)((?:" + "|".join(PREFIXES).encode() + rb")[A-Z]\w*)(?=\0)")


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
    """Find the libraries that a provider opens by itself, with whatever of theirs it has the names of."""
    with provider.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        files = sorted({name.decode() for name in OPENED.findall(data)})
        names = sorted({name.decode() for name in FOUND.findall(data)})
    return [
        Library(file, {"": [name for name in names if name.startswith(prefix)]}, is_optional=True)
        for file in files
        for prefix, library in PREFIXES.items()
        if file.startswith(f"{library}.")
    ]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
