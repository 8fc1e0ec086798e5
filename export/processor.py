"""Features of the processor that decide ONNX Runtime's kernels, and its kind for reports."""

import hashlib
import platform
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

PROCESSOR_FILE = Path("/proc/cpuinfo")
# Products of 8-bit numbers that are summed in 32 bits; AMX has them, too, and no processor has AMX without VNNI.
EXACT_FLAGS = ("avx512_vnni", "avx_vnni")
# Lines of /proc/cpuinfo with features: on x86, on arm64.
ABILITIES = ("flags", "Features")
# That, and what else tells one processor from another there.
IDENTIFYING = (*ABILITIES, "vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU variant", "CPU part")
# Features that name a kind of processor: the first that it has.
KINDS = (*EXACT_FLAGS, "avx512f", "avx2", "avx", "asimddp", "asimd")


def overflows_in_8_bits(processor_file: Path = PROCESSOR_FILE) -> bool:
    """Tell whether ONNX Runtime's fast 8-bit products may overflow here: on x86 without VNNI, where pairs are summed in 16 bits.

    Args:
        processor_file: Linux's description of the processors. Without one, or with one that has no flags of x86, there is no
            telling, and on other architectures no need: the setting that is chosen by this has no effect there.
    """
    return not _flags(processor_file).intersection(EXACT_FLAGS)


def processor_kind(processor_file: Path = PROCESSOR_FILE) -> str:
    """Name the kind of processor by what it has for products, for example `avx512_vnni` or `avx2`; else by its architecture."""
    flags = _flags(processor_file)
    return next((kind for kind in KINDS if kind in flags), platform.machine() or "unknown")


def processor_name(processor_file: Path = PROCESSOR_FILE) -> str:
    """Return the names of the processors for reports; else the architecture."""
    names = {line.partition(":")[2].strip() for line in _lines(processor_file) if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.processor() or platform.machine()


class Platform(Struct, frozen=True, forbid_unknown_fields=True):
    """Properties that decide the bits of results on a CPU; empty if unknown."""

    processor: Annotated[str, Meta(max_length=64)] = ""  # its kind, for people, see `processor_kind`
    runtime: Annotated[str, Meta(max_length=64)] = ""  # version of ONNX Runtime
    # Digest of all that ONNX Runtime may choose its way of computing by, and of how it was built.
    identity: Annotated[str, Meta(max_length=64)] = ""

    def is_same_as(self, other: "Platform") -> bool:
        """Tell whether the same graph gives the same bits on both."""
        return bool(self.identity) and self.identity == other.identity


def platform_of(version: str, build: str, processor_file: Path = PROCESSOR_FILE) -> Platform:
    """Describe this machine; without an identity if the processor does not say what it is.

    Args:
        version: Of ONNX Runtime.
        build: How it was built.
        processor_file: See `overflows_in_8_bits`.
    """
    found = processor_identity(processor_file)
    identity = hashlib.sha256(f"{found}\n{version}\n{build}".encode()).hexdigest()[:16] if found else ""
    return Platform(processor_kind(processor_file), version, identity)


def processor_identity(processor_file: Path = PROCESSOR_FILE) -> str:
    """Return all of the first processor that ONNX Runtime may choose its way of computing by; empty if there is no telling."""
    found: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in _lines(processor_file)):
        if name.strip() in IDENTIFYING:
            found.setdefault(name.strip(), " ".join(sorted(value.split())))
    return "" if found.keys().isdisjoint(ABILITIES) else "; ".join(f"{name}: {value}" for name, value in sorted(found.items()))


def _flags(processor_file: Path) -> frozenset[str]:
    """Return what the first processor says that it has: `flags` on x86, `Features` on arm64."""
    lines = _lines(processor_file)
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith(ABILITIES)), ()))


def _lines(processor_file: Path) -> list[str]:
    try:
        return processor_file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
