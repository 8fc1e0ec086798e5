"""OpenAI's files and batches with its own client: results, broken files, owners, room, and whatever interrupts a batch."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai import OpenAI

from dragoman.client.sync import Client
from tests.system.conftest import TWO_OF_EACH
from tests.system.harness.server import Event, Server, kill, serving, start_in_vain, wait_until

pytestmark = pytest.mark.e2e

CALLERS = (
    '[callers.web]\ntoken = "a-key"\n[callers.other]\ntoken = "b-key"\n'
    '[callers.slow]\ntoken = "c-key"\nmax_requests = 1\nrequests_per_second = 20\nrequests_burst = 4\n'
)
ENDED = ("completed", "failed", "expired", "cancelled")
ENDPOINT = "/v1/completions"
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    ENDPOINT: lambda text: {"model": "alpha", "prompt": text, "max_tokens": 4},
    "/v1/chat/completions": lambda text: {"model": "alpha", "messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/v1/generate": lambda text: {"model": "alpha", "text": text, "maxNewTokens": 4, "priority": 10},
}
LONG_BODY = {"model": "alpha", "prompt": "a", "max_tokens": 60}


@pytest.fixture(scope="module")
def server(translators: Path, tmp_path_factory: pytest.TempPathFactory, topology: tuple[str, ...]) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("batches") / "of" / "callers"
    with serving(translators, "--batch-folder", str(folder), *topology, callers=CALLERS) as started:
        yield started
        assert started.terminate() == 0 and not started.problems()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def client_of(server: Server, key: str = "a-key") -> OpenAI:
    return OpenAI(base_url=f"{server.http_address}/v1", api_key=key, max_retries=0)


def line(custom_id: str, body: Any, url: str = ENDPOINT, **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


def begin(client: OpenAI, lines: Sequence[str] | bytes, endpoint: Any = ENDPOINT, **more: Any) -> str:
    content = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more).id


def end_of(client: OpenAI, batch: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch).status in ENDED, f"the end of {batch}", 120, 0.1)
    return client.batches.retrieve(batch)


def lines_of(client: OpenAI, file: str | None) -> list[Any]:
    return [] if file is None else [json.loads(text) for text in client.files.content(file).text.splitlines()]


def is_begun(client: OpenAI, batch: str) -> Callable[[], bool]:
    return lambda: client.batches.retrieve(batch).request_counts.completed > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("endpoint", BODIES)
def test_its_client_gets_the_answers_of_the_endpoint_in_the_order_of_the_lines(
    client: OpenAI, server: Server, endpoint: str
) -> None:
    texts = [f"line {number}" for number in range(20)]
    bodies = [BODIES[endpoint](text) for text in (*texts, " ")] + [BODIES[endpoint]("a") | {"model": "nobody"}]
    if endpoint == ENDPOINT:
        bodies.append(BODIES[endpoint]("") | {"prompt": ["one", "two"]})
    found = end_of(client, begin(client, [line(f"id-{i}", body, endpoint) for i, body in enumerate(bodies)], endpoint))
    assert found.status == "completed" and found.errors is None and found.in_progress_at <= found.completed_at
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(bodies), len(bodies) - 2, 2)
    output, errors = lines_of(client, found.output_file_id), lines_of(client, found.error_file_id)
    failed = ["id-20", "id-21"]
    assert [each["custom_id"] for each in errors] == failed and all(each["error"] is None for each in errors)
    assert [each["response"]["status_code"] for each in errors] == [400, 404]
    assert [each["custom_id"] for each in output] == [f"id-{i}" for i in range(len(bodies)) if f"id-{i}" not in failed]
    assert len({each["id"] for each in output}) == len({each["response"]["request_id"] for each in output}) == len(output)
    headers = {"Authorization": "Bearer a-key"}
    for each in output[::6]:
        body = bodies[int(each["custom_id"][3:])]
        direct = requests.post(server.http_address + endpoint, json=body, headers=headers, timeout=60).json()
        assert told(each["response"]["body"]) == told(direct)
    assert found.usage.output_tokens >= 4 * 20 and found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens


def told(body: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs from call to call."""
    return {name: value for name, value in body.items() if name not in ("id", "created", "requestId", "timings")}


def test_its_client_keeps_finds_and_deletes_files_and_lists_batches(client: OpenAI) -> None:
    content = b"".join(b"%d\n" % number for number in range(400_000))  # of several writes
    kept = client.files.create(file=("ä.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (kept.bytes, kept.filename, kept.purpose) == (len(content), "ä.jsonl", "batch")
    assert kept.expires_at == kept.created_at + 3600 and client.files.retrieve(kept.id) == kept
    assert client.files.content(kept.id).read() == content
    assert client.files.list(purpose="batch", limit=1).data == [kept] and kept in list(client.files.list(limit=2))
    assert client.files.delete(kept.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(kept.id)
    ids = [begin(client, [line("a", LONG_BODY)], metadata={"number": str(number)}) for number in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == ids[::-1]
    assert client.batches.retrieve(ids[1]).metadata == {"number": "1"}
    for batch in ids:
        end_of(client, batch)
        with pytest.raises(openai.BadRequestError, match="batch: is completed"):
            client.batches.cancel(batch)


GOOD = line("good", BODIES[ENDPOINT]("a"))
BROKEN = {
    "no JSON": (b"{'a': 1}", "invalid_json_line"),
    "no object": (b"[1]", "invalid_json_line"),
    "no UTF-8": (GOOD.replace("good", "other").encode() + b"\xff", "invalid_json_line"),
    "a key twice": (GOOD.replace('"custom_id"', '"custom_id": "x", "custom_id"').encode(), "invalid_json_line"),
    "no id": (GOOD.replace("custom_id", "custom").encode(), "missing_required_parameter"),
    "another line's id": (GOOD.encode(), "duplicate_custom_id"),
    "another method": (line("b", {}, method="GET").encode(), "invalid_method"),
    "another endpoint": (line("b", {}, url="/v1/generate").encode(), "invalid_url"),
    "no body": (line("b", "text").encode(), "invalid_request"),
    "a body without a prompt": (line("b", {"model": "alpha"}).encode(), "invalid_request"),
    "a body of a stream": (line("b", BODIES[ENDPOINT]("a") | {"stream": True}).encode(), "invalid_request"),
    "a field nobody knows": (line("b", BODIES[ENDPOINT]("a") | {"unheard": 1}).encode(), "invalid_request"),
    "another member": (line("b", BODIES[ENDPOINT]("a"), priority=3).encode(), "unknown_parameter"),
    "too many bytes": (line("b", BODIES[ENDPOINT]("a" * (5 * 2**20))).encode(), "line_too_long"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_fail_and_their_lines_are_named(client: OpenAI, what: str) -> None:
    text, code = BROKEN[what]
    found = end_of(client, begin(client, b"%s\n\r\n%s\n%s" % (GOOD.encode(), text, GOOD.replace("good", "last").encode())))
    assert found.status == "failed" and found.failed_at and found.output_file_id is None
    [error] = found.errors.data
    assert (error.line, error.code) == (3, code) and error.message and "Traceback" not in error.message


def test_files_without_lines_or_with_too_many_fail(client: OpenAI) -> None:
    for content, code in ((b"", "empty_file"), (b"\n \n", "empty_file"), (b"{}\n" * 300, "missing_required_parameter")):
        found = end_of(client, begin(client, content))
        assert found.status == "failed" and {error.code for error in found.errors.data} == {code}
        assert len(found.errors.data) <= 100
    many = "\n".join(line(str(number), {"prompt": "a"}) for number in range(50_001)).encode()
    for content in (many, b"\n" * 200_000 + GOOD.encode()):
        assert end_of(client, begin(client, content)).errors.data[0].code == "too_many_lines"


def test_nobody_finds_what_is_another_callers(client: OpenAI, server: Server) -> None:
    file = client.files.create(file=("a", b"secret"), purpose="batch").id
    batch = begin(client, [line("a", LONG_BODY)])
    with client_of(server, "b-key") as other:
        assert not list(other.files.list()) and not list(other.batches.list())
        for call in (other.files.retrieve, other.files.content, other.files.delete, other.batches.retrieve, other.batches.cancel):
            for name in (file, batch, file[:-1] + "?", f"..%2f{file}", "file-", "lock", file.upper()):
                with pytest.raises(openai.NotFoundError) as caught:
                    call(name)
                assert "secret" not in caught.value.response.text
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "nobody").files.list()
    assert end_of(client, batch).status == "completed"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_batches_that_are_not_offered_are_refused_by_name(server: Server, fields: dict[str, Any], message: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": ENDPOINT, "completion_window": "24h"} | fields
    headers = {"Authorization": "Bearer a-key"}
    found = requests.post(f"{server.http_address}/v1/batches", json=body, headers=headers, timeout=60)
    assert found.status_code == 400 and message in found.json()["error"]["message"]


FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n'
PURPOSE = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (FILE + b"--x--\r\n", 400, "purpose: "),
        (FILE + PURPOSE.replace(b"batch", b"vision") + b"--x--\r\n", 400, "purpose: "),
        (PURPOSE + b"--x--\r\n", 400, "file: is missing"),
        (FILE + FILE + PURPOSE + b"--x--\r\n", 400, "file: is given twice"),
        (b"\n" * 10**6 + FILE + PURPOSE + b"--x--\r\n", 400, "body: "),
        (FILE, 400, "body: "),
        (FILE + PURPOSE.replace(b"batch", b"b" * 10**5) + b"--x--\r\n", 400, "purpose: has more than"),
        (FILE + PURPOSE.replace(b"purpose", b"expires_after[seconds]") + PURPOSE + b"--x--\r\n", 400, "expires_after: "),
        (b"", 400, "body: "),
    ],
)
def test_malformed_uploads_are_refused_and_leave_nothing(
    server: Server, client: OpenAI, body: bytes, status: int, message: str
) -> None:
    headers = {"Authorization": "Bearer a-key", "Content-Type": "multipart/form-data; boundary=x"}
    before = len(list(client.files.list()))
    found = requests.post(f"{server.http_address}/v1/files", body, headers=headers, timeout=60)
    assert (found.status_code, found.json()["error"]["message"].startswith(message)) == (status, True), found.text
    assert len(list(client.files.list())) == before


def test_uploads_that_are_too_large_are_refused_unread(server: Server) -> None:
    with closing(HTTPConnection(server.http_address.removeprefix("http://"), timeout=60)) as connection:
        connection.putrequest("POST", "/v1/files")
        headers = {"Authorization": "Bearer a-key", "Content-Type": "multipart/form-data; boundary=x", "Content-Length": str(10**9)}
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == 413


def test_limits_of_a_caller_hold_for_lines_and_its_other_requests_come_through(server: Server) -> None:
    with client_of(server, "c-key") as limited:
        batch = begin(limited, [line(str(number), LONG_BODY) for number in range(60)])
        began, answered = time.monotonic(), 0
        while limited.batches.retrieve(batch).status not in ENDED:
            try:
                limited.completions.create(model="alpha", prompt="a", max_tokens=1)
                answered += 1
            except openai.RateLimitError:
                pass
            time.sleep(0.3)
        found = limited.batches.retrieve(batch)
    assert (found.status, found.request_counts.completed) == ("completed", 60)  # type: ignore[union-attr]
    assert answered > 0 and time.monotonic() - began > (60 - 4) / 20, "no faster than its rate"
    assert server.metric("dragoman_caller_tokens_total", caller="slow", kind="generated") == 60 * 60 + answered
    assert not [event for event in server.logged(Event.CALL) if event["method"] == "/v1/completions" and "#" in event["request_id"]]
    assert [event["generated_tokens"] for event in server.logged("batch") if event["request_id"] == batch] == [60 * 60]


def test_a_cancelled_batch_keeps_what_is_finished_and_a_deleted_input_does_not_end_it(client: OpenAI) -> None:
    lines = [line(str(number), LONG_BODY | {"prompt": f"{number}"}) for number in range(3000)]
    batch = begin(client, lines)
    client.files.delete(client.batches.retrieve(batch).input_file_id)
    wait_until(is_begun(client, batch), "the first answers")
    assert client.batches.cancel(batch).status == "cancelling"
    found = end_of(client, batch)
    assert found.status == "cancelled" and found.cancelling_at and found.cancelled_at
    output = lines_of(client, found.output_file_id)
    assert 0 < len(output) == found.request_counts.completed < 3000
    numbers = [int(each["custom_id"]) for each in output]
    assert numbers == sorted(set(numbers))


# One server after the other


@contextmanager
def of_quick(models: Path, folder: Path, *flags: str) -> Iterator[tuple[Server, OpenAI]]:
    with serving(models, "--batch-folder", str(folder), *flags) as server, client_of(server) as client:
        yield server, client


def log_of(folder: Path) -> Path:
    return next(folder.glob("*/batch_*.log"), Path(os.devnull))


def records(folder: Path) -> list[bytes]:
    """Return the answers in the log of the only batch."""
    head, found, at = struct.Struct("<IBIIII"), list[bytes](), 0
    content = log_of(folder).read_bytes()
    while len(content) >= at + head.size:
        length = head.unpack_from(content, at)[4]
        found.append(content[at + head.size : at + head.size + length])
        at += head.size + length
    return found


def wait_for_more(folder: Path, count: int) -> None:
    wait_until(lambda: len(records(folder)) > count + 20, "more answers")


def test_a_killed_server_goes_on_with_what_is_not_written(translators: Path, tmp_path: Path) -> None:
    """The last record of the log is torn off in the middle; all before are in the output as they were."""
    lines = [line(f"id-{number}", LONG_BODY | {"prompt": f"{number}"}) for number in range(300)]
    written: list[bytes] = []
    with of_quick(translators, tmp_path) as (server, client):
        batch = begin(client, lines)
        for _ in range(2):
            wait_for_more(tmp_path, len(written))
            kill(server.process.pid)
            server.wait()
            written = records(tmp_path)[:-1]
            log_of(tmp_path).write_bytes(log_of(tmp_path).read_bytes()[:-9])
            server.__init__(translators, "--batch-folder", str(tmp_path))  # type: ignore[misc]
            client = client_of(server)
        found = end_of(client, batch)
        output = client.files.content(found.output_file_id).content.splitlines()
        assert found.status == "completed" and found.request_counts.completed == 300
        assert [json.loads(each)["custom_id"] for each in output] == [f"id-{number}" for number in range(300)]
        assert len(written) > 40 and set(written) <= set(output), "none of them is computed again"
        wait_until(lambda: not [*tmp_path.glob("*/*.log"), *tmp_path.glob("*/*.part"), *tmp_path.glob("*/*.input")], "nothing left")


@pytest.mark.parametrize("flags", [TWO_OF_EACH])
def test_another_frontend_takes_over_from_one_that_dies(translators: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    with of_quick(translators, tmp_path, *flags) as (server, client):
        batch = begin(client, [line(str(number), LONG_BODY | {"prompt": f"{number}"}) for number in range(600)])
        for number in (0, 1):
            wait_for_more(tmp_path, len(records(tmp_path)))  # before the other is ready again, which takes longer than many lines
            kill(server.frontends()[number])
        for number in (0, 1):
            server.wait_for(Event.FRONTEND_READY, front_end=number)
        with client_of(server) as client:
            found = end_of(client, batch)
            output = lines_of(client, found.output_file_id)
        assert [each["custom_id"] for each in output] == list(map(str, range(600)))
        assert len({each["id"] for each in output}) == 600


def test_a_batch_whose_window_ends_has_the_other_lines_in_its_errors(translators: Path, tmp_path: Path) -> None:
    with of_quick(translators, tmp_path) as (server, client):
        batch = begin(client, [line(str(number), LONG_BODY) for number in range(2000)])
        wait_until(is_begun(client, batch), "the first answers")
        assert server.terminate() == 0
    [path] = tmp_path.glob("*/batch_*.json")
    content = json.loads(path.read_bytes())
    assert content["status"] == "in_progress", "a drain does not end it"
    path.write_text(json.dumps(content | {"expires_at": int(time.time())}))
    with of_quick(translators, tmp_path) as (server, client):
        found = end_of(client, batch)
        assert found.status == "expired" and found.expired_at
        output, errors = lines_of(client, found.output_file_id), lines_of(client, found.error_file_id)
        assert len(output) == found.request_counts.completed > 0
        assert sorted(int(each["custom_id"]) for each in (*output, *errors)) == list(range(2000))
        assert all(each["response"] is None and each["error"]["code"] == "batch_expired" for each in errors)


def test_batches_wait_for_room_and_for_their_folder(translators: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with of_quick(translators, folder, "--batch-folder-gib", str(1 / 1024)) as (server, client):
        with pytest.raises(openai.BadRequestError, match="there is no room for it"):
            client.files.create(file=("a", b"x" * 2**20), purpose="batch")
        assert not list(client.files.list()) and not list(folder.glob("*/*"))
        lines = [line(str(number), LONG_BODY) for number in range(60)]
        file = client.files.create(file=("a", "\n".join(lines).encode()), purpose="batch")
        filler = client.files.create(file=("a", b"x" * (2**20 - file.bytes - 3 * 4096)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h").id
        wait_until(lambda: client.batches.retrieve(batch).errors is not None, "it waits", 120)
        found: Any = client.batches.retrieve(batch)
        assert (found.status, found.errors.data[0].code) == ("in_progress", "no_room") and found.request_counts.completed < 60
        client.files.delete(filler.id)
        found = end_of(client, batch)
        assert found.status == "completed" and found.errors is None and found.request_counts.completed == 60
        shutil.rmtree(folder)
        for call in (client.files.list, lambda: client.batches.retrieve(batch), lambda: begin(client, lines)):
            with pytest.raises(openai.InternalServerError, match="folder of files cannot be used"):
                call()
        with Client(server.address) as direct:
            assert direct.generate("a", model="alpha", max_new_tokens=1).text is not None
        folder.mkdir()
        assert end_of(client, begin(client, lines[:3])).status == "completed"


def test_batches_whose_files_are_removed_make_room_for_others(translators: Path, tmp_path: Path) -> None:
    with of_quick(translators, tmp_path) as (server, client):
        batches = [begin(client, [line(str(number), LONG_BODY) for number in range(3000)]) for _ in range(4)]  # as many as may run
        for batch in batches:
            wait_until(is_begun(client, batch), "the first answers")
        [folder] = (path for path in tmp_path.iterdir() if path.is_dir())
        shutil.rmtree(folder)
        for batch in batches:
            with pytest.raises(openai.NotFoundError):
                client.batches.retrieve(batch)
        wait_until(lambda: len(server.logged("a batch ends, its files were removed")) == 4, "they end")
        assert end_of(client, begin(client, [GOOD])).status == "completed"


def test_a_line_that_a_server_with_other_settings_refuses_has_its_error(translators: Path, tmp_path: Path) -> None:
    lines = [line(str(number), LONG_BODY) for number in range(300)] + [line("long", BODIES[ENDPOINT]("a" * 70_000))]
    with of_quick(translators, tmp_path) as (server, client):
        batch = begin(client, lines)
        wait_until(is_begun(client, batch), "the first answers")
        assert server.terminate() == 0
    with of_quick(translators, tmp_path, "--max-message-bytes", str(2**16)) as (server, client):
        found = end_of(client, batch)
        assert found.status == "completed" and (found.request_counts.completed, found.request_counts.failed) == (300, 1)
        [error] = lines_of(client, found.error_file_id)
        assert error["custom_id"] is None and (error["error"]["code"], error["error"]["line"]) == ("line_too_long", 301)


def test_lines_give_way_to_other_requests(endless: Path, tmp_path: Path) -> None:
    with of_quick(endless, tmp_path) as (server, client):
        lines = [line(str(number), {"model": "alpha", "prompt": f"{number}", "max_tokens": 200}) for number in range(500)]
        batch = begin(client, lines)
        wait_until(lambda: server.metric("dragoman_num_requests_running", model="alpha") > 3, "many at once", 120)
        with Client(server.address) as direct, direct.stream("a", model="alpha") as stream:
            next(iter(stream))
            wait_until(lambda: server.metric("dragoman_num_requests_running", model="alpha") <= 2, "all but one end")
            assert any(True for _ in zip(stream, range(400), strict=False)), "it goes on"
            assert server.metric("dragoman_num_requests_running", model="alpha") <= 2
        client.batches.cancel(batch)
        assert end_of(client, batch).status == "cancelled"


def test_without_a_folder_files_and_batches_are_off(translators: Path, tmp_path: Path) -> None:
    with serving(translators) as server, client_of(server) as client:
        for call in (client.files.list, client.batches.list, lambda: client.files.create(file=b"", purpose="batch")):
            with pytest.raises(openai.NotFoundError, match="batch_folder"):
                call()
    (tmp_path / "file").touch()
    found = start_in_vain(translators, "--batch-folder", str(tmp_path / "file"))
    assert found.returncode == 2 and "batch_folder: " in found.stderr
    assert os.listdir(tmp_path) == ["file"]
