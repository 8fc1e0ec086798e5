from pathlib import Path

import pytest

from dragoman.model.training.log import (
    CURVES_FILE,
    STEP_FIELDS,
    STEPS_FILE,
    VALIDATION_FIELDS,
    VALIDATION_FILE,
    CsvLog,
    plot_curves,
    read_rows,
)

FIELDS = ("step", "loss")


def test_rows_are_on_disk_as_soon_as_written(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv", FIELDS, 0)
    log.write(1, 0.5)
    assert (tmp_path / "log.csv").read_bytes() == b"step,loss\n1,0.5\n"
    log.close()


def test_resuming_drops_rows_beyond_the_saved_state(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n1,0.5\n2,0.25\n3,0.125\n", encoding="utf-8")
    log = CsvLog(path, FIELDS, 2)
    log.write(3, 0.1)
    log.close()
    assert path.read_text(encoding="utf-8") == "step,loss\n1,0.5\n2,0.25\n3,0.1\n"


@pytest.mark.parametrize("torn", ["", "1", "12", "12,", "12,0.0"])
def test_torn_row_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"step,loss\n1,0.5\n11,0.25\n{torn}", encoding="utf-8")
    CsvLog(path, FIELDS, 11).close()
    assert path.read_text(encoding="utf-8") == "step,loss\n1,0.5\n11,0.25\n"


@pytest.mark.parametrize("torn", ["", "ste", "step,lo", "step,loss"])
def test_torn_header_is_written_anew(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(torn, encoding="utf-8")
    CsvLog(path, FIELDS, 0).close()
    assert path.read_text(encoding="utf-8") == "step,loss\n"


def test_short_rows_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n1,0.5\n2", encoding="utf-8")
    assert read_rows(path) == [{"step": "1", "loss": "0.5"}]


@pytest.mark.parametrize("num_steps", [0, 1, 7, 450])
def test_curves_are_drawn(tmp_path: Path, num_steps: int) -> None:
    steps, validations = CsvLog(tmp_path / STEPS_FILE, STEP_FIELDS, 0), CsvLog(tmp_path / VALIDATION_FILE, VALIDATION_FIELDS, 0)
    for step in range(1, num_steps + 1):
        steps.write(step, 0, 5 / step, 0.1, 1.0, 100, 0.5)
    validations.write(num_steps, 1, 2.5, 12.0, 30.0)
    plot_curves(tmp_path)
    steps.close()
    validations.close()
    assert (tmp_path / CURVES_FILE).read_bytes().startswith(b"\x89PNG")
