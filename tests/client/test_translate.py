"""`translate` and `score`: texts, lines of a stream and files through a client, and what is printed of the answers."""

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.errors import InternalError, Unavailable
from dragoman.client.lines import LineFile, stream_lines
from dragoman.client.score_files import Pairs, ScoreOptions, score_pairs, token_log_probs
from dragoman.client.search import Search
from dragoman.client.translate import TranslateOptions, translate_file, translate_lines, translate_texts
from dragoman.model.errors import InputError
from dragoman.v1 import generation_pb2
from tests.client.fake_server import EOS, PATIENCE_SECONDS, Held, failing

PLAIN, STREAMED = TranslateOptions(), TranslateOptions(is_streamed=True)
TEXT, ANSWER = "ein Hund\n\n  \nzwei Käfer\n犬", "EIN HUND\n\n\nZWEI KÄFER\n犬\n"


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def translated(client, source: Any, options: TranslateOptions = PLAIN) -> str:
    """Translate texts, or the bytes of a stream, and return what is printed, before the `InputError` if there is one."""
    out, refusal = StringIO(), ""
    try:
        if isinstance(source, bytes):
            translate_lines(client, BytesIO(source), out, options)
        else:
            translate_texts(client, source, out, options)
    except InputError as error:
        refusal = str(error)
    return out.getvalue() + refusal


@pytest.mark.parametrize("options", [PLAIN, STREAMED, TranslateOptions(concurrency=1)])
def test_each_text_or_line_has_one_line_and_blank_ones_ask_nothing(sync_client, service, options: TranslateOptions) -> None:
    assert translated(sync_client, TEXT.replace("Käfer\n", "Käfer\r\n").encode(), options) == ANSWER
    assert sorted(request.text for request in service.requests) == ["ein Hund", "zwei Käfer", "犬"]
    assert translated(sync_client, [f"Hündin {n}" for n in range(70)], options) == "".join(f"HÜNDIN {n}\n" for n in range(70))
    assert translated(sync_client, ["a\nb\r", "c"], options) == "A B \nC\n"


@pytest.mark.parametrize("options", [PLAIN, STREAMED])
def test_a_refused_text_or_option_is_named_after_the_answers_before_it(sync_client, service, options: TranslateOptions) -> None:
    for message, told in (("text: too long", "%s: text: too long"), ("num_beams: 9 is too many", "--num-beams: 9 is too many")):
        service.behaviours["bad"] = failing("INVALID_ARGUMENT", message)
        assert translated(sync_client, ["a", "bad", "c"], options) == "A\n" + told.replace("%s", "text 2")
        assert translated(sync_client, b"a\n\nbad\n", options) == "A\n\n" + told.replace("%s", "standard input, line 3")
    assert translated(sync_client, ["a\udcff"], options).startswith("text 1: text: not Unicode")
    assert translated(sync_client, b"a\nb\n\xff\nc\n", options).startswith("A\nB\nstandard input, line 3: not UTF-8: ")


def test_streamed_pieces_are_written_as_they_come(sync_client, service) -> None:
    service.script.append(held := Held("middle"))
    reading, writing = os.pipe()
    with ThreadPoolExecutor() as threads, open(reading, encoding="utf-8") as screen:
        with open(writing, "w", encoding="utf-8") as out:
            call = threads.submit(translate_texts, sync_client, ["abcd", "ef"], out, STREAMED)
            held.wait_until_began()
            assert screen.read(2) == "AB"
            held.release()
            call.result(PATIENCE_SECONDS)
        assert screen.read() == "CD\nEF\n"
    for place, text in (("middle", "AB\n"), ("start", "")):
        out = StringIO()
        service.script.append(failing("INTERNAL", "engine died", place=place))
        with pytest.raises(InternalError):
            translate_texts(sync_client, ["abcd"], out, STREAMED)
        assert out.getvalue() == text


@pytest.mark.parametrize("options", [PLAIN, STREAMED, TranslateOptions(concurrency=1)])
def test_each_line_is_answered_before_the_next_is_there(sync_client, options: TranslateOptions) -> None:
    (question, asking), (answering, answer) = os.pipe(), os.pipe()
    with ThreadPoolExecutor() as threads, open(answering, encoding="utf-8") as screen, open(asking, "wb", buffering=0) as keys:
        with open(question, "rb") as source, open(answer, "w", encoding="utf-8") as out:
            call = threads.submit(translate_lines, sync_client, source, out, options)
            for line in ("eins", "", "zwei", "drei\nvier", "fünf"):
                keys.write(f"{line}\n".encode())
                for part in line.split("\n"):
                    assert screen.readline() == f"{part.upper()}\n"
            keys.close()
            call.result(PATIENCE_SECONDS)
        assert screen.read() == ""


def test_lines_that_are_there_are_under_way_together(sync_client, service) -> None:
    service.behaviours = {text: Held() for text in "abcd"}
    with ThreadPoolExecutor() as threads:
        call = threads.submit(translated, sync_client, b"a\nb\nc\nd\n", TranslateOptions(concurrency=4))
        for held in service.behaviours.values():
            held.wait_until_began()
        for text in "dcba":
            service.behaviours[text].release()
        assert call.result(PATIENCE_SECONDS) == "A\nB\nC\nD\n"


def test_an_output_that_is_gone_cancels_the_calls_under_way(sync_client, service) -> None:
    class Broken(StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    stuck = Held()
    service.behaviours = {"a": lambda context: stuck.wait_until_began(), "b": stuck}
    with pytest.raises(BrokenPipeError):
        translate_texts(sync_client, ["a", "b"], Broken(), PLAIN)
    stuck.assert_cancelled()


def test_options_reach_the_server_from_texts_streams_and_files(sync_client, service, source: Path, tmp_path: Path) -> None:
    values = {"model": "en-fr", "model_version": "4", "source_language": "en", "target_language": "fr", "max_new_tokens": 9}
    options = TranslateOptions(**values, truncate=True, search=Search(num_beams=3, forced_prefix="Ein"))
    translated(sync_client, ["a"], options)
    translated(sync_client, ["a"], dataclasses.replace(options, is_streamed=True))
    translate_file(sync_client, source, tmp_path / "out.txt", options)
    assert len(service.requests) == 5
    for request in service.requests:
        assert {name: getattr(request, name) for name in values} == values
        assert (request.truncate, request.num_beams, request.forced_prefix) == (True, 3, "Ein")


def test_several_answers_and_scores_have_a_line_each(sync_client, service, source: Path, tmp_path: Path) -> None:
    one = generation_pb2.GenerateResponse(finish_reason=EOS, answers=[generation_pb2.Answer(text="only", finish_reason=EOS)])
    service.behaviours["few"] = lambda context: one
    two = TranslateOptions(search=Search(num_beams=2, num_return_sequences=2))
    assert translated(sync_client, ["a\nb", "", "few"], two) == "A B\nA B!\n\n\nonly\n\n"
    assert translated(sync_client, ["b", ""], TranslateOptions(has_scores=True)) == "-0.500000\tB\n\n"
    assert translated(sync_client, ["b"], dataclasses.replace(two, has_scores=True)) == "-0.500000\tB\n-1.500000\tB!\n"
    assert translate_file(sync_client, source, tmp_path / "out.txt", two) == 5
    assert (tmp_path / "out.txt").read_text() == "EIN HUND\nEIN HUND!\n\n\n\n\nZWEI KÄFER\nZWEI KÄFER!\n犬\n犬!\n"


def test_json_has_the_whole_answer_in_a_line(sync_client, service, source: Path, tmp_path: Path) -> None:
    search = Search(return_log_probs=True, top_log_probs=1)
    out = translated(sync_client, ["ä\n", " "], TranslateOptions(search=search, is_json=True))
    answer, blank = map(json.loads, out.splitlines())
    assert "Ä" in out
    result = sync_client.generate("ä\n", search=search, request_id=service.requests[0].request_id)
    assert answer == json.loads(json.dumps(dataclasses.asdict(result), default=lambda piece: "\ufffd"))
    assert answer["answers"][0]["log_probs"][0]["top"][0]["piece"] == "\ufffd"
    assert blank == dict.fromkeys(answer) | {"text": "", "tokens": []}
    translate_file(sync_client, source, tmp_path / "out.jsonl", TranslateOptions(is_json=True))
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["EIN HUND", "", "", "ZWEI KÄFER", "犬"]


def test_a_file_is_translated_in_order(sync_client, service, source: Path, tmp_path: Path) -> None:
    terminal, file, path = Terminal(), StringIO(), tmp_path / "long.txt"
    source = source.rename(tmp_path / "[b]in.txt")
    for progress in (terminal, file, None):
        assert translate_file(sync_client, source, tmp_path / "out.txt", TranslateOptions(concurrency=2), progress) == 5
        assert (tmp_path / "out.txt").read_text(encoding="utf-8") == ANSWER
    assert "[b]in.txt" in terminal.getvalue() and "5/5" in terminal.getvalue() and "lines/s" in terminal.getvalue()
    assert file.getvalue() == ""
    assert len(service.requests) == 9
    for num_lines in (0, 300):
        path.write_bytes(b"".join(b"line %d\r\n\n" % n for n in range(num_lines)))
        assert translate_file(sync_client, path, tmp_path / "out.txt", PLAIN) == 2 * num_lines
        assert (tmp_path / "out.txt").read_bytes() == path.read_bytes().upper()  # ends of lines are kept, too


def test_a_file_is_not_overwritten_by_its_translation(sync_client, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    for out in (source, tmp_path / "link", tmp_path / "hard", tmp_path / ".." / tmp_path.name / "in.txt"):
        with pytest.raises(InputError, match=f"^--out: {out} is the file that is translated"):
            translate_file(sync_client, source, out, PLAIN)
    assert source.read_text(encoding="utf-8") == TEXT and len(os.listdir(tmp_path)) == 3


def test_what_a_file_was_made_with_is_known_by_flags() -> None:
    """A file is resumed with the same of them only."""
    plain = TranslateOptions(concurrency=1).by_flag()
    values = {"model": "en-fr", "model_version": "4", "source_language": "en", "target_language": "de", "max_new_tokens": 5}
    search = Search(do_sample=True, early_stopping=False, top_k=0)
    changed = TranslateOptions(**values, truncate=True, is_json=True, search=search).by_flag()
    assert {name: value for name, value in changed.items() if value != plain.get(name)} == {
        **{"--model": "en-fr", "--model-version": "4", "--max-new-tokens": 5, "--truncate": True, "--json": True},
        **{"--from": "en", "--to": "de", "--sample": True, "--early-stopping": False, "--no-early-stopping": True, "--top-k": 0},
    }
    assert TranslateOptions(has_scores=True).by_flag() == plain | {"--scores": True}


def test_only_a_line_feed_ends_a_line_of_a_file_or_a_stream(tmp_path: Path) -> None:
    for content, lines in (
        (b"", []),
        (b"a", ["a"]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        ("a\u2028b\x0bc\x85d\re\nf".encode(), ["a\u2028b\x0bc\x85d\re", "f"]),
        (f"a\n{'ä' * 300_000}\nb".encode(), ["a", "ä" * 300_000, "b"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),  # a byte order mark is no text
    ):
        (tmp_path / "in.txt").write_bytes(content)
        file = LineFile(tmp_path / "in.txt")
        assert (list(file), list(file), len(file)) == (lines, lines, len(lines))
        assert list(stream_lines(BytesIO(content), "stdin")) == lines
        with (tmp_path / "in.txt").open("rb") as stream:
            assert list(stream_lines(stream, "stdin")) == lines


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "a").write_text("".join(f"Hund {n}\n" for n in range(70)))
    (tmp_path / "b").write_text("".join("x" * (n % 7) + "\n" for n in range(70)))
    return tmp_path / "a", tmp_path / "b"


def scored(client, pair: tuple[Path, Path], **options: Any) -> str:
    out, refusal = StringIO(), ""
    try:
        score_pairs(client, Pairs(*pair), out, ScoreOptions(**options))
    except InputError as error:
        refusal = str(error)
    return out.getvalue() + refusal


def test_each_pair_has_its_score_in_a_line(sync_client, service, pair) -> None:
    lines = [f"-1.500000\t{-1.5 * (n % 7 + 1):.6f}\n" for n in range(70)]
    assert scored(sync_client, pair, concurrency=4) == "".join(lines)
    service.requests.clear()
    values = {"model": "en-fr", "model_version": "4", "source_language": "en", "target_language": "fr", "length_penalty": 0.5}
    out = scored(sync_client, pair, **values, return_word_alignment=True, alignment_layer=2)
    assert out.splitlines()[0] == "-1.500000\t-1.500000\t0-0 1-1"
    for request in service.requests:
        assert {name: getattr(request, name) for name in values} == values
        assert (request.return_word_alignment, request.return_alignment, request.alignment_layer) == (True, False, 2)
    assert list(token_log_probs(sync_client, ["a", ""], ["bc", ""], "files", ScoreOptions())) == [[-1.5] * 3, [-1.5]]
    service.script.extend([failing("UNAVAILABLE", "gone")] * 1000)
    with pytest.raises(Unavailable, match="gone"):
        scored(sync_client, pair)


def test_blank_pairs_are_blank_lines_and_json_has_every_field(sync_client, service, pair) -> None:
    pair[0].write_text("Hünd\n\n \t\nKatze\n")
    pair[1].write_text("dög\n\n  \n\n")
    assert (
        scored(sync_client, pair, return_word_alignment=True)
        == "-1.500000\t-6.000000\t0-0 1-1\n\n\n-1.500000\t-1.500000\t0-0 1-1\n"
    )
    assert sorted(request.text for request in service.requests) == ["Hünd", "Katze"]
    service.requests.clear()
    out = scored(sync_client, pair, is_json=True)
    first, blank, *_ = map(json.loads, out.splitlines())
    [request] = [request for request in service.requests if request.text == "Hünd"]
    score = sync_client.score("Hünd", "dög", request_id=request.request_id)
    assert "ö" in out and first == json.loads(json.dumps(dataclasses.asdict(score), default=bytes.decode))
    assert blank == dict.fromkeys(first) | {"tokens": []}


def test_a_pair_that_is_refused_is_named(sync_client, service, pair) -> None:
    service.behaviours["Hund 2"] = failing("INVALID_ARGUMENT", "target: 600 tokens")
    assert scored(sync_client, pair).splitlines()[2:] == [f"line 3 of {pair[0]} and {pair[1]}: target: 600 tokens"]
    service.behaviours["Hund 2"] = failing("INVALID_ARGUMENT", "alignment_layer: 9; return_word_alignment is set")
    assert scored(sync_client, pair).splitlines()[2:] == ["--alignment-layer: 9; --alignment is set"]
