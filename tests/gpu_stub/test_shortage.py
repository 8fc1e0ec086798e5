"""What the runner does when ONNX Runtime's arena is full, with the real texts of the real arena."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_stub.bed import Bed


@pytest.fixture(scope="module")
def tries(bed: Bed, stub_bundle: Callable[[str, str], Path]) -> list[dict[str, Any]]:
    """Return what happened with less and less memory."""
    result = bed.run(["-m", "benchmarks.gpu_stub.shortage", str(stub_bundle("marian", "fp16"))])
    assert result.stdout.startswith("["), result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_with_enough_memory_nothing_is_refused(tries: list[dict[str, Any]]) -> None:
    assert (tries[0]["num_refusals"], tries[0]["error"]) == (0, "")


def test_what_does_not_fit_at_once_is_done_in_parts(tries: list[dict[str, Any]]) -> None:
    assert [attempt for attempt in tries if attempt["num_refusals"] and not attempt["error"]]


def test_what_does_not_fit_at_all_is_short_of_memory_and_nothing_else(tries: list[dict[str, Any]]) -> None:
    errors = [attempt["error"] for attempt in tries if attempt["error"]]
    assert errors and all(error.startswith("OutOfDeviceMemory: ") for error in errors)


def test_the_arena_says_what_we_listen_for(tries: list[dict[str, Any]]) -> None:
    texts = [text for attempt in tries for text in attempt["texts"]]
    assert texts and all("is smaller than requested bytes of" in text for text in texts)
