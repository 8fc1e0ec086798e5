"""Whatever a foreign vocabulary and its settings say, the answer is what checkpoints can hold, or a line that says why not."""

from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.model.generation import Languages, Template
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.languages import read_speech
from dragoman.model.importers.speech import Folder, Wishes
from dragoman.model.languages import LanguageTable

CODES = [
    "de",
    "deu",
    "de_DE",
    "deu_Latn",
    "DE",
    "zh",
    "zh-Hant",
    "zh_TW",
    "sr",
    "sh",
    "xx",
    "mul",
    "no",
    "nb",
    "ar",
    "\x07",
    " ",
    "-",
]
CODES += ["x" * 70]
FORMS = [">>{}<<", "<2{}>", "__{}__", "{}"]
NAMES = st.builds(
    lambda form, code: form.format(code), st.sampled_from(FORMS), st.one_of(st.sampled_from(CODES), st.text(max_size=6))
)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2, 12), st.sampled_from(CODES), st.lists(st.integers(), max_size=2))
CLASSES = [
    None,
    7,
    "",
    "MBart50Tokenizer",
    "MBartTokenizerFast",
    "NllbTokenizer",
    "M2M100Tokenizer",
    "T5Tokenizer",
    "BartTokenizer",
]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["marian", "m2m_100", "mbart", "bart", "pegasus", "t5", "mt5", "umt5", ""]),
    st.dictionaries(NAMES, st.integers(0, 12), max_size=12),
    st.dictionaries(
        st.sampled_from(["src_lang", "tgt_lang", "source_lang", "target_lang", "legacy_behaviour", "cls_token"]), VALUES
    ),
    st.dictionaries(st.sampled_from(["forced_bos_token_id", "decoder_start_token_id"]), VALUES),
    st.sampled_from(CLASSES),
    st.builds(Wishes, source_language=st.sampled_from(["", *CODES]), target_language=st.sampled_from(["", *CODES])),
)
def test_languages_are_whole_or_refused(
    model_type: str, token_ids: dict[str, int], tokenizer: dict[str, Any], generation: dict[str, Any], kind: Any, wishes: Wishes
) -> None:
    folder = Folder(
        path=Path("/nowhere"),
        model_type=model_type,
        config={},
        generation=generation,
        tokenizer={**tokenizer, "tokenizer_class": kind},
        token_ids=token_ids,
        source_vocab_size=10,
        target_vocab_size=10,
        wishes=wishes,
    )
    try:
        speech = read_speech(folder)
    except ForeignError as error:
        assert str(error).startswith("/nowhere") and "\n" not in str(error)
        return
    assert msgspec.json.decode(msgspec.json.encode(speech.template), type=Template) == speech.template
    if speech.languages is None:
        return
    assert msgspec.json.decode(msgspec.json.encode(speech.languages), type=Languages) == speech.languages
    for languages in (speech.languages.source, speech.languages.target):
        table = LanguageTable(languages)
        for language in languages:
            assert table.find(language.code) is language
            assert all(table.find(name) is language for name in language.names)
            assert all(index < 10 for index in [*language.source_prefix, *language.source_suffix, *language.target_prefix])
