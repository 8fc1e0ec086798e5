"""Template and languages of a foreign model: tokens around a text, and the way of naming languages.

Each format is that of the family's own tokeniser in Transformers, and of what its `generate` is told of the target.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from dragoman.model.generation import (
    MAX_LANGUAGES,
    MAX_TASK_CHARACTERS,
    Language,
    Languages,
    LanguageTable,
    Template,
    around,
    cased_spelling,
    spelling,
)
from dragoman.model.importers import language_names
from dragoman.model.importers.files import MAX_JSON_BYTES, ForeignError, is_whole, listed, read
from dragoman.model.importers.language_names import english_name, is_group, other_names
from dragoman.model.importers.tokenizers import TOKENIZER_FILE, VOCABULARY_FILE, family_tokens
from dragoman.model.text.json_file import ids_around
from dragoman.model.text.tokenizer import TokenizerError

TASKS_FIELD: Final = "task_specific_params"
ALL_TRANSLATIONS: Final = "translation"  # of all pairs of languages that the folder has a task for
# M2M100 calls Northern Sotho so; the registry has no such language.
_ALIASES: Final = {"ns": "nso"}
_CODE: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{1,64}")
_MARIAN: Final = re.compile(r">>(.+)<<")
_MADLAD: Final = re.compile(r"<2([A-Za-z0-9_-]+)>")
_LANGUAGE: Final = re.compile(r"[A-Za-z]{2,3}(?:[_-][A-Za-z0-9]+)*")
_NLLB: Final = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
_MBART: Final = re.compile(r"[a-z]{2}_[A-Z]{2}")
_TASK_PAIR: Final = re.compile(r"translation_([A-Za-z_]+?)_to_([A-Za-z_]+)")
_UNFIT_PREFIX: Final = re.compile(r"[\x00\ud800-\udfff]|\{(source|target)\}")
# Classes that read any tokenizer.json, and say nothing of a family.
_GENERIC: Final = ("", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "SentencePieceBackend")
# Those of them that take the tokens around a text from tokenizer.json; so does UMT5 where no class is named.
_AS_THE_FILE_SAYS: Final = ("PreTrainedTokenizer", "TokenizersBackend")
# Classes that put end-of-sequence after a text and nothing else around it, and those that put <s> before it, too.
_PLAIN: Final = ("T5Tokenizer", "MT5Tokenizer", "ByT5Tokenizer", "PegasusTokenizer", "MarianTokenizer")
_BEGUN: Final = ("BartTokenizer", "RobertaTokenizer", "BarthezTokenizer")
_MAX_NAMED: Final = 5
Affixes = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The user's choices, empty where there is none: languages (default or only ones), and one of `task_specific_params`."""

    source_language: str = ""
    target_language: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A foreign folder, as far as its texts go: JSON files, ids of tokens by name (at least special ones), sizes of vocabularies.

    `generation` has the fields that Transformers' `generate` takes; see `generation_fields`.
    """

    path: Path
    model_type: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    token_ids: Mapping[str, int]
    source_vocab_size: int
    target_vocab_size: int
    options: PromptOptions = field(default_factory=PromptOptions)

    @property
    def tokenizer_class(self) -> str:
        """Transformers' class of the tokeniser, without `Fast`; empty where no file names it."""
        name = self.tokenizer.get("tokenizer_class") or self.config.get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else ""

    def token_id(self, name: str) -> int:
        """Return the id of a token; raise `ForeignError` if no file names it."""
        if name not in self.token_ids:
            raise ForeignError(f"{self.path}: its tokeniser has no token {name!r}, which goes around every text")
        return self.checked(name, self.token_ids[name])

    def checked(self, name: str, token_id: int) -> int:
        """Return an id; raise `ForeignError` if the model has no row for it."""
        if not 0 <= token_id < self.source_vocab_size:
            raise ForeignError(f"{self.path}: token {name!r} has the id {token_id}, the model room for {self.source_vocab_size}")
        return token_id

    def target_token(self, field: str) -> int | None:
        """Return a token that `generate` is given, None where there is none; raise `ForeignError` if the model has it not."""
        value = self.generation.get(field)
        if value is not None and not (is_whole(value) and 0 <= value < self.target_vocab_size):
            raise ForeignError(f"{self.path}: {field} {value!r:.40} is no token of the {self.target_vocab_size}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """Template around every text, languages (None where they are not known), and notes on them, a sentence each."""

    template: Template
    languages: Languages | None
    notes: Sequence[str] = ()


def read_prompt_format(folder: Folder) -> PromptFormat:
    """Return the template and the languages of a folder's model."""
    formats: dict[str, Callable[[Folder], PromptFormat]] = {"marian": _marian, "m2m_100": _m2m100, "mbart": _mbart}
    return formats.get(folder.model_type, _without)(folder)


def _marian(folder: Folder) -> PromptFormat:
    """`>>fra<<` before the text, by target language, of models that have such pieces; the pair itself of others."""
    template = _template(folder)
    pieces = {found[1]: index for name, index in folder.token_ids.items() if (found := _MARIAN.fullmatch(name))}
    if not pieces:
        return _pair(folder, template)
    targets, notes = _languages(folder, pieces, _in("source_prefix"))
    code = folder.options.source_language or _named(folder, "source_lang")
    source = _with_names([code]) if _is_code(folder, code) else []
    languages = Languages(source=source, target=targets, default_target=_wished(folder, targets, "target"))
    notes = [_counted("writes", targets, f">>{targets[0].code}<<"), *notes]
    return PromptFormat(template=template, languages=languages, notes=notes)


def _m2m100(folder: Folder) -> PromptFormat:
    """M2M100 and NLLB: the source's language before the text, the target's forced to begin the answer."""
    kind = _kind(folder, {"M2M100Tokenizer": "__en__", "NllbTokenizer": "eng_Latn"}, "M2M100Tokenizer")
    if kind == "M2M100Tokenizer":
        codes = (
            language_names.WMT21_LANGUAGES if folder.tokenizer.get("language_codes") == "wmt21" else language_names.M2M100_LANGUAGES
        )
        known = {} if (folder.path / VOCABULARY_FILE).exists() else folder.token_ids
        names = {code: f"__{code}__" for code in codes}
        ids = family_tokens(list(names.values()), known, folder.path, is_fairseq=False)
        tokens = {code: ids[name] for code, name in names.items() if name in ids}
    else:
        tokens = _coded(folder, language_names.NLLB_LANGUAGES, _NLLB)
    is_legacy = kind == "NllbTokenizer" and folder.tokenizer.get("legacy_behaviour") is True
    where = "after its end-of-sequence (legacy_behaviour)" if is_legacy else "before it"
    source = _in("source_suffix" if is_legacy else "source_prefix")
    return _multilingual(folder, Template(), tokens, source, _in("target_prefix"), [f"the source's language is said {where}"])


def _mbart(folder: Folder) -> PromptFormat:
    """mBART: the source's language after end-of-sequence, and the target's starts the decoder; mBART-50: as M2M100."""
    kind = _kind(folder, {"MBart50Tokenizer": "gl_ES", "MBartTokenizer": "en_XX"}, "MBartTokenizer")
    if kind == "MBart50Tokenizer":
        tokens = _coded(folder, language_names.MBART50_LANGUAGES, _MBART)
        notes = ["the source's language is said before it"]
        return _multilingual(folder, Template(), tokens, _in("source_prefix"), _in("target_prefix"), notes)
    tokens = _coded(folder, language_names.MBART_LANGUAGES, _MBART)
    start, first = folder.generation.get("decoder_start_token_id"), folder.target_token("forced_bos_token_id")
    is_started = start is None or start in tokens.values()
    is_forced = not is_started or first in tokens.values()

    def target(token_id: int) -> Affixes:
        return ({"decoder_start_id": token_id} if is_started else {}) | ({"target_prefix": [token_id]} if is_forced else {})

    how = " and ".join(["starts the decoder"] * is_started + ["begins every answer"] * is_forced)
    notes = ["the source's language is said after its end-of-sequence", f"the target's {how}"]
    return _multilingual(folder, Template(), tokens, _in("source_suffix"), target, notes)


def _without(folder: Folder) -> PromptFormat:
    """Families without languages of their own: tasks of T5's, `<2de>` of MADLAD, a pair that the user names."""
    template = _template(folder)
    if folder.model_type == "t5":
        tokens = {found[1]: index for name, index in folder.token_ids.items() if (found := _MADLAD.fullmatch(name))}
        known = {code: index for code, index in tokens.items() if _LANGUAGE.fullmatch(code) and not is_group(code)}
        if len(known) > 1:  # the source tells its language itself, so that naming it changes nothing
            others = sorted(f"<2{code}>" for code in tokens.keys() - known.keys())
            notes = [f"tokens that name no language: {listed(others, _MAX_NAMED)}"] if others else []
            return _multilingual(folder, template, known, lambda _: {}, _in("source_prefix"), notes)
    return _of_task(folder, template) if folder.options.task else _pair(folder, template)


def _in(field: str) -> Callable[[int], Affixes]:
    """Return the affixes of a language whose token is in one field."""
    return lambda token_id: {field: [token_id]}


def _multilingual(
    folder: Folder,
    template: Template,
    tokens: Mapping[str, int],
    source: Callable[[int], Affixes],
    target: Callable[[int], Affixes],
    notes: list[str],
) -> PromptFormat:
    """Return a model's languages with those that are read and written by default, where the folder or the user says.

    A tokeniser that puts something else around a text than any language's affixes is refused.
    """
    sources, left_out = _languages(folder, tokens, source)
    targets, _ = _languages(folder, tokens, target)
    notes = [*notes, *left_out]
    if (affixes := _of_post_processor(folder)) is not None:
        ways = [around(template, language, None, affixes[1][0]) for language in sources]
        if not any(affixes == (way.source_prefix, way.source_suffix) for way in ways):
            raise ForeignError(f"{folder.path / TOKENIZER_FILE}: its post_processor puts no language of the model around a text")
    default_source = _wished(folder, sources, "source") or _stated(folder, sources, "src_lang")
    default_target = _wished(folder, targets, "target")
    first, start = folder.target_token("forced_bos_token_id"), folder.generation.get("decoder_start_token_id")
    by_id = {index: code for code, index in tokens.items() if any(language.code == code for language in targets)}
    if first is not None and first not in by_id:
        notes.append(f"forced_bos_token_id {first}: no language; the target's language begins an answer in its place")
    default_target = default_target or by_id.get(first, "") if first is not None else default_target
    if not default_target and isinstance(start, int) and any(language.decoder_start_id is not None for language in targets):
        default_target = by_id.get(start, "")
    default_target = default_target or _stated(folder, targets, "tgt_lang")
    languages = Languages(source=sources, target=targets, default_source=default_source, default_target=default_target)
    told = [_counted("reads and writes", targets, targets[0].code)]
    told += [f"reads {default_source} where a request does not say"] if default_source else []
    told += [f"writes {default_target} where a request does not say"] if default_target else []
    return PromptFormat(template=template, languages=languages, notes=[*told, *notes])


def _template(folder: Folder) -> Template:
    """Return the template by the class of the tokeniser, or by the family where no class is named."""
    first = folder.target_token("forced_bos_token_id")
    target_prefix = [] if first is None else [first]
    name = folder.tokenizer_class
    if (affixes := _of_post_processor(folder)) is not None:
        return Template(source_prefix=affixes[0], source_suffix=affixes[1][1:], target_prefix=target_prefix)
    if name in _BEGUN or (name in _GENERIC and folder.model_type == "bart"):
        return Template(source_prefix=[_special(folder, "<s>", "cls_token", "bos_token")], target_prefix=target_prefix)
    if name not in _PLAIN and name not in _GENERIC:
        raise ForeignError(f"{folder.path}: tokenizer_class {name!r} is not known here for model_type {folder.model_type}")
    return Template(target_prefix=target_prefix)


def _of_post_processor(folder: Folder) -> tuple[list[int], list[int]] | None:
    """Return the ids before and after a text by the post-processor of `tokenizer.json`, None if the class has its own."""
    path, name = folder.path / TOKENIZER_FILE, folder.tokenizer_class
    if not (name in _AS_THE_FILE_SAYS or (not name and folder.model_type == "umt5")) or not path.exists():
        return None
    eos_id = _special(folder, "</s>", "eos_token")
    try:
        before, after = ids_around(read(path, MAX_JSON_BYTES))
    except TokenizerError as error:
        raise ForeignError(f"{path}: {error}") from error
    if after[:1] != [eos_id]:
        put = f"token {after[0]}" if after else "nothing"
        instead = f"{put} behind a text, not end-of-sequence, {eos_id}; that is not offered here"
        raise ForeignError(f"{path}: its post_processor puts {instead}")
    flags = [folder.tokenizer.get(name) for name in ("add_bos_token", "add_eos_token")]
    if flags != [None, None] and [*map(bool, flags)] != [bool(before), bool(after)]:
        raise ForeignError(f"{path}: its post_processor is not what add_bos_token and add_eos_token of tokenizer_config.json say")
    for token_id in (*before, *after):
        folder.checked("of post_processor", token_id)
    return before, after


def _special(folder: Folder, otherwise: str, *fields: str) -> int:
    """Return the id of the special token that the first of some fields names."""
    named = next((folder.tokenizer[field] for field in fields if folder.tokenizer.get(field)), otherwise)
    return folder.token_id(str(named.get("content") if isinstance(named, dict) else named))


def _kind(folder: Folder, tokens: Mapping[str, str], otherwise: str) -> str:
    """Return the class of a folder's tokeniser: the one it names, the one whose token it has, or the usual one."""
    if folder.tokenizer_class in tokens:
        return folder.tokenizer_class
    if folder.tokenizer_class not in _GENERIC:
        known = " or ".join(tokens)
        raise ForeignError(f"{folder.path}: tokenizer_class {folder.tokenizer_class!r} is not known here; known: {known}")
    return next((kind for kind, token in tokens.items() if token in folder.token_ids), otherwise)


def _coded(folder: Folder, codes: tuple[str, ...], pattern: re.Pattern[str]) -> dict[str, int]:
    """Return the language tokens whose names are the codes: the family's, and those that were added to it."""
    tokens = family_tokens(codes, folder.token_ids, folder.path, is_fairseq=True)
    return {**tokens, **{name: index for name, index in folder.token_ids.items() if pattern.fullmatch(name)}}


def _counted(does: str, languages: list[Language], example: str) -> str:
    return f"{does} {len(languages)} languages, such as {example}" if len(languages) > 1 else f"{does} {languages[0].code}"


def _languages(folder: Folder, tokens: Mapping[str, int], affixes: Callable[[int], Affixes]) -> tuple[list[Language], list[str]]:
    """Return a language for each code with the id of its token, and a note on those that are left out."""
    kept: dict[str, tuple[str, int]] = {}
    left_out: list[str] = []
    for code, token_id in sorted(tokens.items(), key=lambda item: item[1]):
        if _CODE.fullmatch(code) is None or not spelling(code) or cased_spelling(code) in kept:
            left_out.append(code)
        else:
            kept[cased_spelling(code)] = code, folder.checked(code, token_id)
    if not 0 < len(kept) <= MAX_LANGUAGES:
        raise ForeignError(f"{folder.path}: its tokeniser has {len(kept)} languages; 1 to {MAX_LANGUAGES} are possible")
    names = other_names([code for code, _ in kept.values()], _ALIASES if folder.model_type == "m2m_100" else None)
    languages = [
        Language(code=code, names=found, **affixes(token_id)) for (code, token_id), found in zip(kept.values(), names, strict=True)
    ]
    told = f"left out, being spelt like another language of the model or like none: {listed(left_out, _MAX_NAMED)}"
    return languages, [told] if left_out else []


def _with_names(codes: list[str], has_labels: bool = False) -> list[Language]:
    """Return languages that have no tokens."""
    labels = [english_name(code) if has_labels else "" for code in codes]
    return [
        Language(code=code, names=names, label=label) for code, names, label in zip(codes, other_names(codes), labels, strict=True)
    ]


def _wished(folder: Folder, languages: list[Language], side: str) -> str:
    """Return the code of the language that the user chooses for a side, or nothing; refuse one that the model has not."""
    asked = getattr(folder.options, f"{side}_language")
    if not asked:
        return ""
    language = LanguageTable(languages).find(asked)
    if language is None:
        codes = listed([language.code for language in languages], _MAX_NAMED)
        raise ForeignError(f"{folder.path}: --{side}-language: the model has no {asked!r}; it has {codes}")
    return language.code


def _stated(folder: Folder, languages: list[Language], field: str) -> str:
    """Return the code of the language that tokenizer_config.json states for a side, or nothing."""
    code = folder.tokenizer.get(field)
    language = LanguageTable(languages).find(code) if isinstance(code, str) else None
    return "" if language is None else language.code


def _named(folder: Folder, field: str) -> str:
    """Return the one language that tokenizer_config.json names, or nothing where it names a group of them (`roa`, `mul`)."""
    code = folder.tokenizer.get(field)
    return code if isinstance(code, str) and _CODE.fullmatch(code) and not is_group(code) else ""


def _is_code(folder: Folder, code: str) -> bool:
    """Return whether there is a code to make a language of; refuse a choice that can be no code."""
    if code and (_CODE.fullmatch(code) is None or not spelling(code)):
        raise ForeignError(f"{folder.path}: {code!r:.80} is no code of a language")
    return bool(code)


def _pair(folder: Folder, template: Template) -> PromptFormat:
    """Return the one language that is read and the one that is written, where the user or the tokeniser names them."""
    codes = {side: getattr(folder.options, f"{side}_language") or _named(folder, f"{side}_lang") for side in ("source", "target")}
    sides = {side: _with_names([code]) for side, code in codes.items() if _is_code(folder, code)}
    if not sides:
        return PromptFormat(template=template, languages=None)
    languages = Languages(source=sides.get("source", []), target=sides.get("target", []))
    pair = " -> ".join(codes[side] or "?" for side in ("source", "target"))
    return PromptFormat(template=template, languages=languages, notes=[f"one pair of languages: {pair}"])


def tasks_of(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of each task of `task_specific_params`, as T5's `config.json` has them."""
    tasks = config.get(TASKS_FIELD)
    return {name: task for name, task in tasks.items() if isinstance(task, dict)} if isinstance(tasks, dict) else {}


def chosen_tasks(path: object, config: Mapping[str, Any], chosen: str) -> dict[str, Mapping[str, Any]]:
    """Return the tasks that the user chooses: the one of that name, or all translations; none for no choice."""
    tasks = tasks_of(config)
    if not chosen:
        return {}
    if chosen in tasks:
        return {chosen: tasks[chosen]}
    pairs = {name: task for name, task in tasks.items() if _TASK_PAIR.fullmatch(name)}
    if chosen == ALL_TRANSLATIONS and pairs:
        return pairs
    choice = ", ".join([*([ALL_TRANSLATIONS] if pairs else []), *tasks]) or "none"
    raise ForeignError(f"{path}: --task: config.json has no task {chosen!r:.80}; it has {choice:.400}")


def _of_task(folder: Folder, template: Template) -> PromptFormat:
    """Return the template of the task that the user chooses: its text goes before the source's own."""
    tasks = chosen_tasks(folder.path, folder.config, folder.options.task)
    prefixes = {name: _task_prefix(folder, name, task) for name, task in tasks.items()}
    pairs = {(found[1], found[2]): prefix for name, prefix in prefixes.items() if (found := _TASK_PAIR.fullmatch(name))}
    if not pairs:
        ((name, prefix),) = prefixes.items()
        pair = _pair(folder, msgspec.structs.replace(template, task=prefix))
        notes = [f"task {name}: {repr(prefix) if prefix else 'nothing'} before every text", *pair.notes]
        return PromptFormat(template=pair.template, languages=pair.languages, notes=notes)
    wordings = {_wording(source, target, prefix) for (source, target), prefix in pairs.items()}
    if len(wordings) > 1:
        ways = ", ".join(sorted(map(repr, wordings)))
        raise ForeignError(f"{folder.path}: its translations are asked for in several ways, {ways:.400}; choose one with --task")
    text = wordings.pop()
    source, target = (_with_names(list(dict.fromkeys(codes)), has_labels=True) for codes in zip(*pairs, strict=True))
    languages = Languages(
        source=source,
        target=target,
        default_source=_wished(folder, source, "source"),
        default_target=_wished(folder, target, "target"),
    )
    named = " and ".join(", ".join(language.code for language in side) for side in (source, target))
    template = msgspec.structs.replace(template, task=text)
    return PromptFormat(template=template, languages=languages, notes=[f"{text!r} before every text, of {named}"])


def _task_prefix(folder: Folder, name: str, task: Mapping[str, Any]) -> str:
    """Return the text that a task puts before the source's own; refuse one that is no text, or cannot be a task's."""
    prefix = task.get("prefix") or ""
    if not isinstance(prefix, str) or len(prefix) > MAX_TASK_CHARACTERS or _UNFIT_PREFIX.search(prefix):
        raise ForeignError(
            f"{folder.path}: config.json: {TASKS_FIELD}.{name}.prefix is no text of at most {MAX_TASK_CHARACTERS} characters"
        )
    return prefix


def _wording(source: str, target: str, prefix: str) -> str:
    """Return a prefix with places for the names of its languages; as it is where it has not both of them, once."""
    names = english_name(source), english_name(target)
    if not all(names) or names[0] == names[1] or any(prefix.count(name) != 1 for name in names):
        return prefix
    return prefix.replace(names[0], "{source}").replace(names[1], "{target}")
