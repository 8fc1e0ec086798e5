"""Glossaries: what files hold, changed and damaged ones, defaults of models, and hostile files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.glossaries import Glossaries, GlossaryError, read_glossary
from dragoman.server.service.requests import Term
from dragoman.server.service.terms import TermIndex, find_terms

TSV = "\ufeffdog\tHund\tHunde\r\n\n hot dog \t Hotdog\t\nAcme\n"
TBX = """<?xml version="1.0"?>
<!DOCTYPE martif SYSTEM "TBXBasiccoreStructV02.dtd">
<martif type="TBX-Basic" xml:lang="en"><text><body>
  <termEntry id="1">
    <langSet xml:lang="de-DE"><tig><term>Hund</term></tig><tig><term>K&#246;ter</term></tig></langSet>
    <langSet xml:lang="en-US"><tig><term>dog</term></tig><tig><term>hot
      dog</term></tig></langSet>
  </termEntry>
</body></text></martif>"""
NEW_TBX = """<tbx style="dca" type="TBX-Basic" xml:lang="en" xmlns="urn:iso:std:iso:30042:ed-2"><text><body>
<conceptEntry id="1"><langSec xml:lang="en"><termSec><term>dog</term></termSec></langSec>
<langSec xml:lang="de"><termSec><term>Hund</term></termSec></langSec></conceptEntry></body></text></tbx>"""


@pytest.mark.parametrize(
    ("name", "content", "terms"),
    [
        ("a.tsv", TSV, [Term("dog", ("Hund", "Hunde")), Term("hot dog", ("Hotdog",)), Term("Acme")]),
        ("a.tbx", TBX, [Term("dog", ("Hund", "Köter")), Term("hot dog", ("Hund", "Köter"))]),
        ("a.tbx", NEW_TBX, [Term("dog", ("Hund",))]),
    ],
)
def test_files_hold_terms(tmp_path: Path, name: str, content: str, terms: list[Term]) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read_glossary(tmp_path / name) == terms


BOMB = '<!DOCTYPE a [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><martif xml:lang="en">&b;</martif>'
FILE = '<!DOCTYPE a [<!ENTITY a SYSTEM "file:///etc/passwd">]><martif xml:lang="en">&a;</martif>'


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.tsv", b"dog\tHund\n\tKatze", "line 2: a term has 1 to 128 characters and at most 8 targets"),
        ("a.tsv", b"dog" * 50, "line 1: a term has"),
        ("a.tsv", b"dog\t" + b"Hund\t" * 9, "line 1: a term has"),
        ("a.tsv", b"dog\t\xff", "byte 4 is not UTF-8"),
        ("a.tsv", b"a\n" * 200_001, "more than 200000 terms"),
        ("a.tbx", BOMB.encode(), "line 1: declares an entity"),
        ("a.tbx", FILE.encode(), "line 1: declares an entity"),
        ("a.tbx", b"<martif", "line 1: unclosed token"),
        ("a.tbx", b"<martif/>", "has to have the language of its root (?) and one other; there are none"),
        (
            "a.tbx",
            TBX.replace("</termEntry>", '<langSet xml:lang="fr"><term>c</term></langSet></termEntry>').encode(),
            "has to have",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GlossaryError) as refused:
        read_glossary(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path / name}: {reason}")


def targets(index: TermIndex) -> list[str]:
    return [target for match in find_terms("dog", [index]) for target in match.targets]


def refusal(find: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        find(*arguments)
    return refused.value.message


def test_a_changed_file_is_used_once_it_has_settled_and_a_damaged_one_never(tmp_path: Path) -> None:
    folder = tmp_path / "glossaries"
    there = Glossaries(folder, poll_seconds=0.0)
    assert refusal(there.find, "a") == "glossary: 'a' is not known; the model has none"
    folder.mkdir()
    (folder / "a.tsv").write_text("dog\tHund")
    (folder / "b.tbx").write_text("damaged")
    (folder / ".c.tsv").write_text("dog\tHund")
    assert targets(there.find("a")) == ["Hund"] and there.names() == ["a", "b"]
    assert refusal(there.find, "b") == "glossary: 'b' cannot be used; the model has a, b"
    for name in ("", "..", "../a", "x" * 200, "c\0"):
        assert refusal(there.find, name).startswith("glossary: ") and name != "a"
    (folder / "a.tsv").write_text("dog\tKöter")
    assert [targets(there.find("a")) for _ in range(2)] == [["Hund"], ["Köter"]]
    (folder / "a.tsv").write_bytes(b"\xff")
    assert [targets(there.find("a")) for _ in range(3)] == [["Köter"]] * 3
    (folder / "a.tsv").unlink()
    assert refusal(there.find, "a").startswith("glossary: 'a' is not known")
    assert refusal(Glossaries(None).find, "a") == "glossary: 'a' is not known; the model has none"


def test_each_of_many_terms_is_found() -> None:
    index = TermIndex(Term(f"the word{number}" if number % 2 else f"word{number}", ("x",)) for number in range(10_000))
    assert len(index) == 10_000
    matches = find_terms(" ".join(f"the word{number}" for number in range(0, 10_000, 200)), [index])
    assert [match.source for match in matches[:3]] == ["word0", "word200", "word400"] and len(matches) == 50
