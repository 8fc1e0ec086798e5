"""Answers, scores and attention of the shipped models are those of eager PyTorch; evaluation, scoring and load by command line."""

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dragoman.attention.maps import PAGE_ROOM, Kind
from dragoman.attention.of_checkpoint import look_into
from dragoman.attention.of_server import ask
from dragoman.client.sync import Client
from tests.system.harness.oracle import Oracle, agree
from tests.system.harness.server import LONG, ROOT, Event, Server, dragoman, serving, wait_until

pytestmark = pytest.mark.e2e

CHECKPOINTS = ROOT / "model/pretrained"
TEXTS = [
    "A man in a red shirt is standing in front of a building.",
    "Two dogs are playing in the snow.",
    "A woman with a black hat rides a bicycle down the street.",
    "Several children are sitting on the grass, and one of them laughs.",
]
SOURCE, TARGET = "A little girl in a pink dress.", "Ein kleines Mädchen in einem rosa Kleid."


@pytest.fixture(scope="module")
def others(shipped_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    for name in ("en-de-rnn", "en-captions"):
        (models / name).symlink_to(shipped_bundle(name))
    with serving(models) as running:
        yield running


@pytest.fixture
def test_set(request: pytest.FixtureRequest) -> list[str]:
    """The English side of test_2016 in the long form; nothing in the short one."""
    if not LONG:
        return []
    with gzip.open(request.getfixturevalue("multi30k") / "test_2016_flickr.en.gz", "rt", encoding="utf-8") as lines:
        return lines.read().splitlines()


@pytest.mark.parametrize("model", ["en-de", "en-fr"])
def test_answers_are_pytorchs_at_any_concurrency(client: Client, captions: list[str], test_set: list[str], model: str) -> None:
    texts = test_set or captions[:: 2 if model == "en-de" else 4]
    together = [result.tokens for result in client.generate_many(texts, concurrency=64, model=model)]
    alone = [result.tokens for result in client.generate_many(texts[::4], concurrency=1, model=model)]
    assert together[::4] == alone and len(together) == len(texts)
    oracle, few = Oracle(CHECKPOINTS / model), texts[::15]
    oracle.check_greedy(texts, together)
    options: dict[str, Any] = {"model": model, "num_beams": 4, "num_return_sequences": 4, "return_log_probs": True}
    for text, hypotheses in zip(few, oracle.beams(few, 4, 64), strict=True):
        answers = client.generate(text, max_new_tokens=64, length_penalty=1.0, **options).answers
        for answer, expected in zip(answers, hypotheses, strict=True):
            agree(answer, expected)


@pytest.mark.parametrize("text", ["Ein 🐕 läuft durch den Schnee.", "  two  spaces ", "</s> <pad> <s>", "e\u0301té \u200d \x00 ﷽"])
def test_any_text_is_answered(client: Client, text: str) -> None:
    result = client.generate(text, model="en-de", max_new_tokens=20)
    assert result.finish_reason in ("eos", "length") and result.usage.generated_tokens <= 20


def test_evaluate_gives_the_same_scores_from_checkpoint_bundle_and_server(
    server: Server, bundles: Path, captions: list[str], tmp_path: Path
) -> None:
    oracle, source, reference = Oracle(CHECKPOINTS / "en-de"), tmp_path / "source", tmp_path / "reference"
    source.write_text("\n".join(captions[:40]) + "\n")
    reference.write_text("\n".join(oracle.decode(found.ids) for found in oracle.greedy(captions[1:41], 256)) + "\n")
    scores = [
        json.loads(dragoman("evaluate", *side, "--source", source, "--reference", reference, "--json").stdout)
        for side in (
            ("--checkpoint", CHECKPOINTS / "en-de"),
            ("--bundle", bundles / "en-de"),
            ("--server", server.address, "--model", "en-de"),
        )
    ]
    assert scores[0] == scores[1] == scores[2]
    assert 0 < scores[0]["bleu"] < 100 and "tok:13a" in scores[0]["bleu_signature"]
    with source.open("a") as file:
        file.write(captions[40] * 400 + "\n")
    with reference.open("a") as file:
        file.write("zu lang\n")
    refused = dragoman("evaluate", "--bundle", bundles / "en-de", "--source", source, "--reference", reference)
    assert refused.returncode == 2 and f"{source}, line 41: " in refused.stderr and not refused.stdout


def test_the_recurrent_and_the_language_model_answer_as_pytorch_does(others: Server) -> None:
    rnn, captions = Oracle(CHECKPOINTS / "en-de-rnn"), Oracle(CHECKPOINTS / "en-captions")
    prompts = ["", "A man", "Two dogs are", "A woman with a black hat rides a bicycle"]
    with Client(others.address) as client:
        greedy = client.generate_many(TEXTS, model="en-de-rnn", max_new_tokens=64)
        assert [answer.text for answer in greedy] == [rnn.decode(found.ids) for found in rnn.greedy(TEXTS, 64)]
        beams = client.generate_many(TEXTS, model="en-de-rnn", max_new_tokens=64, num_beams=4)
        assert [answer.text for answer in beams] == [rnn.decode(found[0].ids) for found in rnn.beams(TEXTS, 4, 64)]
        links = client.score(
            TEXTS[1], "Zwei Hunde spielen im Schnee.", model="en-de-rnn", return_word_alignment=True
        ).word_alignment
        assert links is not None and {"0-0", "1-1"} <= set(links.split())
        answers = [client.generate(prompt, model="en-captions", max_new_tokens=40) for prompt in prompts]
    assert [list(answer.tokens) for answer in answers] == [found.ids for found in captions.greedy(prompts, 40)]
    for prompt, answer in zip(prompts, answers, strict=True):
        [ids] = captions.tokenizers.source.encode_batch([prompt])
        assert prompt + answer.text == captions.decode([*ids, *answer.tokens]).strip()


def test_perplexity_from_the_server_is_pytorchs(others: Server, tmp_path: Path, test_set: list[str]) -> None:
    lines = test_set or TEXTS
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    sides = ("--server", others.address, "--model", "en-captions"), ("--checkpoint", CHECKPOINTS / "en-captions")
    by_server, by_pytorch = (
        json.loads(dragoman("perplexity", "--target", tmp_path / "text", "--json", *side).stdout) for side in sides
    )
    assert by_server["num_tokens"] == by_pytorch["num_tokens"] and by_server["num_lines"] == len(lines)
    assert by_server["perplexity"] == pytest.approx(by_pytorch["perplexity"], abs=1e-4)
    assert 2 < by_server["perplexity"] < 40


def test_several_sentences_carry_a_warning_where_the_model_knows_one(server: Server, client: Client) -> None:
    one, two = "A dog runs.", "A dog runs. Two men sit on a bench."
    [warning] = client.generate(two, model="en-fr").warnings
    for text, warnings in ((one, []), (two, [warning])):
        assert list(client.generate(text, model="en-de").warnings) == warnings
        answer = requests.post(f"{server.http_address}/v1/generate", json={"model": "en-de", "text": text}, timeout=60).json()
        assert answer.get("warnings", []) == warnings
        infer = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}]}
        outputs = requests.post(f"{server.http_address}/v2/models/en-de/infer", json=infer, timeout=60).json()["outputs"]
        assert [output["data"] for output in outputs if output["name"] == "warnings"] == [[each] for each in warnings]


def test_a_model_file_says_whether_a_model_knows_one_sentence(shipped_bundle: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "en-de").mkdir()
    (tmp_path / "en-de/1").symlink_to(shipped_bundle("en-de"))
    (tmp_path / "en-de/model.toml").write_text("[settings]\none_sentence = false\n")
    with serving(tmp_path, "--front-ends", "2") as server, Client(server.address) as client:
        assert client.generate("A dog runs. Two men sit on a bench.").warnings == ()


@pytest.mark.parametrize(
    ("model", "source", "target", "links"),
    [
        ("en-de", "Two men play soccer on a field.", "Zwei Männer spielen Fußball auf einem Feld.", "1-1 2-2 3-3 6-6"),
        ("en-fr", SOURCE, "Une petite fille en robe rose.", "1-1 2-2 6-4"),
    ],
)
def test_translated_words_are_linked_and_scored_pairs_counted(
    server: Server, client: Client, model: str, source: str, target: str, links: str
) -> None:
    """Nouns, verbs and numbers; articles and prepositions attend anywhere. French puts the colour behind the dress."""
    labels = {"model": model, "finish_reason": "scored"}
    before = server.metric("dragoman_request_success_total", **labels)
    score = client.score(source, target, model=model, return_word_alignment=True, return_alignment=True)
    assert score.word_alignment is not None and score.alignment is not None
    found = set(score.word_alignment.split())
    assert len(found) == len(target.split()) and found >= set(links.split())
    assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in score.alignment.weights)
    assert server.metric("dragoman_request_success_total", **labels) == before + 1
    assert score.score > client.score(source, "Eine Katze.", model=model).score


def test_the_command_line_scores_two_files(server: Server, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("A dog runs through the snow.\nTwo men play soccer on a field.\n")
    target.write_text("Ein Hund rennt durch den Schnee.\n\n")
    files = ("--source", source, "--target", target, "--alignment")
    lines = dragoman("score", "--server", server.address, "--model", "en-de", *files).stdout.splitlines()
    (score, log_prob, links), (empty_score, empty_log_prob, no_links) = (line.split("\t") for line in lines)
    assert float(log_prob) < float(score) < 0 and "0-0" in links.split()
    assert float(empty_score) == float(empty_log_prob) < float(log_prob) and no_links == ""


def test_a_model_scores_when_its_bundle_has_gone(short: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(short, tmp_path / "alpha")
    with serving(bundle) as server, Client(server.address) as client:
        wait_until(lambda: bool(server.logged(Event.SCORER_LOADED)), "the scorer is loaded")
        bundle.rename(tmp_path / "away")
        assert client.score("a dog runs", "over the grass").log_prob < 0


def test_cross_attention_of_a_server_is_the_checkpoints(client: Client) -> None:
    (ours,) = look_into(CHECKPOINTS / "en-de", SOURCE, TARGET, PAGE_ROOM, kinds=[Kind.CROSS]).parts
    (theirs,) = ask(client, SOURCE, TARGET, PAGE_ROOM, model="en-de").parts
    assert (theirs.rows, theirs.columns) == (ours.rows, ours.columns)

    def mean(tables: Any) -> list[list[float]]:
        return [[sum(cells) / len(cells) for cells in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]

    layers = [mean([each.weights for each in maps]) for maps in ours.layers()]
    assert [told.layer for told in theirs.maps] == [*range(len(layers)), None]
    for told, table in zip(theirs.maps, [*layers, mean(layers)], strict=True):
        for row, wanted in zip(told.weights, table, strict=True):
            assert row == pytest.approx(wanted, abs=1e-4)
    look = ask(client, SOURCE, None, PAGE_ROOM, layer=1, model="en-de")
    assert (look.model, look.target) == ("en-de", client.generate(SOURCE, model="en-de", num_beams=1).text)
    assert [drawn.layer for part in look.parts for drawn in part.maps] == [1]


def test_the_first_command_of_the_page_on_load_testing_works(server: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs/load-testing.md").read_text(encoding="utf-8")
    first = re.findall(r"^\$ dragoman load (.*)$", page, re.MULTILINE)[0]
    arguments = (*shlex.split(first, comments=True), "--duration", 4)
    done = dragoman("load", *arguments, folder=tmp_path, DRAGOMAN_SERVER=server.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "errors: none" in done.stdout and done.stderr == ""
    result = json.loads((tmp_path / "before.json").read_text())
    assert result["total"]["counts"]["num_ok"] > 0 and result["errors"] == []
    assert {model["name"] for model in result["models"]} == {"en-de", "en-fr"}
    for model in ((), ("--model", "en-xx")):
        done = dragoman("load", "--rate", 10, *model, folder=tmp_path, DRAGOMAN_SERVER=server.address)
        assert done.returncode == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert server.address in line and "--model: " in line and "en-de, en-fr" in line
