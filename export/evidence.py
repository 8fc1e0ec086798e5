"""Where a bundle came from and what was proved of it when it was made: the parts of its manifest that change no answer."""

from typing import Annotated

from msgspec import Meta, Struct

from dragoman.export.fields import Change, Difference, Digest, Line, Total


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a bundle came from: the SHA-256 of the checkpoint's weights and the libraries that exported them."""

    weights_sha256: Digest
    torch: Line
    onnx: Line


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """What 8-bit arithmetic changes, compared with the model in single precision; see `dragoman.export.quality`."""

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
    """How close the decode step with a shortlist is to the one without."""

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
    num_token_mismatches: Total  # sources whose tokens parted, each at a tie within the tolerance
    num_pairs: Total  # pairs scored by the scorer
    max_score_difference: Difference  # largest difference of a target token's log-probability between the scorer and eager PyTorch
    max_attention_difference: Difference  # the same of an attention weight
    device: Line = "cpu"  # what the graphs ran on, and what of them did not run
    # The kind of processor that proved them, for example `avx512_vnni`; None in bundles that do not say.
    processor: Line | None = None
    quality: Quality | None = None  # what 8-bit arithmetic changes; None where there is none
