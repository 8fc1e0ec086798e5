"""Results of validations, the two CSV logs of a training run, and the curves drawn from them. No torch."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from dragoman.model.files import replaced
from dragoman.model.likelihood import perplexity_of


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a validation."""

    loss: float  # cross-entropy a token, in nats, without smoothing
    bleu: float | None = None  # of greedy translations, cased; None of a model that translates nothing
    chrf: float | None = None  # the same

    @property
    def rank(self) -> float:
        """The higher, the better the model: BLEU, or the loss turned round."""
        return -self.loss if self.bleu is None else self.bleu

    def __str__(self) -> str:
        """Name the loss and what counts."""
        return f"loss {self.loss:.3f}, {described(self.rank)}"


def described(rank: float) -> str:
    """Name the figure that a rank was made of: BLEU, which is not negative, or perplexity; a loss of 0 makes -0."""
    return f"perplexity {perplexity_of(-rank):.2f}" if math.copysign(1.0, rank) < 0 else f"BLEU {rank:.2f}"


STEP_FIELDS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "target_tokens", "seconds")
VALIDATION_FIELDS = ("step", "epoch", "loss", "bleu", "chrf")
STEPS_FILE = "steps.csv"
VALIDATION_FILE = "validation.csv"
CURVES_FILE = "curves.png"


class CsvLog:
    """A CSV file whose first column is the step; a resumed run drops the rows its predecessor wrote beyond the saved state."""

    def __init__(self, path: Path, fields: tuple[str, ...], last_step: int) -> None:
        """Open for appending after `last_step`; begin a new file where there is none."""
        rows = [row for row in read_rows(path) if int(row["step"]) <= last_step] if path.exists() else []
        with replaced(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(fields)
            writer.writerows([row[field] for field in fields] for row in rows)
        self._file = path.open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, *values: float | None) -> None:
        """Append a row; what there is not is left empty."""
        self._writer.writerow(values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read complete rows; one cut short by a kill is left out."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def plot_curves(folder: Path) -> None:
    """Draw training loss, validation loss and validation BLEU, or perplexity, over steps into `curves.png`."""
    from matplotlib.figure import Figure

    steps, validations = read_rows(folder / STEPS_FILE), read_rows(folder / VALIDATION_FILE)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.add_subplot()
    right = left.twinx()
    window = max(1, len(steps) // 200)
    losses = [float(row["loss"]) for row in steps]
    middles = range(0, len(losses) - window + 1, window)
    left.plot(
        [int(steps[i + window // 2]["step"]) for i in middles],
        [sum(losses[i : i + window]) / window for i in middles],
        color="tab:blue",
        label="training loss (label-smoothed)",
    )
    at = [int(row["step"]) for row in validations]
    left.plot(at, [float(row["loss"]) for row in validations], color="tab:orange", label="validation loss")
    if any(row["bleu"] for row in validations):
        right.plot(at, [float(row["bleu"]) for row in validations], color="tab:green", label="validation BLEU (greedy, cased)")
        right.set(ylabel="BLEU", ylim=(0, None))
    else:
        right.plot(at, [perplexity_of(float(row["loss"])) for row in validations], color="tab:green", label="validation perplexity")
        right.set(ylabel="perplexity a token", ylim=(1, None))
    left.set(xlabel="step", ylabel="nats a target token", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(folder / CURVES_FILE, dpi=110)
