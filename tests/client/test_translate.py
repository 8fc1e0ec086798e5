import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.errors import InternalError, Unavailable
from dragoman.client.search import Search
from dragoman.client.translate import TranslateOptions, translate_file, translate_lines, translate_texts
from dragoman.model.errors import InputError
from dragoman.v1 import generation_pb2

PATIENCE_SECONDS = 60
PLAIN = TranslateOptions()
STREAMED = TranslateOptions(is_streamed=True)


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Broken(StringIO):
    """A stream that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("ein Hund\n\n  \nzwei Käfer\n犬", encoding="utf-8")
    return path


def test_texts_are_answered_in_order(client) -> None:
    out = StringIO()
    translate_texts(client, [f"Hündin {n}" for n in range(70)], out, TranslateOptions(concurrency=4))
    assert out.getvalue() == "".join(f"HÜNDIN {n}\n" for n in range(70))


def test_options_reach_the_server(client, service) -> None:
    options = {"model": "en-fr", "max_new_tokens": 9, "truncate": True}
    translate_texts(client, ["a"], StringIO(), TranslateOptions(**options))
    translate_texts(client, ["a"], StringIO(), TranslateOptions(**options, is_streamed=True))
    assert [(request.model, request.max_new_tokens, request.truncate) for request in service.requests] == [("en-fr", 9, True)] * 2


@pytest.mark.parametrize("options", [PLAIN, STREAMED])
def test_refused_text_is_named(client, service, failing, options: TranslateOptions) -> None:
    service.behaviours["bad"] = failing("INVALID_ARGUMENT", "text: 300 tokens; the limit is 256")
    out = StringIO()
    with pytest.raises(InputError, match=r"^text 2: text: 300 tokens; the limit is 256$"):
        translate_texts(client, ["good", "bad", "good"], out, options)
    assert out.getvalue() == "GOOD\n"


@pytest.mark.parametrize("options", [PLAIN, STREAMED])
def test_text_that_is_not_unicode_is_named(client, options: TranslateOptions) -> None:
    with pytest.raises(InputError, match=r"^text 1: text: not Unicode"):
        translate_texts(client, ["a\udcff"], StringIO(), options)


def test_servers_failure_stays_what_it_is(client, service, failing) -> None:
    service.script.append(failing("INTERNAL", "incident 7"))
    with pytest.raises(InternalError, match="incident 7"):
        translate_texts(client, ["a"], StringIO(), PLAIN)


def test_pieces_are_written_as_they_come(client, service, held) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)
    reading, writing = os.pipe()
    with ThreadPoolExecutor() as threads, open(reading, encoding="utf-8") as screen:
        with open(writing, "w", encoding="utf-8") as out:
            call = threads.submit(translate_texts, client, ["abcd", "ef"], out, STREAMED)
            behaviour.wait_until_began()
            assert screen.read(2) == "AB"
            behaviour.let_go()
            call.result(PATIENCE_SECONDS)
        assert screen.read() == "CD\nEF\n"


def test_streamed_answer_that_breaks_off_ends_its_line(client, service, failing) -> None:
    service.script.append(failing("UNAVAILABLE", "engine died", place="middle"))
    out = StringIO()
    with pytest.raises(Unavailable):
        translate_texts(client, ["abcd"], out, STREAMED)
    assert out.getvalue() == "AB\n"


def test_streamed_answer_that_never_began_writes_nothing(client, service, failing) -> None:
    service.script.append(failing("INTERNAL"))
    out = StringIO()
    with pytest.raises(InternalError):
        translate_texts(client, ["abcd"], out, STREAMED)
    assert out.getvalue() == ""


@pytest.mark.parametrize("options", [PLAIN, STREAMED])
def test_line_breaks_of_an_answer_do_not_break_the_lines(client, options: TranslateOptions) -> None:
    out = StringIO()
    translate_texts(client, ["a\nb\r", "c"], out, options)
    assert out.getvalue() == "A B \nC\n"


def test_json_has_the_whole_answer_in_a_line(client, service) -> None:
    out = StringIO()
    translate_texts(client, ["ä\n", " "], out, TranslateOptions(is_json=True))
    answer, blank = (json.loads(line) for line in out.getvalue().splitlines())
    assert "Ä" in out.getvalue()
    assert answer == {
        "text": "Ä\n",
        "tokens": [228, 10],
        "finish_reason": "eos",
        "is_truncated": False,
        "model": "en-de",
        "model_version": "3",
        "request_id": service.requests[0].request_id,
        "usage": {"source_tokens": 3, "generated_tokens": 3},
        "timings": {
            "queue_seconds": 0.25,
            "prefill_seconds": 0.5,
            "decode_seconds": 0.75,
            "time_to_first_token_seconds": 1.0,
            "total_seconds": 1.5,
        },
        "answers": [{"text": "Ä\n", "tokens": [228, 10], "finish_reason": "eos", "score": -0.5, "log_probs": []}],
        "seed": None,
        "shortlist_tokens": 0,
    }
    assert blank.keys() == answer.keys()
    assert (blank["text"], blank["tokens"], blank["finish_reason"], blank["usage"]) == ("", [], None, None)


@pytest.mark.parametrize("options", [PLAIN, STREAMED])
def test_lines_are_answered_one_for_one(client, service, options: TranslateOptions) -> None:
    out = StringIO()
    translate_lines(client, BytesIO("ein Hund\n\n \t\nzwei Käfer\r\n犬".encode()), out, options)
    assert out.getvalue() == "EIN HUND\n\n\nZWEI KÄFER\n犬\n"
    assert sorted(request.text for request in service.requests) == ["ein Hund", "zwei Käfer", "犬"]


@pytest.mark.parametrize("options", [PLAIN, STREAMED, TranslateOptions(concurrency=1)])
def test_each_line_is_answered_before_the_next_is_there(client, options: TranslateOptions) -> None:
    question, asking = os.pipe()
    answering, answer = os.pipe()
    with ThreadPoolExecutor() as threads, open(answering, encoding="utf-8") as screen, open(asking, "wb", buffering=0) as keys:
        with open(question, "rb") as source, open(answer, "w", encoding="utf-8") as out:
            call = threads.submit(translate_lines, client, source, out, options)
            for line in ("eins", "", "zwei", "drei\nvier", "fünf"):
                keys.write(f"{line}\n".encode())
                for part in line.split("\n"):
                    assert screen.readline() == f"{part.upper()}\n"
            keys.close()
            call.result(PATIENCE_SECONDS)
        assert screen.read() == ""


def test_lines_that_are_there_are_under_way_together(client, service, held) -> None:
    behaviours = {text: held() for text in "abcd"}
    service.behaviours = behaviours
    out = StringIO()
    with ThreadPoolExecutor() as threads:
        call = threads.submit(translate_lines, client, BytesIO(b"a\nb\nc\nd\n"), out, TranslateOptions(concurrency=4))
        for behaviour in behaviours.values():
            behaviour.wait_until_began()
        for text in "dcba":
            behaviours[text].let_go()
        call.result(PATIENCE_SECONDS)
    assert out.getvalue() == "A\nB\nC\nD\n"


@pytest.mark.parametrize("options", [PLAIN, STREAMED])
def test_lines_before_a_bad_one_are_answered(client, options: TranslateOptions) -> None:
    out = StringIO()
    with pytest.raises(InputError, match=r"^standard input, line 3: not UTF-8"):
        translate_lines(client, BytesIO(b"a\nb\n\xff\nc\n"), out, options)
    assert out.getvalue() == "A\nB\n"


@pytest.mark.parametrize("options", [PLAIN, STREAMED])
def test_refused_line_is_named(client, service, failing, options: TranslateOptions) -> None:
    service.behaviours["bad"] = failing("INVALID_ARGUMENT", "text: too long")
    with pytest.raises(InputError, match=r"^standard input, line 3: text: too long$"):
        translate_lines(client, BytesIO(b"a\n\nbad\n"), StringIO(), options)


def test_output_that_is_gone_cancels_what_runs(client, service, held) -> None:
    stuck = held()
    service.behaviours = {"a": lambda context: stuck.wait_until_began(), "b": stuck}
    with pytest.raises(BrokenPipeError):
        translate_texts(client, ["a", "b"], Broken(), PLAIN)
    stuck.assert_cancelled()


def test_file_is_translated_in_order_and_blank_lines_stay(client, service, source: Path, tmp_path: Path) -> None:
    num_lines = translate_file(client, source, tmp_path / "out.txt", TranslateOptions(concurrency=2))
    assert num_lines == 5
    assert (tmp_path / "out.txt").read_bytes() == "EIN HUND\n\n\nZWEI KÄFER\n犬\n".encode()
    assert len(service.requests) == 3


def test_long_file_keeps_its_order(client, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"line {n}\n" for n in range(300)))
    assert translate_file(client, path, path, TranslateOptions(concurrency=16)) == 300
    assert path.read_text() == "".join(f"LINE {n}\n" for n in range(300))


def test_empty_file_gives_an_empty_file(client, tmp_path: Path) -> None:
    (tmp_path / "in.txt").touch()
    assert translate_file(client, tmp_path / "in.txt", tmp_path / "out.txt", PLAIN) == 0
    assert (tmp_path / "out.txt").read_bytes() == b""


def test_file_can_be_answered_in_json(client, source: Path, tmp_path: Path) -> None:
    translate_file(client, source, tmp_path / "out.jsonl", TranslateOptions(is_json=True))
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["text"] for answer in answers] == ["EIN HUND", "", "", "ZWEI KÄFER", "犬"]


@pytest.mark.parametrize(("code", "kind"), [("INTERNAL", InternalError), ("INVALID_ARGUMENT", InputError)])
def test_failure_leaves_what_is_done_to_be_gone_on_with(
    client, service, failing, source: Path, tmp_path: Path, code: str, kind: type
) -> None:
    last_has_come, fail = threading.Event(), failing(code, "text: no")

    def fail_after_the_last(context: Any) -> None:
        assert last_has_come.wait(30), "both are under way"
        fail(context)

    service.behaviours = {"zwei Käfer": fail_after_the_last, "犬": lambda _: last_has_come.set()}
    out = tmp_path / "out.txt"
    with pytest.raises(kind) as caught:
        translate_file(client, source, out, PLAIN)
    assert str(caught.value) == (f"{source}, line 4: text: no" if kind is InputError else "text: no")
    assert caught.value.__notes__ == [f"3 of 5 lines are done, in {out}.partial; --resume goes on from there"]
    assert not out.exists()
    service.behaviours.clear()
    service.requests.clear()
    assert translate_file(client, source, out, PLAIN, is_resumed=True) == 5
    assert out.read_bytes() == "EIN HUND\n\n\nZWEI KÄFER\n犬\n".encode()
    assert sorted(request.text for request in service.requests) == ["zwei Käfer", "犬"]
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out.txt"]


def test_failure_of_the_first_line_leaves_nothing(client, service, failing, source: Path, tmp_path: Path) -> None:
    service.behaviours["ein Hund"] = failing("INTERNAL")
    with pytest.raises(InternalError):
        translate_file(client, source, tmp_path / "out.txt", PLAIN)
    assert os.listdir(tmp_path) == ["in.txt"]


def test_a_refused_line_of_a_resumed_run_has_its_own_number(client, service, failing, source: Path, tmp_path: Path) -> None:
    service.behaviours["zwei Käfer"] = failing("INTERNAL")
    with pytest.raises(InternalError):
        translate_file(client, source, tmp_path / "out.txt", PLAIN)
    service.behaviours = {"犬": failing("INVALID_ARGUMENT", "text: no")}
    with pytest.raises(InputError, match=r"in\.txt, line 5: text: no"):
        translate_file(client, source, tmp_path / "out.txt", PLAIN, is_resumed=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (TranslateOptions(model="en-fr"), "--model: en-fr, but"),
        (TranslateOptions(search=Search(do_sample=True)), "--sample: true, but"),
        (TranslateOptions(search=Search(early_stopping=False)), "--no-early-stopping: true, but"),
        (TranslateOptions(search=Search(top_k=0)), "--top-k: 0, but"),
        (TranslateOptions(model_version="4"), "--model-version: 4, but"),
        (TranslateOptions(source_language="en"), "--from: en, but"),
        (TranslateOptions(target_language="de"), "--to: de, but"),
        (TranslateOptions(is_json=True), "--json: true, but"),
    ],
    ids=str,
)
def test_resuming_with_other_options_is_refused_and_asks_nothing(
    client, service, failing, source: Path, tmp_path: Path, options: TranslateOptions, named: str
) -> None:
    service.behaviours["犬"] = failing("INTERNAL")  # the last line: nothing is under way after it
    with pytest.raises(InternalError):
        translate_file(client, source, tmp_path / "out.txt", TranslateOptions(concurrency=1))
    service.requests.clear()
    with pytest.raises(InputError, match=f"^{named}"):
        translate_file(client, source, tmp_path / "out.txt", options, is_resumed=True)
    assert service.requests == []
    service.behaviours.clear()
    translate_file(client, source, tmp_path / "out.txt", TranslateOptions(concurrency=9), is_resumed=True)


def test_resumed_progress_begins_where_the_run_broke_off(client, service, failing, source: Path, tmp_path: Path) -> None:
    service.behaviours["zwei Käfer"] = failing("INTERNAL")
    with pytest.raises(InternalError):
        translate_file(client, source, tmp_path / "out.txt", PLAIN)
    service.behaviours.clear()
    terminal = Terminal()
    translate_file(client, source, tmp_path / "out.txt", PLAIN, progress=terminal, is_resumed=True)
    assert "3/5" in terminal.getvalue() and "5/5" in terminal.getvalue()


@pytest.mark.parametrize("options", [PLAIN, STREAMED])
def test_a_refused_option_is_named_as_its_flag_without_a_line(client, service, failing, options: TranslateOptions) -> None:
    service.behaviours["a"] = failing("INVALID_ARGUMENT", "do_sample: does not go with num_beams above 1, which is 4")
    with pytest.raises(InputError, match=r"^--sample: does not go with --num-beams above 1, which is 4$"):
        translate_texts(client, ["a"], StringIO(), options)


def test_file_that_is_not_utf8_asks_nothing(client, service, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"good\n\xff\n")
    with pytest.raises(InputError, match=r"in\.txt, line 2: not UTF-8"):
        translate_file(client, tmp_path / "in.txt", tmp_path / "out.txt", PLAIN)
    assert service.requests == []


def test_output_that_cannot_be_written_asks_nothing(client, service, source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none"):
        translate_file(client, source, tmp_path / "none" / "out.txt", PLAIN)
    assert service.requests == []


def test_progress_is_for_terminals(client, source: Path, tmp_path: Path) -> None:
    file, terminal = StringIO(), Terminal()
    translate_file(client, source, tmp_path / "out.txt", PLAIN, progress=file)
    translate_file(client, source, tmp_path / "out.txt", PLAIN, progress=terminal)
    assert file.getvalue() == ""
    assert "5/5" in terminal.getvalue()


def test_search_reaches_the_server(client, service) -> None:
    search = Search(num_beams=3, forced_prefix="Ein")
    translate_texts(client, ["a"], StringIO(), TranslateOptions(search=search))
    translate_texts(client, ["a"], StringIO(), TranslateOptions(search=search, is_streamed=True))
    assert [(request.num_beams, request.forced_prefix) for request in service.requests] == [(3, "Ein")] * 2


def test_each_of_several_answers_has_a_line(client) -> None:
    out = StringIO()
    search = Search(num_beams=2, num_return_sequences=2)
    translate_texts(client, ["a\nb", "", "c"], out, TranslateOptions(search=search))
    assert out.getvalue() == "A B\nA B!\n\n\nC\nC!\n"


def test_each_text_has_as_many_lines_even_with_fewer_answers(client, service) -> None:
    reason = generation_pb2.FINISH_REASON_EOS
    one = generation_pb2.GenerateResponse(finish_reason=reason, answers=[generation_pb2.Answer(text="only", finish_reason=reason)])
    service.behaviours["few"] = lambda context: one
    out = StringIO()
    translate_texts(client, ["few", "b"], out, TranslateOptions(search=Search(num_beams=3, num_return_sequences=3)))
    assert out.getvalue() == "only\n\n\nB\nB!\nB!!\n"


def test_scores_stand_before_the_answers(client) -> None:
    out = StringIO()
    translate_texts(client, ["a", ""], out, TranslateOptions(has_scores=True))
    search = Search(num_beams=2, num_return_sequences=2)
    translate_texts(client, ["b"], out, TranslateOptions(search=search, has_scores=True))
    assert out.getvalue() == "-0.500000\tA\n\n-0.500000\tB\n-1.500000\tB!\n"


def test_log_probabilities_are_told_in_json(client) -> None:
    out = StringIO()
    search = Search(return_log_probs=True, top_log_probs=1)
    translate_texts(client, ["a"], out, TranslateOptions(search=search, is_json=True))
    [told] = json.loads(out.getvalue())["answers"][0]["log_probs"]
    likeliest = {"token": 7, "piece": "\ufffd", "log_prob": -0.5, "top": []}
    assert told == {"token": 5, "piece": "\ufffd", "log_prob": -0.25, "top": [likeliest]}


def test_several_answers_of_a_file_stay_together(client, source: Path, tmp_path: Path) -> None:
    search = Search(num_beams=2, num_return_sequences=2)
    assert translate_file(client, source, tmp_path / "out.txt", TranslateOptions(search=search)) == 5
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert lines == ["EIN HUND", "EIN HUND!", "", "", "", "", "ZWEI KÄFER", "ZWEI KÄFER!", "犬", "犬!", ""]


@pytest.mark.parametrize(
    "options",
    [
        {"is_streamed": True, "has_scores": True},
        {"is_streamed": True, "search": Search(num_return_sequences=2)},
        {"search": Search(return_log_probs=True)},
        {"search": Search(top_log_probs=3)},
        {"is_json": True, "has_scores": True},
    ],
    ids=str,
)
def test_search_that_cannot_be_printed_so_is_refused(options: dict) -> None:
    with pytest.raises(InputError, match=r"--stream|--json"):
        TranslateOptions(**options)


def test_options_that_exclude_each_other_are_refused(client, source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--stream .* --json"):
        TranslateOptions(is_streamed=True, is_json=True)
    with pytest.raises(InputError, match=r"--stream .*not for files"):
        translate_file(client, source, tmp_path / "out.txt", STREAMED)
    with pytest.raises(InputError, match=r"^--concurrency: 0"):
        TranslateOptions(concurrency=0)
