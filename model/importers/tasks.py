"""The tasks that a T5 was trained on, as `task_specific_params` names them: a text before the source's own, with its defaults."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.model.generation import MAX_TASK_CHARACTERS, Language, Languages, Template
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.language_lists import pair_speech, wished
from dragoman.model.importers.language_names import english_name, other_names
from dragoman.model.importers.speech import Folder, Speech

TASKS_FIELD = "task_specific_params"
ALL_TRANSLATIONS = "translation"  # of all pairs of languages that the folder has a task for
_UNFIT = re.compile(r"[\x00\ud800-\udfff]|\{(source|target)\}")
_PAIR = re.compile(r"translation_([A-Za-z_]+?)_to_([A-Za-z_]+)")


def tasks_of(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of each task that a `config.json` has."""
    tasks = config.get(TASKS_FIELD)
    return {name: task for name, task in tasks.items() if isinstance(task, dict)} if isinstance(tasks, dict) else {}


def chosen_tasks(path: object, config: Mapping[str, Any], wish: str) -> dict[str, Mapping[str, Any]]:
    """Return the tasks that a wish means: the one of that name, or all translations; none for no wish.

    Raises:
        ForeignError: Naming those there are, if it is none of them.
    """
    tasks = tasks_of(config)
    if not wish:
        return {}
    if wish in tasks:
        return {wish: tasks[wish]}
    pairs = {name: task for name, task in tasks.items() if _PAIR.fullmatch(name)}
    if wish == ALL_TRANSLATIONS and pairs:
        return pairs
    choice = ", ".join([*([ALL_TRANSLATIONS] if pairs else []), *tasks]) or "none"
    raise ForeignError(f"{path}: --task: config.json has no task {wish!r:.80}; it has {choice:.400}")


def task_speech(folder: Folder, template: Template) -> Speech:
    """Return what is said to a model for the task that the user wishes.

    Raises:
        ForeignError: If there is no such task, or translations that do not say their languages in one way.
    """
    tasks = chosen_tasks(folder.path, folder.config, folder.wishes.task)
    pairs = {(found[1], found[2]): _prefix(folder, name, task) for name, task in tasks.items() if (found := _PAIR.fullmatch(name))}
    if not pairs:
        ((name, task),) = tasks.items()
        prefix = _prefix(folder, name, task)
        spoken = pair_speech(folder, _with_task(template, prefix))
        notes = [f"task {name}: {repr(prefix) if prefix else 'nothing'} before every text", *spoken.notes]
        return Speech(template=spoken.template, languages=spoken.languages, notes=notes)
    wordings = {_wording(source, target, prefix) for (source, target), prefix in pairs.items()}
    if len(wordings) > 1:
        ways = ", ".join(sorted(map(repr, wordings)))
        raise ForeignError(f"{folder.path}: its translations are asked for in several ways, {ways:.400}; choose one with --task")
    task_text = wordings.pop()
    sides = [list(dict.fromkeys(codes)) for codes in zip(*pairs, strict=True)]
    source, target = (
        [Language(code=code, names=names, label=english_name(code)) for code, names in zip(codes, other_names(codes), strict=True)]
        for codes in sides
    )
    languages = Languages(
        source=source,
        target=target,
        default_source=wished(folder, source, "source"),
        default_target=wished(folder, target, "target"),
    )
    named = " and ".join(", ".join(codes) for codes in sides)
    return Speech(
        template=_with_task(template, task_text), languages=languages, notes=[f"{task_text!r} before every text, of {named}"]
    )


def _prefix(folder: Folder, name: str, task: Mapping[str, Any]) -> str:
    """Return the text that a task puts before the source's own.

    Raises:
        ForeignError: If it is no text, or cannot be a task's.
    """
    prefix = task.get("prefix") or ""
    if not isinstance(prefix, str) or len(prefix) > MAX_TASK_CHARACTERS or _UNFIT.search(prefix):
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


def _with_task(template: Template, task: str) -> Template:
    return msgspec.structs.replace(template, task=task)
