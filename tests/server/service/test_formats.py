"""Documents: translations are in the places of the texts, in their formats, and all else is as it was."""

import re
import zipfile
from collections.abc import Callable, Sequence
from io import BytesIO
from random import Random
from typing import Any

import openpyxl
import pytest
from docx import Document as Docx
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls, qn
from lxml import etree
from odf.office import Annotation
from odf.opendocument import OpenDocumentText
from odf.opendocument import load as load_odt
from odf.teletype import extractText
from odf.text import A, H, Note, NoteBody, NoteCitation, P, Span, Tab
from openpyxl.cell.rich_text import CellRichText, TextBlock
from openpyxl.cell.text import InlineFont
from openpyxl.worksheet.table import Table
from pptx import Presentation

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.formats.fragments import MAX_TEXTS, DocumentTooLarge
from dragoman.server.service.formats.kinds import imported
from dragoman.server.service.markup import Markup
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.tags import Translated

WORD = f"<w:document {nsdecls('w')}><w:body>{{}}</w:body></w:document>"
SHEET = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
XLIFF_1, XLIFF_2 = (f'xmlns="urn:oasis:names:tc:xliff:document:{version}"' for version in ("1.2", "2.0"))


def reversed_words(words: Sequence[str]) -> Sequence[int]:
    return range(len(words) - 1, -1, -1)


def translate(filename: str, content: bytes, order: Callable[[Sequence[str]], Sequence[int]] = reversed_words) -> bytes:
    """Return a document whose words are in capitals, and in another order in each text."""
    document = imported(filename, content, 100_000)

    def segment(text: str) -> Translated:
        spans = [found.span() for found in re.finditer(r"\S+", text)]
        target, alignment, gaps = "", [], iter(["", *re.findall(r"\s+", text)])
        for number in order([text[slice(*span)] for span in spans]):
            target += next(gaps)
            word = text[slice(*spans[number])]
            alignment.append((len(target), len(target) + len(word), *spans[number]))
            target += word if word.startswith("%") else word.upper()
        return Translated(0, len(text), target, alignment)

    translations = list[str]()
    for text in document.texts:
        markup = Markup(GenerateRequest(text=text, markup=document.markup, keep_placeholders=document.keep_placeholders))
        translations.append(markup.render([[segment(block.text)] for block in markup.blocks]))
    return document.written(translations, "de")


def archive(*members: tuple[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    output = BytesIO()
    with zipfile.ZipFile(output, "w", method) as written:
        for name, content in members:
            written.writestr(name, content)
    return output.getvalue()


def members(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(content)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def saved(document: Any) -> bytes:
    output = BytesIO()
    document.save(output)
    return output.getvalue()


SRT = """\ufeff1\r
00:00:01,000 --> 00:00:02,500 X1:40\r
<i>hello dear</i>\r
world, how are you?\r
\r
2\r
00:00:03,000 --> 00:00:04,000\r
{\\an8}- yes.\r
- no & never <3\r
3\r
00:00:05,000 --> 00:00:06,000\r
♪ 12 ♪\r
"""
VTT = """WEBVTT - title

NOTE
this stays

STYLE
::cue { color: red }

id-1
00:01.000 --> 00:02.000 align:start
<v Fred>hello <b>big</b> &amp; small
world here

00:03.000 --> 00:04.000
<00:03.500>one <c.x>two</c>"""


def test_lines_of_cues_are_translated_and_nothing_else() -> None:
    expected = SRT.replace("<i>hello dear</i>\r\nworld, how are you?", "YOU? ARE HOW WORLD,\r\n<i>DEAR HELLO</i>")
    expected = expected.replace("- yes.", "YES. -").replace("- no & never <3", "<3 NEVER & NO -")
    assert translate("a.SRT", SRT.encode()).decode() == expected
    expected = VTT.replace("hello <b>big</b> &amp; small\nworld here", "HERE WORLD SMALL\n&amp; <b>BIG</b> HELLO")
    assert translate("a.vtt", VTT.encode()).decode() == expected.replace("one <c.x>two</c>", "<c.x>TWO</c> ONE")


@pytest.mark.parametrize(("filename", "text"), [("a.srt", SRT), ("a.vtt", VTT), ("a.vtt", VTT.replace("\n", "\r"))])
def test_subtitles_whose_texts_stay_are_the_same_bytes(filename: str, text: str) -> None:
    document = imported(filename, text.encode(), 1000)
    assert document.written(document.texts, "de").decode() == text


def test_a_translation_has_no_more_lines_than_its_cue_and_no_cues() -> None:
    source = "--> \naa aa aa\naa aa\n"
    for text in ("a", "word " * 20, "x" * 50 + " y z", "a\x1db --> c", ""):
        document = imported("a.srt", source.encode(), 1000)
        _, *lines = document.written([text], "de").decode().splitlines()
        assert len(lines) <= 2 and " ".join(lines).split() == text.replace("-->", "->").split()
    _, *lines = imported("a.srt", source.encode(), 1000).written(["one two three"], "de").decode().splitlines()
    assert lines == ["one two", "three"]


PO = r"""# Title
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"

#, c-format
msgid ""
"hello %s,\n"
"\"you\"\n"
msgstr ""

#, fuzzy
#| msgid "old"
msgctxt "menu"
msgid "open"
msgstr "Auf"

msgid "done"
msgstr "Fertig"

#: a.c:1
msgid "%d file"
msgid_plural "%d other files"
msgstr[0] ""
msgstr[1] ""

msgid "12"
msgstr ""
#~ msgid "gone"
#~ msgstr "weg"
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_untranslated_and_fuzzy_messages_are_filled_and_fuzzy(end: str) -> None:
    expected = PO.replace("#, c-format", "#, fuzzy, c-format")
    expected = expected.replace('"\\"you\\"\\n"\nmsgstr ""\n', '"\\"you\\"\\n"\nmsgstr ""\n"HELLO %s,\\n"\n"\\"YOU\\"\\n"\n')
    expected = expected.replace('"Auf"', '"OPEN"').replace('msgid "%d file"', '#, fuzzy\nmsgid "%d file"')
    expected = expected.replace('msgstr[0] ""', 'msgstr[0] "%d FILE"').replace('msgstr[1] ""', 'msgstr[1] "%d OTHER FILES"')
    found = translate("a.po", PO.replace("\n", end).encode(), lambda words: range(len(words)))
    assert found.decode() == expected.replace("\n", end)


def test_units_of_xliff_are_filled_for_review_with_their_inline_elements() -> None:
    source = f"""<xliff version="1.2" {XLIFF_1}><file source-language="en"><body>
    <trans-unit id="1"><source>hello <g id="1">big</g> <x id="2"/>world %s</source></trans-unit>
    <group translate="no"><trans-unit id="2"><source>no</source></trans-unit>
    <trans-unit id="3" translate="yes"><source>yes</source><target state="new">old</target></trans-unit></group>
    <trans-unit id="4"><source>done</source><target>Fertig</target></trans-unit></body></file></xliff>"""
    start, filled = '<target state="needs-review-translation">', '%s <x id="2"/>WORLD <g id="1">BIG</g> HELLO</target>'
    expected = source.replace("%s</source>", f"%s</source>{start}{filled}").replace('"en">', '"en" target-language="de">')
    expected = expected.replace('<target state="new">old', f"{start}YES")
    assert_same_xml(translate("a.xlf", source.encode()), expected)
    source = f"""<xliff {XLIFF_2} version="2.0" srcLang="en"><file id="f"><unit id="u"><segment><source>hello <pc id="1">big</pc>
    world <mrk id="m" translate="no">Acme</mrk></source></segment><segment state="reviewed"><source>a</source><target>b</target>
    </segment></unit></file></xliff>"""
    expected = source.replace("<segment>", '<segment state="translated">').replace('"en">', '"en" trgLang="de">')
    filled = '<target>WORLD <pc id="1">BIG</pc> HELLO <mrk id="m" translate="no">Acme</mrk></target>'
    assert_same_xml(translate("a.xliff", source.encode("utf-16")), expected.replace("</mrk></source>", f"</mrk></source>{filled}"))


def assert_same_xml(content: bytes, expected: str) -> None:
    found = etree.tostring(etree.fromstring(content), encoding="unicode")
    assert etree.canonicalize(found) == etree.canonicalize(expected)


LINK = '<w:hyperlink w:anchor="b"><w:r><w:rPr><w:color w:val="0000FF"/></w:rPr><w:t>our link</w:t></w:r></w:hyperlink>'
PARAGRAPH = f"""<w:p {nsdecls("w")}><w:r><w:t xml:space="preserve">see </w:t></w:r><w:bookmarkStart w:id="1" w:name="b"/>{LINK}
<w:r><w:t xml:space="preserve"> on </w:t></w:r><w:bookmarkEnd w:id="1"/><w:r><w:fldChar w:fldCharType="begin"/></w:r>
<w:r><w:instrText>HYPERLINK "x"</w:instrText></w:r><w:r><w:fldChar w:fldCharType="separate"/></w:r><w:r><w:t>page</w:t></w:r>
<w:r><w:fldChar w:fldCharType="end"/></w:r><w:r><w:fldChar w:fldCharType="begin"/><w:instrText>PAGE</w:instrText></w:r>
<w:r><w:fldChar w:fldCharType="separate"/></w:r><w:r><w:t>five</w:t></w:r><w:r><w:fldChar w:fldCharType="end"/></w:r>
<w:proofErr w:type="spellStart"/><w:r><w:rPr><w:lang w:val="en-US"/></w:rPr><w:t xml:space="preserve"> of </w:t></w:r>
<w:r><w:rPr><w:b/></w:rPr><w:t>it</w:t></w:r><w:r><w:footnoteReference w:id="2"/></w:r><w:sdt><w:sdtPr/><w:sdtContent>
<w:r><w:t xml:space="preserve"> inside</w:t></w:r></w:sdtContent></w:sdt><w:r><w:tab/><w:t>next</w:t></w:r></w:p>"""


def test_word_documents_keep_formats_links_fields_and_notes() -> None:
    document = Docx()
    document.sections[0].header.paragraphs[0].text = "a header"
    document.add_paragraph()._p.getparent().insert(0, parse_xml(PARAGRAPH))
    document.add_table(1, 2).cell(0, 1).text = "a cell"
    source = saved(document)
    content = translate("a.docx", source)
    found = Docx(BytesIO(content))
    [paragraph, *_] = found.paragraphs
    assert [run.text for run in paragraph.runs if run.bold] == ["IT"]
    [link] = paragraph.hyperlinks
    assert link.text == "LINK OUR" and link.runs[0].font.color.rgb is not None
    assert "five" in paragraph.text and paragraph.text.endswith("SEE\tNEXT")
    assert paragraph._p.xpath("string(.//w:sdtContent)").strip() == "INSIDE" and not paragraph._p.xpath(".//w:proofErr")
    assert found.sections[0].header.paragraphs[0].text == "HEADER A" and found.tables[0].cell(0, 1).text == "CELL A"
    before, after = members(source), members(content)
    assert list(before) == list(after)
    assert {name for name in before if before[name] != after[name]} == {"word/document.xml", "word/header1.xml"}


def test_starts_and_ends_stay_in_order_wherever_words_go() -> None:
    random = Random(1)

    def shuffled(words: Sequence[str]) -> Sequence[int]:
        return random.sample(range(len(words)), len(words))

    def kept(root: Any) -> list[Any]:
        return [(one.tag, sorted(one.items())) for one in root.iter(*map(qn, ("w:fldChar", "w:bookmarkStart", "w:bookmarkEnd")))]

    source = archive(("word/document.xml", WORD.format(PARAGRAPH)))
    before = etree.fromstring(members(source)["word/document.xml"])
    for _ in range(50):
        after = etree.fromstring(members(translate("a.docx", source, shuffled))["word/document.xml"])
        assert kept(after) == kept(before)
        assert len({"".join(sorted("".join(root.itertext()).lower())).strip() for root in (before, after)}) == 1


def test_slides_and_their_notes_are_translated() -> None:
    document = Presentation()
    slide = document.slides.add_slide(document.slide_layouts[1])
    slide.shapes.title.text = "my title"
    paragraph = slide.placeholders[1].text_frame.paragraphs[0]
    for text, is_bold in (("some ", None), ("bold", True), (" text", None)):
        run = paragraph.add_run()
        run.text, run.font.bold = text, is_bold
    paragraph.add_line_break()
    paragraph.add_run().text = "second line"
    slide.notes_slide.notes_text_frame.text = "a note"
    [slide] = Presentation(BytesIO(translate("a.pptx", saved(document)))).slides
    assert slide.shapes.title.text == "TITLE MY" and slide.notes_slide.notes_text_frame.text == "NOTE A"
    [paragraph] = slide.placeholders[1].text_frame.paragraphs
    assert paragraph.text == "TEXT BOLD SOME\vLINE SECOND"
    assert [run.text for run in paragraph.runs if run.font.bold] == ["BOLD"]


def test_texts_of_cells_are_translated_and_not_formulas_and_heads_of_tables() -> None:
    document = openpyxl.Workbook()
    sheet = document.active
    for row in (["name", "size", "a head"], ["a dog", 3, True], ["=A2", "=SUM(T[size])", "a dog"]):
        sheet.append(row)
    sheet["D2"] = CellRichText("plain ", TextBlock(InlineFont(b=True), "bold"), " end")
    sheet.add_table(Table(displayName="T", ref="A1:B3"))
    found = openpyxl.load_workbook(BytesIO(translate("a.xlsx", saved(document))), rich_text=True).active
    values = [[cell.value for cell in row] for row in found.iter_rows(max_col=3)]
    assert values == [["name", "size", "HEAD A"], ["DOG A", 3, True], ["=A2", "=SUM(T[size])", "DOG A"]]
    assert str(found["D2"].value) == "END BOLD PLAIN" and [str(one) for one in found["D2"].value if isinstance(one, TextBlock)] == [
        "BOLD"
    ]
    cells = f'<worksheet {SHEET}><sheetData><row><c t="inlineStr"><is><t>a cell</t></is></c></row></sheetData></worksheet>'
    written = members(translate("a.xlsx", archive(("xl/worksheets/sheet1.xml", cells))))
    assert b'<is><t xml:space="preserve">CELL A</t></is>' in written["xl/worksheets/sheet1.xml"]


def test_texts_of_opendocument_keep_spans_links_and_notes() -> None:
    document = OpenDocumentText()
    paragraph, note, body = P(), Note(noteclass="footnote"), NoteBody()
    for element in (Span(text="hello "), A(href="http://x", text="nice link"), note, Tab()):
        paragraph.addElement(element)
    for part in (NoteCitation(text="1"), body):
        note.addElement(part)
    body.addElement(P(text="a note"))
    comment = Annotation()
    comment.addElement(P(text="a comment"))
    paragraph.addElement(comment)
    paragraph.addText("after it")
    for part in (H(outlinelevel=1, text="my heading"), paragraph):
        document.text.addElement(part)
    content = translate("a.odt", saved(document))
    found = load_odt(BytesIO(content))
    assert [extractText(one) for one in found.getElementsByType(H)] == ["HEADING MY"]
    [link] = found.getElementsByType(A)
    assert extractText(link) == "LINK NICE" and link.getAttribute("href") == "http://x"
    assert [extractText(one) for one in found.getElementsByType(NoteBody)] == ["NOTE A"]
    assert extractText(found.getElementsByType(P)[0]).endswith("LINK NICE HELLO1NOTE A\ta commentIT AFTER")
    assert zipfile.ZipFile(BytesIO(content)).infolist()[0].filename == "mimetype"


ENTITIES = '<!DOCTYPE x [<!ENTITY a "aaa"><!ENTITY b "&a;&a;"><!ENTITY c SYSTEM "file:///etc/passwd">]>'
UNIT = '<xliff version="1.2"><file><trans-unit><source>{}</source></trans-unit></file></xliff>'


@pytest.mark.parametrize(
    ("filename", "content", "message"),
    [
        ("a.docx", b"", "is missing or blank"),
        ("a.exe", b"MZ", "documents of the kind 'exe' are not translated"),
        (f"{'a' * 252}.txt", b"a", "has a name"),
        ("a.docx", b"hello", "is no ZIP archive, or is damaged"),
        ("a.docx", b"\xd0\xcf\x11\xe0" + bytes(600), "is encrypted, or of a format of before 2007"),
        ("a.xlsx", archive(("word/document.xml", WORD)), "is no xlsx document"),
        ("a.docx", archive(("word/document.xml", WORD), method=zipfile.ZIP_LZMA), "is compressed by another method"),
        ("a.docx", archive(("word/document.xml", WORD), ("a", bytes(65 * 2**20))), "has more than 4096 members, or 67108864 bytes"),
        ("a.docx", archive(*((str(number), b"") for number in range(4097))), "has more than 4096 members"),
        ("a.docx", archive(("word/document.xml", bytes(9 * 2**20))), "has texts and their forms of more than"),
        (
            "a.docx",
            archive(("word/document.xml", WORD), ("word/documen_.xml", WORD)).replace(b"n_", b"nt"),
            "has two members of one name",
        ),
        ("a.docx", archive(("word/document.xml", "<w:p>" * 1000)), "has XML that is not well-formed"),
        ("a.docx", archive(("word/document.xml", WORD.format("<w:p>" * 300 + "</w:p>" * 300))), "has XML that is not .* deeply"),
        ("a.docx", archive(("word/document.xml", WORD.format("<w:p/>" * 1000001))), "has more than 1000000 elements"),
        ("a.docx", archive(("word/document.xml", WORD.format("<w:p/>" * 100001))), "has more than 100000 elements in its par"),
        ("a.odt", archive(("content.xml", '<!DOCTYPE x PUBLIC "a" "b"><x/>')), "has XML with a DOCTYPE"),
        ("a.xlf", (ENTITIES + UNIT.format("&c;")).encode(), "has XML with a DOCTYPE"),
        ("a.xlf", b"<html/>", "is no XLIFF"),
        ("a.xlf", UNIT.format("a" + "<x/>" * 100000).encode(), "has more than 100000 elements"),
        ("a.po", b'msgid "a"\nmsgid "b"\n', "has a line 2 that is none of a PO file"),
        ("a.po", b'msgid ""\nmsgstr "charset=latin-1"\n', "is no UTF-8, by its charset"),
        ("a.po", b'msgid "a"\n' + b"".join(b'msgstr[%d] ""\n' % n for n in range(99)), "has a line 18 that is none"),
        ("a.po", b'msgid "a"\nmsgstr ""\n' * (MAX_TEXTS + 1), f"has more than {MAX_TEXTS} texts"),
        ("a.po", b"\n" * 150001, "is missing or blank"),
        ("a.po", b"#\n" * 150001, "has more than 150000 lines"),
        ("a.srt", SRT.encode("utf-16"), "is no UTF-8"),
        ("a.srt", b"hello", "has no cues"),
        ("a.srt", VTT.encode(), "is WebVTT"),
        ("a.vtt", SRT.encode(), "does not begin with WEBVTT"),
        ("a.srt", b"-->\n" + b"<i>" * 100001, "has more than 100000 elements"),
        ("a.srt", b"-->\n" + b"a" * 100001, "more than 100000 characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_and_damaged_documents_are_refused(filename: str, content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"file: {message}") as caught:
        imported(filename, content, 100_000)
    assert isinstance(caught.value, DocumentTooLarge) is bool(re.match(r"(has )?more than \d+ [^m]", message))


def test_names_of_members_are_no_paths_and_links_are_copied() -> None:
    link = zipfile.ZipInfo("word/media/link")
    link.external_attr = 0o120777 << 16
    output = BytesIO()
    with zipfile.ZipFile(output, "w") as written:
        written.writestr(link, "/etc/passwd")
        written.writestr("../../evil", "x")
        written.writestr("word/document.xml", WORD.format("<w:p><w:r><w:t>a dog</w:t></w:r></w:p>"))
    content = translate("a.docx", output.getvalue())
    found = zipfile.ZipFile(BytesIO(content)).getinfo(link.filename)
    assert found.external_attr == link.external_attr and members(content)["../../evil"] == b"x" and b"DOG A" in content


def test_damage_anywhere_in_an_archive_is_told() -> None:
    source = archive(("mimetype", b"x"), ("word/document.xml", WORD.format("<w:p><w:r><w:t>a dog</w:t></w:r></w:p>")), ("m", b"x"))
    random, num_refused = Random(1), 0
    for _ in range(500):
        damaged = bytearray(source)
        for _ in range(random.choice((1, 2, 5))):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        try:
            assert members(translate("a.docx", bytes(damaged)))
        except InvalidRequest as error:
            num_refused += error.message.startswith("file: ")
    assert num_refused > 100
