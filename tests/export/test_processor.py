import platform
from pathlib import Path

import pytest

from dragoman.export.processor import Platform, overflows_in_8_bits, platform_of, processor_identity, processor_kind


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


def test_a_processors_identity_changes_with_what_it_can_do_and_with_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    lines = [
        "processor\t: 0",
        "vendor_id\t: X",
        "model\t\t: 17",
        "model name\t: Some",
        "cpu MHz\t: 2000",
        "flags\t\t: fpu avx2 sse2",
    ]

    def identity(*lines: str) -> str:
        file.write_text("\n".join(lines), encoding="ascii")
        return processor_identity(file)

    found = identity(*lines, "", "processor\t: 1", "model\t\t: 18")
    assert found == identity(*lines[:4], "cpu MHz\t: 3000", "flags\t\t: avx2 fpu sse2")
    for i, other in ((1, "vendor_id\t: Y"), (2, "model\t\t: 18"), (5, "flags\t\t: fpu sse2")):
        assert identity(*lines[:i], other, *lines[i + 1 :]) != found
    assert identity("CPU part\t: 0xd0c", "Features\t: asimd") != identity("CPU part\t: 0xd0c", "Features\t: asimd i8mm")


def test_a_processor_that_does_not_say_what_it_can_do_has_no_identity(tmp_path: Path) -> None:
    assert processor_identity(tmp_path / "missing") == ""
    (tmp_path / "cpuinfo").write_text("vendor_id\t: X\nmodel\t: 17\n", encoding="ascii")
    assert processor_identity(tmp_path / "cpuinfo") == ""


def test_a_platform_is_another_with_another_processor_runtime_or_build(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("vendor_id\t: A\nmodel\t\t: 1\nflags\t\t: avx2 avx512_vnni\n", encoding="ascii")
    second.write_text("vendor_id\t: B\nmodel\t\t: 1\nflags\t\t: avx2 avx512_vnni\n", encoding="ascii")
    here = platform_of("1.2", "Release", first)
    assert (here.processor, here.runtime) == ("avx512_vnni", "1.2")
    assert here.is_same_as(platform_of("1.2", "Release", first))
    for other in (platform_of("1.2", "Release", second), platform_of("1.3", "Release", first), platform_of("1.2", "Debug", first)):
        assert not here.is_same_as(other)


def test_a_platform_that_is_not_known_is_none_not_even_its_own(tmp_path: Path) -> None:
    unknown = platform_of("1.2", "Release", tmp_path / "missing")
    assert unknown.identity == "" and not unknown.is_same_as(unknown) and not Platform().is_same_as(Platform())
