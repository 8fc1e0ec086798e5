"""Processors: their kind, whether their 8-bit products overflow, and whether two platforms are the same."""

import platform
from pathlib import Path

import pytest

from dragoman.export.processor import Platform, overflows_in_8_bits, platform_of, processor_identity, processor_kind


@pytest.mark.parametrize(
    ("line", "kind", "is_overflowing"),
    [
        ("flags\t\t: fpu sse2 avx avx2 avx512f avx512_vnni", "avx512_vnni", False),
        ("flags\t\t: fpu sse2 avx avx2 avx_vnni", "avx_vnni", False),
        ("flags\t\t: fpu sse2 avx avx2 avx512f avx512bw", "avx512f", True),
        ("flags\t\t: fpu sse2 avx avx2", "avx2", True),
        ("Features\t: fp asimd asimddp", "asimddp", True),
        (None, platform.machine(), True),
    ],
)
def test_kind_and_overflow_follow_from_the_flags(tmp_path: Path, line: str | None, kind: str, is_overflowing: bool) -> None:
    """Only x86 with VNNI is known not to overflow."""
    file = tmp_path / "cpuinfo"
    if line is not None:
        file.write_text(f"processor\t: 0\n{line}\n", encoding="ascii")
    assert (processor_kind(file), overflows_in_8_bits(file)) == (kind, is_overflowing)


def test_identity_changes_with_the_abilities_of_a_processor_and_with_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    lines = ["processor\t: 0", "vendor_id\t: X", "model\t\t: 17", "model name\t: Some", "cpu MHz\t: 2000"]
    lines.append("flags\t\t: fpu avx2 sse2")

    def identity(*lines: str) -> str:
        file.write_text("\n".join(lines), encoding="ascii")
        return processor_identity(file)

    found = identity(*lines, "", "processor\t: 1", "model\t\t: 18")
    assert found == identity(*lines[:4], "cpu MHz\t: 3000", "flags\t\t: avx2 fpu sse2")
    for i, other in ((1, "vendor_id\t: Y"), (2, "model\t\t: 18"), (5, "flags\t\t: fpu sse2")):
        assert identity(*lines[:i], other, *lines[i + 1 :]) != found
    assert identity("CPU part\t: 0xd0c", "Features\t: asimd") != identity("CPU part\t: 0xd0c", "Features\t: asimd i8mm")


def test_platform_is_another_with_another_processor_runtime_or_build(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("vendor_id\t: A\nmodel\t\t: 1\nflags\t\t: avx2 avx512_vnni\n", encoding="ascii")
    second.write_text("vendor_id\t: B\nmodel\t\t: 1\nflags\t\t: avx2 avx512_vnni\n", encoding="ascii")
    here = platform_of("1.2", "Release", first)
    assert (here.processor, here.runtime) == ("avx512_vnni", "1.2")
    assert here.is_same_as(platform_of("1.2", "Release", first))
    for other in (platform_of("1.2", "Release", second), platform_of("1.3", "Release", first), platform_of("1.2", "Debug", first)):
        assert not here.is_same_as(other)
    (tmp_path / "cpuinfo").write_text("vendor_id\t: X\nmodel\t: 17\n", encoding="ascii")
    for name in ("cpuinfo", "missing"):
        unknown = platform_of("1.2", "Release", tmp_path / name)
        assert unknown.identity == "" == processor_identity(tmp_path / name) and not unknown.is_same_as(unknown)
    assert not Platform().is_same_as(Platform())
