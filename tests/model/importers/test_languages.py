"""Languages around a text, compared with the family's tokeniser in Transformers; names of languages; tokenisers' files and ids."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.export.arguments import with_asked_languages
from dragoman.model.generation import Language, Languages, LanguageTable, Template, num_forced, spelling
from dragoman.model.importers.families import family_of
from dragoman.model.importers.files import ForeignError
from dragoman.model.importers.language_names import (
    M2M100_LANGUAGES,
    MBART50_LANGUAGES,
    NLLB_LANGUAGES,
    english_name,
    is_group,
    other_names,
)
from dragoman.model.importers.languages import Folder, PromptFormat, PromptOptions, read_prompt_format
from dragoman.model.importers.mapping import lay_out
from dragoman.model.importers.report import Report
from dragoman.model.importers.tokenizers import read_token_ids, read_tokenizers
from dragoman.model.importers.weights import Foreign, Limits
from dragoman.model.text.tokenizers import Tokenizers
from tests.model.importers.conftest import change_json, change_weights
from tests.oracles import vocabularies
from tests.oracles.checkpoints import load_tokenizer
from tests.oracles.variants import VARIANTS

Ids = list[int]
TEXT, SETTINGS = "the notice of this License", "tokenizer_config.json"


def json_of(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return fields


def read(path: Path, model_type: str, generation: dict[str, Any] | None = None, **wishes: str) -> PromptFormat:
    tokenizer, config = json_of(path / SETTINGS), json_of(path / "config.json")
    files: dict[str, Any] = {"config": config, "tokenizer": tokenizer, "token_ids": read_token_ids(path, tokenizer)}
    files |= {"source_vocab_size": 100_000, "target_vocab_size": 100_000}
    return read_prompt_format(
        Folder(path=path, model_type=model_type, generation=generation or {}, options=PromptOptions(**wishes), **files)
    )


def said(speech: PromptFormat, source: str | None, target: str | None, text: Ids, eos: int) -> tuple[Ids, int | None, Ids]:
    """Return the encoder's input, the decoder's start, and the forced tokens, as the template and the languages define them."""
    languages, template = speech.languages, speech.template
    to = LanguageTable(languages.target).find(target) if languages and target else None
    of = LanguageTable(languages.source).find(source) if languages and source else None
    assert (to is not None) == bool(target) and (of is not None) == bool(source)
    to, of = to or Language(code="none"), of or Language(code="none")
    ids = [*to.source_prefix, *of.source_prefix, *template.source_prefix, *text, eos, *template.source_suffix, *of.source_suffix]
    start = to.decoder_start_id if template.decoder_start_id is None else template.decoder_start_id
    return ids, start, [*template.target_prefix, *to.target_prefix]


def token_of(tokenizer: Any, language: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(getattr(tokenizer, "lang_code_to_token", {}).get(language, language)))


@pytest.mark.parametrize("layout", ["hub", "transformers"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "t5-translation"])
def test_languages_are_said_as_the_tokeniser_says_them(name: str, layout: str, foreign: Callable[..., Path]) -> None:
    variant, folder = VARIANTS[name], foreign(name, layout)
    config, tokenizer = json_of(folder / "config.json"), load_tokenizer(folder)
    always = {"forced_bos_token_id": 0} if name == "bart" else {}
    speech = read(folder, config["model_type"], always)
    plain = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert (speech.languages is None) == (not variant.said and "MarianMT" not in variant.model)
    for source, target in variant.pairs:
        if source is not None:
            tokenizer.src_lang = source
        text = (variant.said.format(target) if "{}" in variant.said else "") + TEXT
        token = [] if target is None else [token_of(tokenizer, target)]
        ids, start, forced = said(speech, source, target, plain, tokenizer.eos_token_id)
        assert ids == list(tokenizer(text)["input_ids"])
        assert start == (token[0] if variant.said == "start" else None)
        assert forced == (token if variant.said == "forced" else [*always.values()])
        assert num_forced(speech.template, speech.languages) == len(forced)


def processor(before: str, after: str) -> dict[str, Any]:
    """Return a post-processor of `tokenizers` in two steps, of which the first adds nothing."""
    names = [*before.split(), "A", *after.split()]
    single = [{"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}} for name in names]
    ids = {"</s>": 1, "<pad>": 0, "<unk>": 2}
    tokens = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names if name != "A"}
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {"type": "Sequence", "processors": [level, template]}


def test_a_generic_tokenisers_own_post_processor_says_what_goes_around_a_text(copied: Callable[..., Path]) -> None:
    folder = copied("t5", "transformers")
    change_json(folder / SETTINGS, tokenizer_class="PreTrainedTokenizerFast")
    for before, after in (("", "</s>"), ("<pad> <unk>", "</s> <pad>")):
        change_json(folder / "tokenizer.json", post_processor=processor(before, after))
        tokenizer = load_tokenizer(folder)
        plain = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
        assert said(read(folder, "t5"), None, None, plain, 1)[0] == list(tokenizer(TEXT)["input_ids"])
    for fields, reason in (
        ({"add_bos_token": True, "add_eos_token": False}, "add_eos_token"),
        ({"post_processor": processor("", "<unk> </s>")}, "token 2 behind a text, not end-of-sequence, 1"),
        ({"post_processor": None}, "nothing behind a text"),
    ):
        change_json(folder / (SETTINGS if "add_bos_token" in fields else "tokenizer.json"), **fields)
        with pytest.raises(ForeignError, match=f"tokenizer.json: its post_processor .*{reason}"):
            read(folder, "t5")
    folder = copied("nllb", "transformers")
    change_json(folder / SETTINGS, tokenizer_class="PreTrainedTokenizerFast")
    tokenizer, speech = load_tokenizer(folder), read(folder, "m2m_100")
    plain = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert said(speech, "eng_Latn", "deu_Latn", plain, 2)[0] == list(tokenizer(TEXT)["input_ids"])
    other = processor("", "</s>")
    other["processors"][1]["special_tokens"]["</s>"]["ids"] = [2]
    change_json(folder / "tokenizer.json", post_processor=other)
    with pytest.raises(ForeignError, match="puts no language of the model around a text"):
        read(folder, "m2m_100")


def test_a_forced_language_is_the_default_one_and_mbart_may_begin_with_it(foreign: Callable[..., Path]) -> None:
    folder, fifty = foreign("mbart"), foreign("mbart50")
    romanian, german = load_tokenizer(folder).convert_tokens_to_ids(["ro_RO", "de_DE"])
    both = read(folder, "mbart", {"decoder_start_token_id": romanian, "forced_bos_token_id": romanian})
    assert said(both, "ro_RO", "de_DE", [], 2)[1:] == (german, [german])
    assert both.languages is not None and both.languages.default_target == "ro_RO"
    assert said(read(folder, "mbart", {"decoder_start_token_id": 2}), "de_DE", "ro_RO", [], 2)[1:] == (None, [romanian])
    english = {"forced_bos_token_id": load_tokenizer(fifty).convert_tokens_to_ids("en_XX")}
    speech = read(fifty, "mbart", english)
    assert speech.languages is not None and speech.languages.default_target == "en_XX"
    wished = read(fifty, "mbart", english, target_language="de", source_language="zh-CN").languages
    assert wished is not None and (wished.default_source, wished.default_target) == ("zh_CN", "de_DE")
    other = read(fifty, "mbart", {"forced_bos_token_id": 0})
    assert num_forced(other.template, other.languages) == 1 and any("forced_bos_token_id 0" in note for note in other.notes)


@pytest.mark.parametrize("name", ["m2m100", "mbart", "mbart50", "nllb"])
def test_ids_are_the_tokenisers_where_only_its_first_files_are_there(name: str, copied: Callable[..., Path]) -> None:
    folder = copied(name)
    tokenizer = load_tokenizer(folder)
    for file in ("tokenizer.json", "added_tokens.json"):
        (folder / file).unlink(missing_ok=True)
    (folder / SETTINGS).write_text(json.dumps({"tokenizer_class": json_of(folder / SETTINGS)["tokenizer_class"]}))
    speech = read(folder, json_of(folder / "config.json")["model_type"])
    assert speech.languages is not None and not speech.languages.default_source
    assert len(speech.languages.source) == {"m2m100": 100, "mbart": 25, "mbart50": 52, "nllb": 202}[name]
    for language in speech.languages.source:
        assert token_of(tokenizer, language.code) in [*language.source_prefix, *language.source_suffix]
    if name == "mbart":  # the first of the two classes, as Transformers takes it, is that of a folder that names none
        (folder / SETTINGS).unlink()
        assert read(folder, "mbart").languages == speech.languages
    if name == "nllb":
        assert [language.code for language in speech.languages.source] == list(NLLB_LANGUAGES)
        change_json(folder / SETTINGS, src_lang="eng_Latn")
        again = read(folder, "m2m_100").languages
        assert again is not None and again.default_source == "eng_Latn"


def marian(path: Path, codes: tuple[str, ...], **settings: Any) -> Path:
    path.mkdir()
    vocabularies.marian(path, [f">>{code}<<" for code in codes])
    change_json(path / SETTINGS, **({"source_lang": None, "target_lang": None} | settings))
    return path


def test_marian_lists_its_targets_in_order_and_each_once(tmp_path: Path) -> None:
    folder = marian(tmp_path / "many", ("fra", "pt_br", "pt_BR", "pt-br", "cmn_Hant"), source_lang="en", target_lang="mul")
    for wish, code in (("French", "fra"), ("pt_br", "pt_br"), ("pt_BR", "pt_BR")):
        speech = read(folder, "marian", target_language=wish)
        assert speech.languages is not None and speech.languages.default_target == code
    assert [language.code for language in speech.languages.target] == ["fra", "pt_br", "pt_BR", "cmn_Hant"]
    assert [language.code for language in speech.languages.source] == ["en"]
    assert any("left out" in note and note.endswith(": pt-br") for note in speech.notes)
    with pytest.raises(ForeignError, match="the model has no 'PT_br'"):
        read(folder, "marian", target_language="PT_br")
    assert "writes 2 languages, such as >>fin<<" in read(marian(tmp_path / "two", ("fin", "est")), "marian").notes


def test_marian_of_one_pair_names_it_and_of_a_group_none(tmp_path: Path) -> None:
    folder = marian(tmp_path / "pair", (), source_lang="eng", target_lang="de")
    tokenizer = load_tokenizer(folder)
    plain = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert said(read(folder, "marian"), "en", "German", plain, 0)[0] == list(tokenizer(TEXT)["input_ids"])
    wished = read(folder, "marian", source_language="fr", target_language="it").languages
    assert wished is not None and [wished.source[0].code, wished.target[0].code] == ["fr", "it"]
    for group in ("mul", "roa", "ROMANCE", "", "\x07"):
        change_json(folder / SETTINGS, source_lang=group, target_lang=group)
        assert read(folder, "marian").languages is None, group


def test_madlad_takes_any_source_and_reports_names_that_are_no_language(tmp_path: Path) -> None:
    model = vocabularies.train("unigram", 300, vocabularies.T5, ("<2de>", "<2zh_Hant>", "<2Latn>"))
    (tmp_path / "spiece.model").write_bytes(model)
    speech = read(tmp_path, "t5")
    assert said(speech, "zh-TW", "de", [7], 1) == ([*said(speech, None, "de", [7], 1)[0]], None, [])
    assert any("<2Latn>" in note for note in speech.notes)


def test_unknown_tokenisers_and_languages_are_refused(copied: Callable[..., Path]) -> None:
    folder = copied("m2m100")
    for name in ("SMALL100Tokenizer", "MBartTokenizer"):
        change_json(folder / SETTINGS, tokenizer_class=name)
        with pytest.raises(ForeignError, match=name):
            read(folder, "m2m_100")
    (folder / SETTINGS).unlink()
    with pytest.raises(ForeignError, match="--target-language: the model has no 'tlh'; it has af, am, ar"):
        read(folder, "m2m_100", target_language="tlh")
    with pytest.raises(ForeignError, match="no code of a language"):
        read(folder, "t5", source_language="\x07")


CODES = ["de", "deu", "de_DE", "deu_Latn", "DE", "zh", "zh-Hant", "zh_TW", "sr", "sh", "xx", "mul", "no", "nb", "ar", "x" * 70]
CODES += ["\x07", " ", "-"]
NAMES = st.builds(str.format, st.sampled_from([">>{}<<", "<2{}>", "__{}__", "{}"]), st.sampled_from(CODES) | st.text(max_size=6))
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2, 12), st.sampled_from(CODES), st.lists(st.integers(), max_size=2))
KINDS = ("MBart50", "MBart", "Nllb", "M2M100", "T5", "Bart")
CLASSES = [None, 7, "", "MBartTokenizerFast", *(f"{kind}Tokenizer" for kind in KINDS)]
FIELDS = ["src_lang", "tgt_lang", "source_lang", "target_lang", "legacy_behaviour", "cls_token"]
LANGUAGE = st.sampled_from(["", *CODES])


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["marian", "m2m_100", "mbart", "bart", "pegasus", "t5", "mt5", "umt5", ""]),
    st.dictionaries(NAMES, st.integers(0, 12), max_size=12),
    st.dictionaries(st.sampled_from(FIELDS), VALUES),
    st.dictionaries(st.sampled_from(["forced_bos_token_id", "decoder_start_token_id"]), VALUES),
    st.sampled_from(CLASSES),
    st.builds(PromptOptions, source_language=LANGUAGE, target_language=LANGUAGE),
)
def test_languages_are_whole_or_refused(
    model_type: str,
    token_ids: dict[str, int],
    tokenizer: dict[str, Any],
    generation: dict[str, Any],
    kind: Any,
    wishes: PromptOptions,
) -> None:
    files: dict[str, Any] = {"config": {}, "tokenizer": {**tokenizer, "tokenizer_class": kind}, "token_ids": token_ids}
    sizes = {"source_vocab_size": 10, "target_vocab_size": 10}
    folder = Folder(path=Path("/nowhere"), model_type=model_type, generation=generation, options=wishes, **files, **sizes)
    try:
        speech = read_prompt_format(folder)
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


@cache
def table(*codes: str) -> LanguageTable:
    """Return a table of languages, which refuses a spelling that means two."""
    names = other_names(codes)
    assert all(spelling(code) not in own for code, own in zip(codes, names, strict=True))
    return LanguageTable([Language(code=code, names=own) for code, own in zip(codes, names, strict=True)])


MODELS = {"nllb": NLLB_LANGUAGES, "m2m100": M2M100_LANGUAGES, "mbart50": MBART50_LANGUAGES, "few": (">>", "deu", "fra")}
MODELS |= {"one of a group": ("ary", "fra"), "several of a group": ("ary", "arz")}
MODELS["apart"] = ("fr", "fr_BE", "es", "es_MX", "pt", "pt_br", "cmn_Hans", "cmn_Hant", "zho", "srp_Latn")
GERMAN = "de deu ger deu_Latn de_DE de-DE de-AT German GERMAN de-Latn-CH"
# Of a model, its languages and the spellings that mean each. The only language of a group has the group's name, too.
SPELLINGS = f"""
    nllb: zho_Hans zh zh-CN zh_SG Chinese cmn; zho_Hant zh-Hant zh-TW zh_HK Traditional+Chinese Chinese+(Traditional); srp_Cyrl sr
    nllb: ace_Latn ace; ace_Arab ace-Arab Acehnese+(Arabic); kas_Arab ks; arb_Arab ar ar-EG; nob_Latn no; heb_Hebr iw
    nllb: swh_Latn sw Swahili; none zh-Latn de-Cyrl tmh xx; deu_Latn {GERMAN}
    m2m100: de {GERMAN}
    mbart50: de_DE {GERMAN}
    few: deu {GERMAN}
    apart: fr French fr-CA; fr_BE fr-BE French+(Belgium); es es_419; pt pt-PT; pt_br pt-BR; zho zh; cmn_Hant zh-Hant
    apart: cmn_Hans zh-Hans; srp_Latn sr; none sr-Cyrl
    several of a group: none ar
    one of a group: ary ar
"""


@pytest.mark.parametrize("line", SPELLINGS.strip().splitlines())
def test_a_language_is_asked_for_in_the_codes_that_people_use(line: str) -> None:
    model, languages = line.strip().split(": ")
    for code, *names in (language.split() for language in languages.split("; ")):
        found = {name: table(*MODELS[model]).find(name.replace("+", " ")) for name in names}
        assert {name: language.code if language else "none" for name, language in found.items()} == dict.fromkeys(names, code)


def test_aliases_groups_and_unknown_codes() -> None:
    ((names),) = other_names(["ns"], {"ns": "nso"})
    assert "nso" in names and "northern_sotho" in names and other_names(["ns"]) == [[]]
    assert [is_group(code) for code in ("roa", "mul", "ROMANCE", "xx", "", "de", "ar", "zho_Hant")] == [True] * 5 + [False] * 3
    assert [english_name(code) for code in ("de", "ron", "pt_BR", "xx")] == ["German", "Romanian", "Portuguese", ""]


PAIR = Languages(source=[Language(code="en")], target=[Language(code="de")])
MANY = Languages(
    source=[Language(code="en"), Language(code="de", names=["german"])], target=[Language(code=code) for code in ("fr", "it", "ro")]
)


def test_a_user_gives_a_checkpoint_its_languages() -> None:
    found = with_asked_languages(None, "en", "deu")
    assert found is not None and [found.source[0].code, found.target[0].code] == ["en", "deu"]
    assert "german" in found.target[0].names
    target = with_asked_languages(None, "", "de")
    assert target is not None and (target.source, len(target.target)) == ([], 1)
    assert with_asked_languages(None, "", "") is None and with_asked_languages(MANY, "", "") is MANY
    found = with_asked_languages(MANY, "German", "it-IT")
    assert found is not None and (found.default_source, found.default_target) == ("de", "it")
    assert (found.source, found.target) == (MANY.source, MANY.target)
    assert with_asked_languages(PAIR, "en-GB", "de") == PAIR


def tokenizers_of(folder: Path) -> tuple[Tokenizers, Report]:
    foreign, report = Foreign.open(folder), Report()
    family = family_of(foreign.config)
    config = lay_out(family, foreign, Limits(), Report()).config
    return read_tokenizers(foreign, family.tokenizers, config, report), report


def theirs(folder: Path, text: str) -> list[int]:
    ids: list[int] = load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]
    return ids


def resize(folder: Path, rows: int) -> None:
    before = json.loads((folder / "config.json").read_text())["vocab_size"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            for axis in (axis for axis, size in enumerate(tensor.shape) if size == before):
                last = tensor.narrow(axis, before - 1, 1)
                longer = torch.cat([tensor, *[last] * max(0, rows - before)], axis)
                tensors[name] = longer.narrow(axis, 0, rows).contiguous()

    change_weights(folder, change)
    change_json(folder / "config.json", vocab_size=rows)


def add_token(folder: Path, text: str, special: bool = False) -> int:
    """Add a token as `add_tokens` of Transformers does; return its id."""
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    token_id = 1 + max(len(said["model"]["vocab"]) - 1, *(token["id"] for token in said["added_tokens"]))
    token = {"id": token_id, "content": text, "special": special}
    token |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    path.write_text(json.dumps({**said, "added_tokens": [*said["added_tokens"], token]}))
    return token_id


def test_tokenizer_json_is_read_where_it_has_other_text_or_ids(copied: Callable[..., Path]) -> None:
    folder = copied("umt5")
    assert tokenizers_of(folder)[0].source.kind == "sentencepiece"
    add_token(folder, "quiet", special=True)
    assert tokenizers_of(folder)[0].source.kind == "sentencepiece", "a special token more changes nothing"
    token_id, text = add_token(folder, "SARS-CoV"), "the SARS-CoV here"
    read, report = tokenizers_of(folder)
    assert read.source.kind == "tokenizers" and token_id in read.source.encode(text) == theirs(folder, text)
    assert any("it is read in its place" in line for line in report.translated)
    folder, text = copied("nllb"), "the server answers each request"
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = said["model"]["vocab"]
    first, second = [token for token, token_id in vocabulary.items() if token_id in (50, 60)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(said))
    tokenizer = tokenizers_of(folder)[0].source
    assert tokenizer.kind == "tokenizers" and tokenizer.encode(text) == theirs(folder, text)


@pytest.mark.parametrize(("variant", "is_sought"), [("bart", True), ("marian", False), ("mbart", False), ("t5", False)])
def test_tokens_added_in_a_file_of_their_own_are_written(variant: str, is_sought: bool, copied: Callable[..., Path]) -> None:
    folder, text = copied(variant), "the zebra is SARS-CoV 2 here"
    library = load_tokenizer(folder)
    library.add_tokens(["zebra", "SARS-CoV 2"])
    ids = {name: library.convert_tokens_to_ids(name) for name in ("zebra", "SARS-CoV 2")}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    resize(folder, max(ids.values()) + 1)
    read, report = tokenizers_of(folder)
    found = library(text, add_special_tokens=False)["input_ids"]
    assert set(ids.values()) <= set(found)
    assert read.target.decode(found).replace(" ", "") == text.replace(" ", "")
    assert (read.source.encode(text) == found) == is_sought
    told = sum("added tokens" in line and "zebra, SARS-CoV 2" in line for line in report.ignored)
    assert told == (0 if is_sought else 2 if variant == "marian" else 1)


def test_settings_of_a_tokeniser_count(copied: Callable[..., Path]) -> None:
    bart, pegasus, byt5, text = copied("bart"), copied("pegasus"), copied("byt5"), "the server"
    plain = tokenizers_of(bart)[0].source
    change_json(bart / SETTINGS, add_prefix_space=True)
    assert tokenizers_of(bart)[0].source.encode(text) == theirs(bart, text) == plain.encode(f" {text}")
    for folder, fields, reason in (
        (pegasus, {"offset": 10**6}, "the model room for"),
        (pegasus, {"offset": "x"}, "offset must be a whole number"),
        (byt5, {"extra_ids": 10**6}, "special tokens; at most"),
        (byt5, {"extra_ids": 200}, "the tokeniser has 459 tokens, the model room for 384"),
    ):
        settings = (folder / SETTINGS).read_text()
        change_json(folder / SETTINGS, **fields)
        with pytest.raises(ForeignError, match=reason):
            tokenizers_of(folder)
        (folder / SETTINGS).write_text(settings)
    before = tokenizers_of(pegasus)[0].source.encode(text)
    change_json(pegasus / SETTINGS, offset=100)
    assert tokenizers_of(pegasus)[0].source.encode(text) == [token_id - 3 for token_id in before]
    change_json(byt5 / SETTINGS, tokenizer_class=None)
    with pytest.raises(ForeignError, match="no tokeniser"):
        tokenizers_of(byt5)
    change_json(byt5 / "config.json", tokenizer_class="ByT5Tokenizer")
    assert tokenizers_of(byt5)[0].source.encode("\u00e4b") == [0xC3 + 3, 0xA4 + 3, ord("b") + 3]


@pytest.mark.parametrize("layout", ["hub", "transformers"])
def test_a_mask_that_the_model_has_no_row_for_is_left_out(layout: str, copied: Callable[..., Path]) -> None:
    """As of bart-large-cnn: 50,265 tokens, of which the last is the mask, and 50,264 rows."""
    folder, text = copied("bart", layout), "A man walks the dog."
    rows = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
    resize(folder, rows)
    read, report = tokenizers_of(folder)
    assert read.source.vocab_size == rows and any("no row for <mask>" in line for line in report.translated)
    assert read.source.encode(text) == theirs(folder, text)
    masked = read.source.encode("a <mask> b")
    assert max(masked) < rows and read.source.decode(masked) == "a <mask> b"
    resize(folder, rows - 1)
    with pytest.raises(ForeignError, match=f"{rows + 1} tokens, the model room for {rows - 1}"):
        tokenizers_of(folder)
