import platform
from pathlib import Path

import pytest

from dragoman.export.processor import overflows_in_8_bits, processor_kind


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512_vnni", False),
        ("flags\t\t: fpu sse2 avx2 avx_vnni", False),
        ("flags\t\t: fpu sse2 avx2 avx512f avx512bw", True),
        ("Features\t: fp asimd asimddp", True),
    ],
)
def test_only_x86_with_vnni_is_known_not_to_overflow(tmp_path: Path, line: str, expected: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\n", encoding="ascii")
    assert overflows_in_8_bits(file) is expected


def test_an_unknown_processor_is_taken_for_one_that_overflows(tmp_path: Path) -> None:
    assert overflows_in_8_bits(tmp_path / "missing")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("flags\t\t: fpu sse2 avx avx2 avx512f avx512_vnni", "avx512_vnni"),
        ("flags\t\t: fpu sse2 avx avx2 avx_vnni", "avx_vnni"),
        ("flags\t\t: fpu sse2 avx avx2 avx512f avx512bw", "avx512f"),
        ("flags\t\t: fpu sse2 avx avx2", "avx2"),
        ("Features\t: fp asimd asimddp", "asimddp"),
    ],
)
def test_a_processor_is_called_after_what_multiplies(tmp_path: Path, line: str, kind: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\n", encoding="ascii")
    assert processor_kind(file) == kind


def test_an_unknown_processor_is_called_after_its_architecture(tmp_path: Path) -> None:
    assert processor_kind(tmp_path / "missing") == platform.machine()
