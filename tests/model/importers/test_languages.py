"""What is said to each family around a text, compared with what its tokeniser in Transformers makes of the text."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from dragoman.model.generation import Language, Template
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.language_codes import NLLB_LANGUAGES
from dragoman.model.importers.languages import read_speech
from dragoman.model.importers.speech import Folder, Speech, Wishes
from dragoman.model.importers.token_ids import read_token_ids
from dragoman.model.languages import LanguageTable

TEXT = "A man walks the dog."
LINES = [f"A man number {i} walks the dog {i * 7 % 13} through the deep snow near house {i % 5}." for i in range(200)]
FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


def _trained(ids: dict[str, int], symbols: tuple[str, ...] = ()) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=written,
        vocab_size=90,
        minloglevel=2,
        hard_vocab_limit=False,
        user_defined_symbols=list(symbols),
        **ids,
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def fairseq_model() -> bytes:
    return _trained(FAIRSEQ)


@pytest.fixture(scope="module")
def t5_model() -> bytes:
    return _trained(T5, ("<2de>", "<2zh_Hant>", "<2Latn>"))


def read(path: Path, model_type: str, generation: dict[str, Any] | None = None, **wishes: str) -> Speech:
    settings = path / "tokenizer_config.json"
    tokenizer = json.loads(settings.read_text()) if settings.exists() else {}
    config = path / "config.json"
    return read_speech(
        Folder(
            path=path,
            model_type=model_type,
            config=json.loads(config.read_text()) if config.exists() else {},
            generation=generation or {},
            tokenizer=tokenizer,
            token_ids=read_token_ids(path, tokenizer),
            source_vocab_size=100_000,
            target_vocab_size=100_000,
            wishes=Wishes(**wishes),
        )
    )


def said(speech: Speech, source: str, target: str, text: list[int], eos: int) -> tuple[list[int], int | None, list[int]]:
    """Return a source as the contract says it goes to the encoder, the decoder's start, and what is forced."""
    languages = speech.languages
    to = LanguageTable(languages.target).find(target) if languages and target else None
    of = LanguageTable(languages.source).find(source) if languages and source else None
    assert (to is not None) == bool(target) and (of is not None) == bool(source)
    to, of = to or Language(code="none"), of or Language(code="none")
    template: Template = speech.template
    ids = [*to.source_prefix, *of.source_prefix, *template.source_prefix, *text, eos, *template.source_suffix, *of.source_suffix]
    start = to.decoder_start_id if template.decoder_start_id is None else template.decoder_start_id
    return ids, start, [*template.target_prefix, *to.target_prefix]


def plain(tokenizer: Any, text: str = TEXT) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def m2m100(path: Path, model: bytes) -> transformers.M2M100Tokenizer:
    (path / "sentencepiece.bpe.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    names = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", *pieces])
    (path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    tokenizer = transformers.M2M100Tokenizer(str(path / "vocab.json"), str(path / "sentencepiece.bpe.model"))
    tokenizer.save_pretrained(path)
    return tokenizer


def fairseq(kind: type[Any], **more: Any) -> Callable[[Path, bytes], Any]:
    def write(path: Path, model: bytes) -> Any:
        (path / "sentencepiece.bpe.model").write_bytes(model)
        tokenizer = kind.from_pretrained(str(path), **more)
        tokenizer.save_pretrained(path)
        return tokenizer

    return write


nllb = fairseq(transformers.NllbTokenizer, extra_special_tokens=list(NLLB_LANGUAGES))
legacy_nllb = fairseq(transformers.NllbTokenizer, extra_special_tokens=list(NLLB_LANGUAGES), legacy_behaviour=True)
mbart = fairseq(transformers.MBartTokenizer)
mbart50 = fairseq(transformers.MBart50Tokenizer)


@pytest.mark.parametrize(
    ("write", "model_type", "source", "target"),
    [
        (m2m100, "m2m_100", "de", "zh"),
        (m2m100, "m2m_100", "ns", "ast"),
        (nllb, "m2m_100", "deu_Latn", "zho_Hant"),
        (legacy_nllb, "m2m_100", "deu_Latn", "zho_Hant"),
        (mbart50, "mbart", "de_DE", "sl_SI"),
    ],
)
def test_languages_are_said_as_the_tokeniser_says_them(
    write: Callable[[Path, bytes], Any], model_type: str, source: str, target: str, tmp_path: Path, fairseq_model: bytes
) -> None:
    tokenizer = write(tmp_path, fairseq_model)
    speech = read(tmp_path, model_type)
    ids, start, forced = said(speech, source, target, plain(tokenizer), tokenizer.eos_token_id)
    tokenizer.src_lang = source
    inputs = tokenizer._build_translation_inputs(TEXT, return_tensors=None, src_lang=source, tgt_lang=target)
    assert ids == list(inputs["input_ids"])
    assert forced == [inputs["forced_bos_token_id"]]
    assert start is None
    assert speech.num_forced == 1
    assert speech.languages is not None and not speech.languages.default_target


def test_mbart_starts_with_the_targets_language(tmp_path: Path, fairseq_model: bytes) -> None:
    tokenizer = mbart(tmp_path, fairseq_model)
    speech = read(tmp_path, "mbart")
    ids, start, forced = said(speech, "de_DE", "ro_RO", plain(tokenizer), tokenizer.eos_token_id)
    tokenizer.src_lang = "de_DE"
    assert ids == list(tokenizer(TEXT)["input_ids"])
    tokenizer.tgt_lang = "ro_RO"
    labels = list(tokenizer(text_target=TEXT)["input_ids"])
    assert (
        [start] == labels[-1:] == [tokenizer.convert_tokens_to_ids("ro_RO")]
    )  # the last label is shifted to the front in training
    assert forced == [] and speech.num_forced == 0


def test_mbart_begins_with_it_where_the_folder_starts_otherwise(tmp_path: Path, fairseq_model: bytes) -> None:
    tokenizer = mbart(tmp_path, fairseq_model)
    romanian = tokenizer.convert_tokens_to_ids("ro_RO")
    both = read(tmp_path, "mbart", {"decoder_start_token_id": romanian, "forced_bos_token_id": romanian})
    german = tokenizer.convert_tokens_to_ids("de_DE")
    assert said(both, "ro_RO", "de_DE", [], 2)[1:] == (german, [german])
    assert both.languages is not None and both.languages.default_target == "ro_RO"
    other = read(tmp_path, "mbart", {"decoder_start_token_id": 2})
    assert said(other, "de_DE", "ro_RO", [], 2)[1:] == (None, [romanian])


@pytest.mark.parametrize(("write", "model_type"), [(m2m100, "m2m_100"), (mbart50, "mbart"), (mbart, "mbart")])
def test_ids_are_the_tokenisers_where_only_its_first_files_are_there(
    write: Callable[[Path, bytes], Any], model_type: str, tmp_path: Path, fairseq_model: bytes
) -> None:
    """Older folders have the sentencepiece model, but no `tokenizer.json` that says which ids the language tokens have."""
    tokenizer = write(tmp_path, fairseq_model)
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    (tmp_path / "added_tokens.json").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": settings["tokenizer_class"]}))
    speech = read(tmp_path, model_type)
    assert speech.languages is not None
    for language in speech.languages.source:
        name = f"__{language.code}__" if model_type == "m2m_100" else language.code
        assert [*language.source_prefix, *language.source_suffix] == [tokenizer.convert_tokens_to_ids(name)]
    assert len(speech.languages.source) == {"m2m_100": 100, "mbart": 52 if write is mbart50 else 25}[model_type]


def test_mbart_that_names_no_class_is_the_first_of_the_two(tmp_path: Path, fairseq_model: bytes) -> None:
    """As Transformers takes it where only the model’s type says something; the later one has 52 languages, said otherwise."""
    (tmp_path / "sentencepiece.bpe.model").write_bytes(fairseq_model)
    speech = read(tmp_path, "mbart")
    assert speech.languages is not None
    assert len(speech.languages.source) == 25
    first = sentencepiece.SentencePieceProcessor(model_proto=fairseq_model).GetPieceSize() + 1
    assert {one.code: one.source_suffix for one in speech.languages.source}["en_XX"] == [first + 3]
    assert {one.code: one.decoder_start_id for one in speech.languages.target}["ro_RO"] == first + 19


def test_nllb_without_tokenizer_json_has_fairseqs_ids(tmp_path: Path, fairseq_model: bytes) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(fairseq_model)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn"}')
    speech = read(tmp_path, "m2m_100")
    size = sentencepiece.SentencePieceProcessor(model_proto=fairseq_model).GetPieceSize()
    assert speech.languages is not None
    assert [language.source_prefix for language in speech.languages.source] == [[size + 1 + i] for i in range(202)]
    assert speech.languages.default_source == "eng_Latn"


def marian(path: Path, model: bytes, codes: tuple[str, ...], **settings: Any) -> transformers.MarianTokenizer:
    for name in ("source.spm", "target.spm"):
        (path / name).write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.IdToPiece(i) for i in range(3, processor.GetPieceSize())]
    names = ["</s>", "<unk>", *(f">>{code}<<" for code in codes), *pieces, "<pad>"]
    (path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    files = [str(path / name) for name in ("source.spm", "target.spm", "vocab.json")]
    with pytest.warns(UserWarning, match="sacremoses"):
        tokenizer = transformers.MarianTokenizer(*files, **settings)
    tokenizer.save_pretrained(path)
    return tokenizer


def test_marian_says_the_targets_language_first(tmp_path: Path, fairseq_model: bytes) -> None:
    tokenizer = marian(tmp_path, fairseq_model, ("fra", "pt_br", "pt_BR", "cmn_Hant"), source_lang="en", target_lang="mul")
    speech = read(tmp_path, "marian", target_language="French")
    for target in ("fra", "cmn_Hant"):
        ids, start, forced = said(speech, "en", target, plain(tokenizer), tokenizer.eos_token_id)
        assert ids == list(tokenizer(f">>{target}<<{TEXT}")["input_ids"])
        assert start is None and forced == []
    assert speech.languages is not None
    assert [language.code for language in speech.languages.target] == ["fra", "pt_br", "cmn_Hant"]
    assert [language.code for language in speech.languages.source] == ["en"]
    assert speech.languages.default_target == "fra"
    assert any("pt_BR" in note for note in speech.notes)


def test_marian_names_a_language_that_it_has(tmp_path: Path, fairseq_model: bytes) -> None:
    marian(tmp_path, fairseq_model, ("fin", "est"))
    assert "writes 2 languages, such as >>fin<<" in read(tmp_path, "marian").notes


def test_marian_of_one_pair_names_it(tmp_path: Path, fairseq_model: bytes) -> None:
    tokenizer = marian(tmp_path, fairseq_model, (), source_lang="eng", target_lang="de")
    speech = read(tmp_path, "marian")
    assert said(speech, "en", "German", plain(tokenizer), 0)[0] == list(tokenizer(TEXT)["input_ids"])
    wished = read(tmp_path, "marian", source_language="fr", target_language="it")
    assert wished.languages is not None
    assert [wished.languages.source[0].code, wished.languages.target[0].code] == ["fr", "it"]


@pytest.mark.parametrize("group", ["mul", "roa", "ROMANCE", "", "\x07"])
def test_marian_of_a_group_of_languages_names_none(group: str, tmp_path: Path, fairseq_model: bytes) -> None:
    marian(tmp_path, fairseq_model, (), source_lang=group, target_lang=group)
    assert read(tmp_path, "marian").languages is None


def test_madlad_says_the_targets_language_first(tmp_path: Path, t5_model: bytes) -> None:
    (tmp_path / "spiece.model").write_bytes(t5_model)
    tokenizer = transformers.T5Tokenizer.from_pretrained(str(tmp_path), extra_ids=0)
    speech = read(tmp_path, "t5")
    for target in ("de", "zh_Hant"):
        ids, start, forced = said(speech, "zh-TW", target, plain(tokenizer), tokenizer.eos_token_id)
        assert ids == list(tokenizer(f"<2{target}> {TEXT}")["input_ids"])
        assert start is None and forced == []
    assert any("<2Latn>" in note for note in speech.notes)


def test_families_without_languages_say_end_of_sequence_alone(tmp_path: Path, t5_model: bytes) -> None:
    (tmp_path / "spiece.model").write_bytes(_trained(T5))
    t5 = transformers.T5Tokenizer.from_pretrained(str(tmp_path), extra_ids=0)
    byt5 = transformers.ByT5Tokenizer()
    for tokenizer, model_type in ((t5, "t5"), (t5, "mt5"), (t5, "umt5"), (byt5, "t5")):
        tokenizer.save_pretrained(tmp_path)
        speech = read(tmp_path, model_type)
        assert said(speech, "", "", plain(tokenizer), tokenizer.eos_token_id)[0] == list(tokenizer(TEXT)["input_ids"])
        assert speech.languages is None


def test_bart_begins_sources_and_answers(tmp_path: Path) -> None:
    alphabet = sorted({char for char in TEXT.replace(" ", "Ġ")})
    vocabulary = {name: i for i, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", *alphabet, "<mask>"])}
    tokenizer = transformers.BartTokenizer(vocab=vocabulary, merges=[])
    tokenizer.save_pretrained(tmp_path)
    speech = read(tmp_path, "bart", {"forced_bos_token_id": 0})
    ids, start, forced = said(speech, "", "", plain(tokenizer), tokenizer.eos_token_id)
    assert ids == list(tokenizer(TEXT)["input_ids"])
    assert start is None and forced == [0] and speech.num_forced == 1
    assert read(tmp_path, "bart").num_forced == 0


def test_pegasus_says_end_of_sequence_alone(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(_trained({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}))
    tokenizer = transformers.PegasusTokenizer.from_pretrained(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    speech = read(tmp_path, "pegasus")
    assert said(speech, "", "", plain(tokenizer), tokenizer.eos_token_id)[0] == list(tokenizer(TEXT)["input_ids"])


def test_the_forced_language_is_the_default_one(tmp_path: Path, fairseq_model: bytes) -> None:
    tokenizer = mbart50(tmp_path, fairseq_model)
    english = tokenizer.convert_tokens_to_ids("en_XX")
    speech = read(tmp_path, "mbart", {"forced_bos_token_id": english})
    assert speech.languages is not None and speech.languages.default_target == "en_XX"
    wished = read(tmp_path, "mbart", {"forced_bos_token_id": english}, target_language="de", source_language="zh-CN")
    assert wished.languages is not None
    assert (wished.languages.default_source, wished.languages.default_target) == ("zh_CN", "de_DE")
    other = read(tmp_path, "mbart", {"forced_bos_token_id": 0})
    assert other.num_forced == 1 and any("forced_bos_token_id 0" in note for note in other.notes)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"tokenizer_class": "SMALL100Tokenizer"}, "SMALL100Tokenizer"), ({"tokenizer_class": "MBartTokenizer"}, "MBartTokenizer")],
)
def test_unknown_ways_are_refused(settings: dict[str, str], reason: str, tmp_path: Path, fairseq_model: bytes) -> None:
    m2m100(tmp_path, fairseq_model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ForeignError, match=reason):
        read(tmp_path, "m2m_100")


def test_wishes_that_cannot_be_met_are_refused(tmp_path: Path, fairseq_model: bytes) -> None:
    m2m100(tmp_path, fairseq_model)
    with pytest.raises(ForeignError, match="--target-language: the model has no 'tlh'; it has af, am, ar"):
        read(tmp_path, "m2m_100", target_language="tlh")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ForeignError, match="no code of a language"):
        read(tmp_path, "t5", source_language="\x07")
