from dataclasses import fields

import pytest

from dragoman.client.flags import flag, in_flags, refusal
from dragoman.client.search import Search


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("do_sample: does not go with num_beams above 1, which is 4", "--sample: does not go with --num-beams above 1, which is 4"),
        ("return_alternatives: does not go with do_sample", "--alternatives: does not go with --sample"),
        ("temperature: goes with do_sample only", "--temperature: goes with --sample only"),
        ("seed: -1 is out of range", "--seed: -1 is out of range"),
        (
            "num_return_sequences: 3 is not in 1 to 1, unless num_beams is at least as many, or do_sample is set",
            "--num-return-sequences: 3 is not in 1 to 1, unless --num-beams is at least as many, or --sample is set",
        ),
        (
            "forced_prefix: 3 tokens and max_new_tokens of 510 are more than 512, max_target_tokens of model en-de",
            "--forced-prefix: 3 tokens and --max-new-tokens of 510 are more than 512, max_target_tokens of model en-de",
        ),
        ("model: 'do_sample' is not loaded; loaded: en-de", "--model: 'do_sample' is not loaded; loaded: en-de"),
        ("source_language: 'xx' is not one of de, en", "--from: 'xx' is not one of de, en"),
        ("target_language: missing, for source_language is given", "--to: missing, for --from is given"),
        ("text: is blank", "text: is blank"),
        ("the model has no temperature", "the model has no temperature"),
        ("/tmp/do_sample/top_k: No such file", "/tmp/do_sample/top_k: No such file"),
        ("", ""),
    ],
)
def test_fields_are_called_as_their_flags(message: str, told: str) -> None:
    assert in_flags(message) == told
    assert in_flags(told) == told


def test_every_field_of_a_search_that_the_command_line_has_is_a_flag() -> None:
    for field in fields(Search):
        if field.name != "suppressed_tokens":
            assert in_flags(f"{field.name}: no") == f"{flag(field.name)}: no"


def test_a_refused_option_has_no_line_and_a_refused_text_has() -> None:
    assert str(refusal("text 3", "num_beams: 9 is not in 1 to 8")) == "--num-beams: 9 is not in 1 to 8"
    assert str(refusal("text 3", "text: is blank")) == "text 3: text: is blank"
    assert str(refusal("line 3", "target: more than max_new_tokens")) == "line 3: target: more than --max-new-tokens"
