"""Which languages a foreign model reads and writes, and how it is told: a function for each way that families have.

Each way is what the family's own tokeniser in Transformers makes of a text, and what its `generate` is told of the target.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from dragoman.model.generation import Language, Languages, Template, around
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.language_codes import (
    M2M100_LANGUAGES,
    MBART50_LANGUAGES,
    MBART_LANGUAGES,
    NLLB_LANGUAGES,
    WMT21_LANGUAGES,
)
from dragoman.model.importers.language_lists import Affixes, is_code, languages_of, listed, named, pair_speech, stated, wished
from dragoman.model.importers.language_names import is_group, other_names
from dragoman.model.importers.settings import MAX_JSON_BYTES, read
from dragoman.model.importers.speech import Folder, Speech
from dragoman.model.importers.tasks import task_speech
from dragoman.model.importers.token_ids import TOKENIZER_FILE, VOCABULARY_FILE, family_tokens
from dragoman.model.text.json_file import ids_around
from dragoman.model.text.tokenizer import TokenizerError

# M2M100 calls Northern Sotho so; the registry has no such language.
_ALIASES = {"ns": "nso"}
_MARIAN = re.compile(r">>(.+)<<")
_MADLAD = re.compile(r"<2([A-Za-z0-9_-]+)>")
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[_-][A-Za-z0-9]+)*")
_NLLB = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
_MBART = re.compile(r"[a-z]{2}_[A-Z]{2}")
# Classes that read any tokenizer.json, and say nothing of a family.
_GENERIC = ("", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "SentencePieceBackend")
# Those of them that take what goes around a text from tokenizer.json; so does UMT5 where no class is named.
_AS_THE_FILE_SAYS = ("PreTrainedTokenizer", "TokenizersBackend")
# Classes that put end-of-sequence after a text and nothing else around it, and those that put <s> before it, too.
_PLAIN = ("T5Tokenizer", "MT5Tokenizer", "ByT5Tokenizer", "PegasusTokenizer", "MarianTokenizer")
_BEGUN = ("BartTokenizer", "RobertaTokenizer", "BarthezTokenizer")


def read_speech(folder: Folder) -> Speech:
    """Return what is said to a folder's model around a text.

    Raises:
        ForeignError: If the folder, or what the user wishes, does not say enough, or what no such model has.
    """
    ways: dict[str, Callable[[Folder], Speech]] = {"marian": _marian, "m2m_100": _m2m100, "mbart": _mbart}
    return ways.get(folder.model_type, _without)(folder)


def _marian(folder: Folder) -> Speech:
    """`>>fra<<` before the text, by target language, of models that have such pieces; the pair itself of others."""
    pieces = {found[1]: index for name, index in folder.token_ids.items() if (found := _MARIAN.fullmatch(name))}
    if not pieces:
        return pair_speech(folder, _template(folder))
    targets, notes = languages_of(folder, pieces, lambda token_id: {"source_prefix": [token_id]})
    code = folder.wishes.source_language or named(folder, "source_lang")
    source = [Language(code=code, names=other_names([code])[0])] if is_code(folder, code) else []
    languages = Languages(source=source, target=targets, default_target=wished(folder, targets, "target"))
    return Speech(
        template=_template(folder), languages=languages, notes=[_counted("writes", targets, f">>{targets[0].code}<<"), *notes]
    )


def _m2m100(folder: Folder) -> Speech:
    """M2M100 and NLLB: the source's language before the text, the target's forced to begin the answer."""
    kind = _kind(folder, {"M2M100Tokenizer": "__en__", "NllbTokenizer": "eng_Latn"}, "M2M100Tokenizer")
    if kind == "M2M100Tokenizer":
        codes = WMT21_LANGUAGES if folder.tokenizer.get("language_codes") == "wmt21" else M2M100_LANGUAGES
        known = () if (folder.path / VOCABULARY_FILE).exists() else folder.token_ids
        names = {code: f"__{code}__" for code in codes}
        ids = family_tokens(list(names.values()), {name: folder.token_ids[name] for name in known}, folder.path, is_fairseq=False)
        tokens = {code: ids[name] for code, name in names.items() if name in ids}
    else:
        tokens = _coded(folder, NLLB_LANGUAGES, _NLLB)
    is_legacy = kind == "NllbTokenizer" and folder.tokenizer.get("legacy_behaviour") is True
    side = "source_suffix" if is_legacy else "source_prefix"
    sources, notes = languages_of(folder, tokens, lambda token_id: {side: [token_id]}, _ALIASES)
    targets, _ = languages_of(folder, tokens, lambda token_id: {"target_prefix": [token_id]}, _ALIASES)
    where = "after its end-of-sequence (legacy_behaviour)" if is_legacy else "before it"
    return _multilingual(folder, Template(), sources, targets, tokens, [f"the source's language is said {where}", *notes])


def _mbart(folder: Folder) -> Speech:
    """mBART: the source's language after end-of-sequence, and the target's starts the decoder; mBART-50: as M2M100."""
    kind = _kind(folder, {"MBart50Tokenizer": "gl_ES", "MBartTokenizer": "en_XX"}, "MBartTokenizer")
    if kind == "MBart50Tokenizer":
        tokens = _coded(folder, MBART50_LANGUAGES, _MBART)
        sources, notes = languages_of(folder, tokens, lambda token_id: {"source_prefix": [token_id]})
        targets, _ = languages_of(folder, tokens, lambda token_id: {"target_prefix": [token_id]})
        return _multilingual(folder, Template(), sources, targets, tokens, ["the source's language is said before it", *notes])
    tokens = _coded(folder, MBART_LANGUAGES, _MBART)
    start, first = folder.generation.get("decoder_start_token_id"), folder.forced_first()
    is_started = start is None or start in tokens.values()
    is_forced = not is_started or first in tokens.values()

    def target(token_id: int) -> Affixes:
        return {
            **({"decoder_start_id": token_id} if is_started else {}),
            **({"target_prefix": [token_id]} if is_forced else {}),
        }

    sources, notes = languages_of(folder, tokens, lambda token_id: {"source_suffix": [token_id]})
    targets, _ = languages_of(folder, tokens, target)
    how = " and ".join(["starts the decoder"] * is_started + ["begins every answer"] * is_forced)
    notes = ["the source's language is said after its end-of-sequence", f"the target's {how}", *notes]
    return _multilingual(folder, Template(), sources, targets, tokens, notes)


def _without(folder: Folder) -> Speech:
    """Families without languages of their own: tasks of T5's, `<2de>` of MADLAD, a pair that the user names."""
    template = _template(folder)
    if folder.model_type == "t5":
        tokens = {found[1]: index for name, index in folder.token_ids.items() if (found := _MADLAD.fullmatch(name))}
        known = {code: index for code, index in tokens.items() if _LANGUAGE.fullmatch(code) and not is_group(code)}
        if len(known) > 1:
            return _madlad(folder, template, known, [f"<2{code}>" for code in tokens.keys() - known.keys()])
    if folder.wishes.task:
        return task_speech(folder, template)
    return pair_speech(folder, template)


def _madlad(folder: Folder, template: Template, tokens: Mapping[str, int], others: list[str]) -> Speech:
    """`<2de>` before the text, by target language; the source is told by itself, so that naming it changes nothing."""
    targets, notes = languages_of(folder, tokens, lambda token_id: {"source_prefix": [token_id]})
    sources, _ = languages_of(folder, tokens, lambda _: {})
    if others:
        notes.append(f"tokens that name no language: {listed(sorted(others))}")
    return _multilingual(folder, template, sources, targets, tokens, notes)


def _multilingual(
    folder: Folder,
    template: Template,
    sources: list[Language],
    targets: list[Language],
    tokens: Mapping[str, int],
    notes: Iterable[str],
) -> Speech:
    """Return a model's languages with those that are read and written by default, where the folder or the user says.

    Raises:
        ForeignError: If the tokeniser puts something else around a text than any of them.
    """
    if (said := _said_by_file(folder)) is not None:
        ways = [around(template, language, None, said[1][0]) for language in sources]
        if not any(said == (way.source_prefix, way.source_suffix) for way in ways):
            raise ForeignError(f"{folder.path / TOKENIZER_FILE}: its post_processor puts no language of the model around a text")
    default_source = wished(folder, sources, "source") or stated(folder, sources, "src_lang")
    default_target = wished(folder, targets, "target")
    first, start = folder.forced_first(), folder.generation.get("decoder_start_token_id")
    by_id = {index: code for code, index in tokens.items() if any(language.code == code for language in targets)}
    notes = list(notes)
    if first is not None and first not in by_id:
        notes.append(f"forced_bos_token_id {first}: no language; the target's language begins an answer in its place")
    default_target = default_target or by_id.get(first, "") if first is not None else default_target
    if not default_target and isinstance(start, int) and any(language.decoder_start_id is not None for language in targets):
        default_target = by_id.get(start, "")
    languages = Languages(
        source=sources,
        target=targets,
        default_source=default_source,
        default_target=default_target or stated(folder, targets, "tgt_lang"),
    )
    told = [_counted("reads and writes", targets, targets[0].code)]
    told += [f"reads {languages.default_source} where a request does not say"] if languages.default_source else []
    told += [f"writes {languages.default_target} where a request does not say"] if languages.default_target else []
    return Speech(template=template, languages=languages, notes=[*told, *notes])


def _template(folder: Folder) -> Template:
    """Return what goes around every text by the class of the tokeniser, or by the family where no class is named.

    Raises:
        ForeignError: For a class that is not known here, or a `tokenizer.json` that does not put end-of-sequence behind a text.
    """
    first = folder.forced_first()
    target_prefix = [] if first is None else [first]
    name = folder.tokenizer_class
    if (said := _said_by_file(folder)) is not None:
        return Template(source_prefix=said[0], source_suffix=said[1][1:], target_prefix=target_prefix)
    if name in _BEGUN or (name in _GENERIC and folder.model_type == "bart"):
        return Template(source_prefix=[_special(folder, "<s>", "cls_token", "bos_token")], target_prefix=target_prefix)
    if name not in _PLAIN and name not in _GENERIC:
        raise ForeignError(f"{folder.path}: tokenizer_class {name!r} is not known here for model_type {folder.model_type}")
    return Template(target_prefix=target_prefix)


def _said_by_file(folder: Folder) -> tuple[list[int], list[int]] | None:
    """Return the ids before and after a text by the post-processor of `tokenizer.json`, None if the class has its own.

    Raises:
        ForeignError: If it does not put end-of-sequence directly behind a text, or another file contradicts it.
    """
    path, name = folder.path / TOKENIZER_FILE, folder.tokenizer_class
    if not (name in _AS_THE_FILE_SAYS or (not name and folder.model_type == "umt5")) or not path.exists():
        return None
    eos_id = _special(folder, "</s>", "eos_token")
    try:
        before, after = ids_around(read(path, MAX_JSON_BYTES))
    except TokenizerError as error:
        raise ForeignError(f"{path}: {error}") from error
    if after[:1] != [eos_id]:
        said = f"token {after[0]}" if after else "nothing"
        raise ForeignError(
            f"{path}: its post_processor puts {said} behind a text, not end-of-sequence, {eos_id}; that is not offered here"
        )
    flags = [folder.tokenizer.get(name) for name in ("add_bos_token", "add_eos_token")]
    if flags != [None, None] and [*map(bool, flags)] != [bool(before), bool(after)]:
        raise ForeignError(f"{path}: its post_processor is not what add_bos_token and add_eos_token of tokenizer_config.json say")
    for token_id in (*before, *after):
        folder.checked("of post_processor", token_id)
    return before, after


def _special(folder: Folder, otherwise: str, *fields: str) -> int:
    """Return the id of the special token that the first of some fields names."""
    said = next((folder.tokenizer[field] for field in fields if folder.tokenizer.get(field)), otherwise)
    return folder.token_id(str(said.get("content") if isinstance(said, dict) else said))


def _kind(folder: Folder, tokens: Mapping[str, str], otherwise: str) -> str:
    """Return which of a network's tokenisers a folder has: the class it names, the one whose token it has, or the usual one.

    Raises:
        ForeignError: If it names another class.
    """
    if folder.tokenizer_class in tokens:
        return folder.tokenizer_class
    if folder.tokenizer_class not in _GENERIC:
        known = " or ".join(tokens)
        raise ForeignError(f"{folder.path}: tokenizer_class {folder.tokenizer_class!r} is not known here; known: {known}")
    has = [kind for kind, token in tokens.items() if token in folder.token_ids]
    return has[0] if has else otherwise


def _coded(folder: Folder, codes: tuple[str, ...], pattern: re.Pattern[str]) -> dict[str, int]:
    """Return the language tokens whose names are the codes: the family's, and those that were added to it."""
    tokens = family_tokens(codes, folder.token_ids, folder.path, is_fairseq=True)
    added = {name: index for name, index in folder.token_ids.items() if pattern.fullmatch(name)}
    return {**tokens, **added}


def _counted(does: str, languages: list[Language], example: str) -> str:
    return f"{does} {len(languages)} languages, such as {example}" if len(languages) > 1 else f"{does} {languages[0].code}"
