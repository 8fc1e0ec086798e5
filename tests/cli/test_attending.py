"""`dragoman attention`: what it writes and what it refuses, from a checkpoint and from a server."""

import re
import shlex
from pathlib import Path

import grpc
import pytest
import torch
from PIL import Image

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.architectures import network
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.v1 import generation_pb2, generation_pb2_grpc

NUM_LAYERS = 3
SOURCE, ANSWER = "a dog", "ein Hund"


def save(folder: Path, **switches: object) -> Path:
    """Write a small checkpoint whose answers do not end."""
    tokenizer = ByteLevelTokenizer.train(["a dog runs over the grass"], 280)
    torch.manual_seed(0)
    config = ModelConfig(
        source_vocab_size=280,
        target_vocab_size=280,
        d_model=16,
        num_decoder_layers=2,
        max_source_positions=100,
        max_target_positions=100,
        has_output_bias=True,
        **switches,
    )
    model = network(config)
    model.decoder.output_bias.data[config.eos_id] = -1e4
    Checkpoint("small", model.eval(), Tokenizers.shared(tokenizer)).save(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    layers = {"num_heads": 4, "decoder_ffn_dim": 16}
    return {
        "transformer": save(folder / "transformer", num_encoder_layers=3, encoder_ffn_dim=16, **layers),
        "decoder": save(folder / "decoder", architecture="decoder", **layers),
        "rnn": save(folder / "rnn", architecture="rnn", num_encoder_layers=1),
        "wide": save(folder / "wide", num_encoder_layers=16, encoder_ffn_dim=16, num_heads=16, decoder_ffn_dim=16),
        "blind": save(folder / "blind", architecture="rnn", num_encoder_layers=1, attention="none"),
    }


class Service(generation_pb2_grpc.GenerationServicer):
    """Answers and scores for the model `loud`, whose layers look at the source's token of their own number.

    Attributes:
        requests: What has come.
        refusal: Of Score, if there is one.
    """

    def __init__(self) -> None:
        self.requests = []
        self.refusal = None

    def Generate(self, request, context):
        self.requests.append(request)
        reason = generation_pb2.FINISH_REASON_LENGTH if request.max_new_tokens else generation_pb2.FINISH_REASON_EOS
        return generation_pb2.GenerateResponse(text=ANSWER, finish_reason=reason, tokens=[7, 8], model="loud", model_version="9")

    def Score(self, request, context):
        self.requests.append(request)
        if self.refusal is not None:
            context.abort(*self.refusal)
        layer = request.alignment_layer if request.HasField("alignment_layer") else None
        if layer is not None and layer >= NUM_LAYERS:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"alignment_layer: {layer} is not in 0 to {NUM_LAYERS - 1}, the decoder layers of model loud",
            )
        pieces = [word.encode() for word in request.text.replace(" ", "\0 ").split("\0")] + [b""]
        said = [piece.encode() for piece in request.target.replace(" ", "\0 ").split("\0")] + [b""]
        row = [1 / len(pieces)] * len(pieces) if layer is None else [float(n == layer) for n in range(len(pieces))]
        alignment = generation_pb2.Alignment(
            num_target_tokens=len(said), num_source_tokens=len(pieces), source_pieces=pieces, weights=row * len(said)
        )
        tokens = [generation_pb2.TokenLogProb(token=n, piece=piece) for n, piece in enumerate(said)]
        return generation_pb2.ScoreResponse(alignment=alignment, tokens=tokens, model="loud", model_version="9")


@pytest.fixture
def service() -> Service:
    return Service()


def titles(page: Path) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", page.read_text(encoding="utf-8"))[1:]


def kinds(page: Path) -> dict[str, int]:
    """Count the maps of each kind."""
    found = re.findall(r'data-kind="(\w+)"', page.read_text(encoding="utf-8"))
    return {kind: found.count(kind) for kind in dict.fromkeys(found)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("transformer", {"encoder": 12, "decoder": 8, "cross": 8}), ("decoder", {"decoder": 8}), ("rnn", {"cross": 1})],
)
def test_a_checkpoint_shows_every_head(run, checkpoints, tmp_path: Path, name: str, expected: dict[str, int]) -> None:
    output = tmp_path / "a.html"
    output.write_text("what was there")
    code, out, err = run("attention", "--checkpoint", checkpoints[name], SOURCE, "a dog runs", "--output", output)
    assert (code, out, err) == (0, f"wrote {output}: {sum(expected.values())} maps of model small\n", "")
    assert kinds(output) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_a_picture_is_written_too(run, checkpoints, tmp_path: Path) -> None:
    output = tmp_path / "a.png"
    options = ("--kind", "cross", "--kind", "decoder", "--layer", 1)
    code, out, _ = run("attention", "--checkpoint", checkpoints["transformer"], SOURCE, "a dog", "--output", output, *options)
    assert (code, out) == (0, f"wrote {output}: 8 maps of model small\n")
    with Image.open(output) as image:
        assert image.format == "PNG"


def test_kinds_and_a_layer_are_chosen(run, checkpoints, tmp_path: Path) -> None:
    output = tmp_path / "a.html"
    run(
        "attention",
        "--checkpoint",
        checkpoints["transformer"],
        SOURCE,
        "a dog",
        "--output",
        output,
        "--kind",
        "cross",
        "--layer",
        1,
    )
    assert titles(output) == [f"Cross-attention, layer 1, head {head}" for head in range(4)]


def test_an_answer_that_is_cut_is_told(run, checkpoints, tmp_path: Path) -> None:
    output = tmp_path / "a.html"
    code, _, err = run("attention", "--checkpoint", checkpoints["rnn"], SOURCE, "--output", output, "--max-new-tokens", 5)
    assert (code, err) == (0, "dragoman: The answer did not end within 5 tokens; it is cut there.\n")
    assert "it is cut there" in output.read_text()


REFUSED = {
    "no suffix": ("--checkpoint {transformer} a", "out", "a name that ends in .html or .png says what to write"),
    "another suffix": ("--checkpoint {transformer} a", "out.svg", "out.svg: a name that ends in .html or .png"),
    "no folder": ("--checkpoint {transformer} a", "nowhere/out.png", "there is no directory"),
    "missing checkpoint": ("--checkpoint nowhere a", "out.png", "nowhere/config.json"),
    "no attention": ("--checkpoint {blind} a", "out.png", "the model has no attention to look at"),
    "empty source": ("--checkpoint {rnn} ''", "out.html", "source: is empty"),
    "kind that it lacks": ("--checkpoint {rnn} a --kind encoder", "out.html", "--kind encoder: model small has no encoder self-"),
    "kind that is none": ("--checkpoint {rnn} a --kind sideways", "out.html", "sideways"),
    "layer that it lacks": ("--checkpoint {decoder} a --layer 2", "out.html", "--layer 2: model small has the layers 0 to 1"),
    "source too long": ("--checkpoint {transformer} '{long}'", "out.html", "source: 101 tokens, end-of-sequence included, where"),
    "target too long": ("--checkpoint {transformer} a '{long}'", "out.html", "target: 101 tokens, end-of-sequence included, where"),
    "prompt too long": ("--checkpoint {decoder} a '{long}'", "out.html", "where the model takes 99 after this source"),
    "picture too small": ("--checkpoint {transformer} '{middling}' a", "out.png", "source: 65 tokens; a picture shows 64 at most"),
    "answer for a picture": (
        "--checkpoint {decoder} '{short}'",
        "out.png",
        "source and target together: 84 tokens; a picture shows",
    ),
    "too many heads": (
        "--checkpoint {wide} a b",
        "out.png",
        "320 heads; a picture shows 256 at most: --kind and --layer choose less",
    ),
    "server's model": ("--checkpoint {rnn} --model m a", "out.html", "--model goes with a server, not with --checkpoint"),
    "server's address": ("--checkpoint {rnn} --server m a", "out.html", "--server goes with a server, not with --checkpoint"),
    "target and its length": ("--checkpoint {rnn} a b --max-new-tokens 3", "out.html", "--max-new-tokens goes without a target"),
    "bytes that are no text": ("--checkpoint {rnn} \udcff", "out.html", "source: is not UTF-8"),
    "heads of a server": ("--kind encoder a", "out.html", "--kind encoder: a server tells of cross attention alone"),
}


@pytest.mark.parametrize(("command", "output", "named"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_named(run, checkpoints, tmp_path: Path, command: str, output: str, named: str) -> None:
    words = {name: " ".join(["dog"] * count) for name, count in (("long", 100), ("middling", 64), ("short", 20))}
    arguments = [argument.format(**checkpoints, **words) for argument in shlex.split(command)]
    code, out, err = run("attention", *arguments, "--output", tmp_path / output)
    assert (code, out) == (2, "") and named in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_servers_layers_are_asked_for_one_by_one(run, server: str, service: Service, tmp_path: Path) -> None:
    output = tmp_path / "a.html"
    code, out, err = run("attention", "--server", server, "--model", "loud", SOURCE, "--output", output)
    assert (code, out) == (0, f"wrote {output}: 4 maps of model loud\n")
    assert (
        err
        == "dragoman: A server tells of cross-attention alone, the mean of each layer's heads; a checkpoint shows all there is.\n"
    )
    layers = [*(f"layer {n}" for n in range(NUM_LAYERS)), "mean of all layers"]
    assert titles(output) == [f"Cross-attention, {layer}, mean of all heads" for layer in layers]
    answered, *scored = service.requests
    assert answered.num_beams == 1 and answered.HasField("do_sample") and not answered.do_sample
    assert {(request.target, request.model, request.model_version) for request in scored} == {(ANSWER, "loud", "9")}
    page = output.read_text(encoding="utf-8")
    assert "ein → a 0.33" in page and "␣Hund → ␣dog 1.00" in page and "⟨eos⟩ → ⟨eos⟩ 1.00" in page


def test_one_layer_of_a_server(run, server: str, service: Service, tmp_path: Path) -> None:
    output = tmp_path / "a.png"
    options = ("--layer", 2, "--from", "en", "--to", "de", "--model-version", "canary")
    assert run("attention", "--server", server, SOURCE, ANSWER, "--output", output, *options)[0] == 0
    (request,) = service.requests
    assert (request.alignment_layer, request.source_language, request.target_language) == (2, "en", "de")
    assert request.model_version == "canary" and output.exists()


def test_a_layer_that_a_server_lacks_is_named(run, server: str, tmp_path: Path) -> None:
    told = run("attention", "--server", server, SOURCE, ANSWER, "--output", tmp_path / "a.html", "--layer", 3)
    assert told == (2, "", "dragoman: --layer: 3 is not in 0 to 2, the decoder layers of model loud\n")


def test_a_model_of_a_server_that_tells_no_alignment_is_named(run, server: str, service: Service, tmp_path: Path) -> None:
    service.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "return_alignment: model loud has no attention to a source")
    code, out, err = run("attention", "--server", server, SOURCE, "--output", tmp_path / "a.html")
    assert (code, out) == (2, "") and "model loud has no attention to a source" in err
    assert list(tmp_path.iterdir()) == []


def test_a_servers_answer_that_is_cut_is_told(run, server: str, tmp_path: Path) -> None:
    _, _, err = run("attention", "--server", server, SOURCE, "--output", tmp_path / "a.html", "--max-new-tokens", 2)
    assert "dragoman: The answer did not end within 2 tokens; it is cut there.\n" in err


def test_a_pair_of_a_server_that_is_too_long_is_named(run, server: str, tmp_path: Path) -> None:
    told = run("attention", "--server", server, " ".join(["dog"] * 64), "a", "--output", tmp_path / "a.png")
    assert told == (2, "", "dragoman: source: 65 tokens; a picture shows 64 at most\n")
