"""Parity report of an export: figures of `parity.json` and of the manifest, and the error of a failed comparison.

The server imports this file, so it imports neither torch nor ONNX.
"""

from typing import Annotated

from msgspec import Meta, Struct

from dragoman.export.fields import Change, Difference, Line, Total
from dragoman.model.errors import InputError


class ParityError(InputError):
    """Graphs that do not answer as the checkpoint does; the message names the figure that is off."""


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """Changes by 8-bit arithmetic, compared with the model in single precision; see `dragoman.export.proof.quality`."""

    num_constant_scales: Total  # products whose input has a constant scale
    num_row_scales: Total  # products whose input has a scale for every row
    num_rows: Total  # teacher-forced rows that gave the same bits in batches of different sizes and on 1 and 2 threads
    num_tokens: Total  # positions compared, along the model's own greedy answers
    agreement: Annotated[float, Meta(ge=0, le=1)]  # share of them at which both find the same token likeliest
    mean_divergence: Change  # mean Kullback–Leibler divergence from the model's next-token distribution, nats
    mean_log_prob_difference: Change  # mean difference of the answers' log-probabilities, nats a token
    mean_scorer_difference: Change  # the same between the scorer and the decode step
    bleu_change: Change | None = None  # BLEU gained or, below 0, lost on the texts that were given, if any were
    chrf_change: Change | None = None  # the same of chrF


class ShortlistParity(Struct, frozen=True, forbid_unknown_fields=True):
    """Differences between the decode steps with and without a shortlist."""

    num_tokens: Total  # tokens of the list
    num_rows: Total  # teacher-forced rows compared
    num_positions: Total  # positions compared in them, each over all tokens of the list
    max_log_prob_difference: Difference  # largest difference of a log-probability, when both are normalised over the list
    num_rows_alone: Total  # rows decoded a second time by themselves, with bit-identical results


class Parity(Struct, frozen=True, forbid_unknown_fields=True):
    """The headline of the parity report, which `parity.json` has in full."""

    tolerance: Difference  # largest difference of a log-probability or an attention weight that export accepts
    max_log_prob_difference: Difference  # largest difference there was between the decoder and eager PyTorch
    num_rows: Total  # teacher-forced rows compared over the whole vocabulary
    num_steps: Total  # decode steps these took
    num_sentences: Total  # sources decoded greedily on both sides
    num_token_mismatches: Total  # sources with another token, each at a tie within the tolerance
    num_pairs: Total  # pairs scored by the scorer
    max_score_difference: Difference  # largest difference of a target token's log-probability between the scorer and eager PyTorch
    max_attention_difference: Difference  # the same of an attention weight
    device: Line = "cpu"  # that the graphs ran on, and anything that did not run
    # The kind of processor that proved them, for example `avx512_vnni`; None in bundles that do not say.
    processor: Line | None = None
    quality: Quality | None = None  # changes by 8-bit arithmetic; None where there is none


class ParityReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Extent of the comparison, and the differences found."""

    tolerance: float  # largest difference of a log-probability or an attention weight that is accepted
    max_log_prob_difference: float  # largest found, over every candidate at every compared position
    num_rows: int  # teacher-forced rows compared with eager full-sequence passes
    num_positions: int  # positions compared in them
    num_steps: int  # decode steps they took, together in a batch
    max_batch_rows: int  # rows of the fullest step
    max_position: int  # last position compared; one row goes as far as the model can
    num_rows_alone: int  # rows decoded a second time by themselves, with bit-identical results
    num_sentences: int  # sources decoded greedily by the graphs and by the eager model
    num_tokens: int  # tokens these gave
    num_token_mismatches: int  # sources with another token, each where eager's two best tokens were within the tolerance
    num_pairs: int  # pairs of source and target scored
    max_score_difference: float  # largest difference of a target token's log-probability between the scorer and the eager model
    max_attention_difference: float  # the same of an attention weight
    device: str = "cpu"  # that the graphs ran on, and anything that did not run
    processor: str | None = None  # the kind of processor that proved them, see `processor.processor_kind`
    # Of these, rows, or stretches of them, whose candidates were the whole vocabulary; the others' were the best.
    num_whole_rows: int | None = None
    quality: Quality | None = None  # changes by 8-bit arithmetic; None where there is none
    # Differences of the decode step with a shortlist; None where there is none.
    shortlist: ShortlistParity | None = None

    def headline(self) -> Parity:
        """Return the figures that the manifest quotes."""
        return Parity(**{name: getattr(self, name) for name in Parity.__struct_fields__})
