"""The store of callers' glossaries: shared between processes, bounded, and unharmed by damaged files and hostile ids."""

from pathlib import Path

import pytest

from dragoman.server.service import glossary_store
from dragoman.server.service.glossary_store import Draft, Glossary, GlossaryLimit, GlossaryStore, Pair, tsv_of
from dragoman.server.service.terms import TermIndex, find_terms

PAIR = Pair("en", "de")


def put(store: GlossaryStore, owner: str, glossary_id: str = "", *, name: str = "a", **entries: str) -> Glossary:
    def change(draft: Draft) -> None:
        draft.name, draft.contents[PAIR] = name, tsv_of(entries)

    glossary = store.write(owner, glossary_id, change)
    assert glossary is not None
    return glossary


def targets(index: TermIndex | None) -> list[str]:
    return [] if index is None else [target for match in find_terms("dog", [index]) for target in match.targets]


def test_stores_of_one_folder_share_glossaries(tmp_path: Path) -> None:
    one, two = GlossaryStore(tmp_path), GlossaryStore(tmp_path)
    made = put(one, "anna", dog="Hund")
    assert two.all("anna") == [made] and two.find("anna", made.id) == made and one.all("bert") == []
    assert targets(two.index("anna", made.id, PAIR)) == ["Hund"]
    put(one, "anna", made.id, dog="Katz")
    assert targets(two.index("anna", made.id, PAIR)) == ["Katz"]
    assert two.index("anna", made.id, PAIR) is two.index("anna", made.id, PAIR)
    assert two.index("anna", made.id, Pair("en", "fr")) is None and two.index("bert", made.id, PAIR) is None
    assert two.delete("anna", made.id) and not one.delete("anna", made.id) and one.index("anna", made.id, PAIR) is None
    one.close()
    assert tmp_path.is_dir()


def test_a_temporary_folder_ends_with_the_store() -> None:
    store = GlossaryStore()
    put(store, "../../anna", dog="Hund")
    folder = store._folder
    assert [path.parent for path in folder.iterdir()] == [folder] and store.all("anna") == []
    store.close()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", ".lock", "a" * 5000, "\0", "00000000-0000-4000-8000-000000000000\n"])
def test_hostile_ids_are_unknown(tmp_path: Path, name: str) -> None:
    store = GlossaryStore(tmp_path)
    made = put(store, "anna", dog="Hund")
    assert store.find("anna", name) is store.entries("anna", name, PAIR) is store.index("anna", name, PAIR) is None
    assert not store.delete("anna", name) and store.all("anna") == [made]
    assert not name or store.write("anna", name, lambda draft: None) is None


def test_damaged_files_and_failed_changes_harm_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GlossaryStore(tmp_path)
    good, damaged = put(store, "anna", dog="Hund"), put(store, "anna", dog="Katze")
    next(tmp_path.rglob(damaged.id)).write_bytes(b"\xff{")
    assert store.all("anna") == [good] and store.index("anna", damaged.id, PAIR) is None

    def fail(draft: Draft) -> None:
        draft.contents.clear()
        raise KeyError

    with pytest.raises(KeyError):
        store.write("anna", good.id, fail)
    monkeypatch.setattr(glossary_store, "MAX_ENTRIES", 2)
    with pytest.raises(GlossaryLimit, match="entries: a caller's glossaries would have 3; at most 2 are kept"):
        put(store, "anna", a="b", c="d")
    assert put(store, "anna", good.id, a="b", c="d").dictionaries[0].num_entries == 2, "instead of those of before"
    assert put(store, "bert", a="b")
    monkeypatch.setattr(glossary_store, "MAX_GLOSSARIES", 1)
    with pytest.raises(GlossaryLimit, match="glossaries: "):
        put(store, "anna", a="b")
    monkeypatch.setattr(glossary_store, "MAX_INDEXED", 3)
    indexes = [store.index("anna", good.id, PAIR), store.index("bert", store.all("bert")[0].id, PAIR)]
    assert store.index("anna", good.id, PAIR) is indexes[0]
    put(store, "bert", store.all("bert")[0].id, a="b", c="d")
    assert store.index("bert", store.all("bert")[0].id, PAIR) and store.index("anna", good.id, PAIR) is not indexes[0]
