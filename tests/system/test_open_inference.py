"""Unmodified clients of other servers, over gRPC and over HTTP: Triton's and KServe's; and the descriptions that they read.

Each client with stubs of its own runs in a process of its own: its stubs have the same names as ours.
"""

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from dragoman.client.sync import Client
from dragoman.inference import inference_pb2 as pb
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.v1.generation_pb2 import FinishReason, GenerateRequest
from tests.system.harness.grpc_client import failure
from tests.system.harness.openinference import binary_body, grpc_outputs, infer_body, infer_request, rest_outputs, with_parameters
from tests.system.harness.server import Event, Server, serving, wait_until

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent / "foreign"
TEXTS = ["A dog runs through the snow.", "Two men are waiting on a bench.", "A little girl is playing near the water."]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.7, "early_stopping": True},
    {"do_sample": True, "seed": 2**40, "temperature": 0.8, "top_k": 20, "num_return_sequences": 4, "min_new_tokens": 4},
    {"suppressed_tokens": [5, 6, 7], "forced_prefix": "Ein", "repetition_penalty": 1.3},
    {"truncate": True, "priority": 3, "max_new_tokens": 5},
]


def foreign(script: str, *arguments: str, needs: tuple[str, ...]) -> subprocess.Popen[str]:
    for name in needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which `make setup` installs")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, str(HERE / script), *arguments], text=True, **pipes)


def triton(protocol: str, address: str, *arguments: str) -> subprocess.Popen[str]:
    needs = ("tritonclient", *(["geventhttpclient"] if protocol == "http" else []))
    return foreign("triton_caller.py", protocol, address.removeprefix("http://"), *arguments, needs=needs)


def printed(process: subprocess.Popen[str], told: str = "") -> Any:
    output, errors = process.communicate(told, timeout=500)
    assert process.returncode == 0, errors
    return json.loads(output)


def address_of(server: Server, protocol: str) -> str:
    return server.http_address if protocol == "http" else server.address


each_protocol = pytest.mark.parametrize("protocol", ["grpc", "http"])


@pytest.fixture(scope="module")
def asked(shared_server: Server) -> Any:
    arguments = json.dumps({"texts": TEXTS, "options": OPTIONS})
    return cache(lambda protocol: printed(triton(protocol, address_of(shared_server, protocol), "everything", arguments)))


@pytest.fixture
def native(stub: Any) -> Any:
    def generate(text: str, **options: Any) -> dict[str, Any]:
        response = stub.Generate(GenerateRequest(model="en-de", text=text, **options))
        return {
            "text_output": [answer.text for answer in response.answers],
            "score": [answer.score for answer in response.answers],
            "finish_reason": [FinishReason.Name(answer.finish_reason)[14:].lower() for answer in response.answers],
            "tokens": [list(answer.tokens) for answer in response.answers],
            "num_input_tokens": [response.usage.source_tokens],
            "num_output_tokens": [response.usage.generated_tokens],
        }

    return generate


@each_protocol
def test_tritons_clients_get_the_native_answers_to_the_last_bit(asked: Any, native: Any, protocol: str) -> None:
    """Texts one by one and together, tensors as bytes and in JSON, options as tensors, as parameters and as JSON."""
    found, forms = asked(protocol), {"tensors", "parameters", "sampling_parameters", "together"}
    for options, *both in zip(OPTIONS, found["sync"], found["aio"], strict=True):
        expected = [native(text, **options) for text in TEXTS]
        for answers in both:
            assert set(answers) - {"gzip", "deflate"} == forms | ({"json", "together in json"} if protocol == "http" else set())
            for form, answer in answers.items():
                assert answer == expected, (form, options)
    assert found["ready"] == [True, True, True, False]
    assert protocol == "grpc" or found["later"] == [native(text) for text in TEXTS]


def test_pieces_of_tritons_streams_are_the_native_answer(asked: Any, native: Any) -> None:
    found = asked("grpc")["stream"]
    for number, text in enumerate(TEXTS):
        pieces, expected = found[str(number)], native(text)
        assert len(pieces["texts"]) > 3 and "".join(pieces["texts"]) == expected["text_output"][0]
        assert pieces["score"] == expected["score"] and pieces["num_final"] == 1
        assert found[f"aio-{number}"] == pieces
    assert found["error"].startswith("INVALID_ARGUMENT: text: is blank")


@each_protocol
def test_tritons_clients_read_descriptions(asked: Any, protocol: str) -> None:
    is_http, found = protocol == "http", asked(protocol)["describe"]
    assert found["ready"] == [True, True, True, False]
    shape = [-1, 1] if is_http else ["-1", "1"]
    assert found["metadata"]["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": shape}
    config = found["config"] if is_http else found["config"]["config"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [model["name"] for model in (found["index"] if is_http else found["index"]["models"])] == ["en-de", "en-fr"]
    assert found["statistics"]["model_stats"][0]["name"] == "en-de" and found["server"]["name"] == "dragoman"
    assert not is_http or asked(protocol)["id"] == "mine"


@each_protocol
def test_every_kind_of_error_has_its_status(asked: Any, protocol: str) -> None:
    kinds = {
        ("INVALID_ARGUMENT", "400"): ("blank", "unknown input", "unknown output", "unknown parameter"),
        ("NOT_FOUND", "404"): ("no model", "no version"),
        ("DEADLINE_EXCEEDED", "504"): ("timeout",),
        ("UNIMPLEMENTED", "501"): ("shared memory", "load"),
    }
    is_http, found = protocol == "http", asked(protocol)["errors"]
    expected = {name: http if is_http else f"StatusCode.{code}" for (code, http), names in kinds.items() for name in names}
    expected |= {"settings": "501"} if is_http else {}
    expected["deadline of its own"] = "TimeoutError" if is_http else "StatusCode.DEADLINE_EXCEEDED"
    assert {name: status for name, (status, _) in found.items()} == expected
    assert "text_input[1]" in found["blank"][1] and "admin_port" in found["load"][1]


@each_protocol
def test_a_client_that_leaves_frees_its_slots(endless: Path, protocol: str) -> None:
    with serving(endless, "--max-slots", "4") as server:
        caller = triton(protocol, address_of(server, protocol), "cancel")
        wait_until(lambda: server.metric("dragoman_slots_in_use", model="alpha") == 4, "slots are full")
        assert printed(caller, "leave\n") == "left"
        assert {server.wait_for(Event.ITEM)["code"] for _ in range(8)} == {"CANCELLED"}, "twice as many as slots had begun"
        with Client(server.address) as client:
            assert len(client.generate("a dog", model="alpha", max_new_tokens=2).tokens) == 2
        server.wait_until_idle()
        assert server.metric("dragoman_step_duration_seconds_count", model="alpha") < 900 * 64 / 4


def contract(*files: FileDescriptorProto) -> dict[str, Any]:
    """Return number and type of every field, those of messages inside others too, every value, and every method of files."""
    found: dict[str, Any] = {}
    for file in files:
        messages = [(message.name, message) for message in file.message_type]
        for name, message in messages:  # grows during the loop
            messages += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]
            found |= {f"{name}.{x.name}": (x.number, x.type, x.label, x.type_name) for x in message.field}
        found |= {f"{kind.name}.{value.name}": value.number for kind in file.enum_type for value in kind.value}
        for service in file.service:
            kinds = {x.name: (x.input_type, x.output_type, x.client_streaming, x.server_streaming) for x in service.method}
            found |= {f"{file.package}.{service.name}.{name}": kind for name, kind in kinds.items()}
    return found


def test_the_contract_has_the_published_numbers(asked: Any) -> None:
    """All methods, and no message field that is not published so."""
    published = contract(*(FileDescriptorProto.FromString(bytes.fromhex(file)) for file in asked("grpc")["contract"]))
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    ours = contract(file)
    assert {name: published.get(name) for name in ours} == ours
    methods = {name for name in published if name.startswith("inference.GRPCInferenceService.")}
    assert methods and methods <= ours.keys()


def test_kserves_clients_get_the_native_answers(server: Server, native: Any) -> None:
    needs = ("kserve", "httpx", "orjson", "pandas", "cloudevents", "fastapi", "psutil")
    process = foreign("kserve_caller.py", server.address, server.http_address, *TEXTS, needs=needs)
    over_grpc, over_rest = printed(process)
    expected = [native(text, num_beams=2) for text in TEXTS]
    assert over_grpc["ready"] == [True, True, True] and over_rest["ready"] == [True, True, True, False]
    for answer in (over_grpc["answer"], *over_rest["answers"]):
        assert answer["id"] == "mine" and answer["text"] == [each["text_output"][0] for each in expected]
        assert answer["score"] == [each["score"][0] for each in expected]
    assert [status for status, _ in over_rest["errors"]] == [400, 404]
    assert "text: is blank" in over_rest["errors"][0][1]


@pytest.fixture
def inference(channel: grpc.Channel) -> Any:
    return GRPCInferenceServiceStub(channel)


def get(server: Server, path: str) -> tuple[int, Any]:
    response = requests.get(server.http_address + path, timeout=60)
    return response.status_code, response.json()


def test_outputs_are_named_ordered_and_binary_as_they_are_wanted(server: Server, inference: Any) -> None:
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "return_log_probs": True, "top_log_probs": 2}
    request = with_parameters(infer_request("a dog", "a cat", shape=[2, 1], id="mine"), **options)
    response = inference.ModelInfer(request)
    expected, url = grpc_outputs(response), f"{server.http_address}/v2/models/en-de/infer"
    assert expected["text_output"][0] == [2, 2] and expected["num_input_tokens"][0] == [2, 1] and "seed" not in expected
    body = infer_body("a dog", "a cat", id="mine", parameters=options)
    body["inputs"][0] |= {"shape": [2, 1], "data": [["a dog"], ["a cat"]]}
    answer = requests.post(url, json=body, timeout=60).json()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("mine", "en-de", response.model_version)
    assert rest_outputs(answer) == expected
    data, headers = binary_body(request, parameters=options | {"binary_data_output": True})
    binary = requests.post(url, data=data, headers=headers, timeout=60)
    head = int(binary.headers["Inference-Header-Content-Length"])
    assert rest_outputs(json.loads(binary.content[:head]), binary.content[head:]) == expected
    names = ["seed", "text_output", "log_probs"]
    wanted = infer_request("a", "b", shape=[2, 1], outputs=[{"name": name} for name in names])
    named = inference.ModelInfer(with_parameters(wanted, do_sample=True, seed=7))
    assert [output.name for output in named.outputs] == names and not any(output.HasField("contents") for output in named.outputs)
    assert (grpc_outputs(named)["seed"], grpc_outputs(named)["log_probs"]) == (([2, 1], [7, 7]), ([2, 1], ["[]", "[]"]))
    outputs = [{"name": "score"}, {"name": "text_output", "parameters": {"binary_data": True}}, {"name": "num_input_tokens"}]
    partly = requests.post(url, json=infer_body("a", "b", outputs=outputs), timeout=60)
    head = int(partly.headers["Inference-Header-Content-Length"])
    message = json.loads(partly.content[:head])
    in_json = [(x["name"], "data" in x) for x in message["outputs"]]
    assert in_json == [("score", True), ("text_output", False), ("num_input_tokens", True)]
    whole = grpc_outputs(inference.ModelInfer(infer_request("a", "b")))
    assert rest_outputs(message, partly.content[head:]) == {x["name"]: whole[x["name"]] for x in outputs}


def test_generate_has_outputs_by_name_and_streams_only_one_text(server: Server, inference: Any) -> None:
    def post(path: str, message: Any) -> requests.Response:
        return requests.post(f"{server.http_address}/v2/models/en-de{path}", json=message, timeout=60)

    response = inference.ModelInfer(infer_request("a dog"))
    expected = {name: value for name, (_, [value]) in grpc_outputs(response).items()}
    expected |= {"id": "mine", "model_name": "en-de", "model_version": response.model_version}
    for path in ("/generate", f"/versions/{response.model_version}/generate"):
        assert post(path, {"text_input": "a dog", "id": "mine"}).json() == expected
        assert post(path, {"text_input": ["a dog"], "parameters": {"stream": False}, "id": "mine"}).json() == expected
    several = post("/generate", {"text_input": ["a", "b"], "num_beams": 2, "num_return_sequences": 2}).json()
    assert len(several["text_output"]) == 4 and len(several["num_input_tokens"]) == 2
    several_answers = {"text_input": "a", "num_beams": 2, "num_return_sequences": 2}
    for message in ({"text_input": "a dog", "stream": False}, several_answers, {"text_input": ["a", "b"]}):
        [_] = filter(None, post("/generate_stream", message).text.splitlines())
    for path, message, reason in (
        ("/infer", infer_body("a", parameters={"stream": True}), "stream: goes with generate_stream only"),
        ("/generate", {"text_input": "a", "stream": True}, "stream: goes with generate_stream only"),
        ("/generate_stream", {"text_input": ["a", "b"], "stream": True}, "stream: goes with one text only"),
        ("/infer", infer_body("a", "b", " "), "text_input[2]: text: is blank"),
        ("/infer", infer_body(*["a"] * 1025), "text_input: its shape [1025] has 1025 elements"),
    ):
        refused = post(path, message)
        assert refused.status_code == 400 and list(refused.json()) == ["error"] and reason in refused.json()["error"]
    for path in ("/generate", "/generate_stream"):
        assert post(path, {"text_input": "a", "timeout": 1}).status_code == 504


def test_models_and_the_server_are_described_alike(server: Server, inference: Any) -> None:
    version = inference.ModelInfer(infer_request("a")).model_version
    metadata = inference.ModelMetadata(pb.ModelMetadataRequest(name="en-de"))
    config = inference.ModelConfig(pb.ModelConfigRequest(name="en-de")).config
    assert (metadata.platform, list(metadata.inputs[0].shape)) == ("dragoman_onnx", [-1, 1]) and config.max_batch_size == 1024
    assert [x.name for x in config.input if not x.optional] == ["text_input"]
    assert pb.TYPE_INVALID not in {x.data_type for x in (*config.input, *config.output)}
    for path in ("/v2/models/en-de", f"/v2/models/en-de/versions/{version}"):
        _, found = get(server, path)
        assert found["versions"] == list(metadata.versions)
        for side in ("inputs", "outputs"):
            assert [(x["name"], x["datatype"], x["shape"]) for x in found[side]] == [
                (x.name, x.datatype, list(x.shape)) for x in getattr(metadata, side)
            ]
        _, found = get(server, f"{path}/config")
        assert (found["max_batch_size"], found["model_transaction_policy"]) == (1024, {"decoupled": True})
        assert found["input"][0] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": False}
        assert len(found["output"]) == len(config.output)
    told = inference.ServerMetadata(pb.ServerMetadataRequest())
    _, found = get(server, "/v2")
    assert (found["name"], told.name) == ("dragoman", "dragoman") and set(told.extensions) <= set(found["extensions"])
    assert {"statistics", "binary_tensor_data"} <= set(found["extensions"]) and get(server, "/v2/models")[1]["models"]
    of_model = ["/v2/models/en-de/stats", f"/v2/models/en-de/versions/{version}/stats"]
    for name, paths in (("", ["/v2/models/stats"]), ("en-de", of_model)):
        statistics = inference.ModelStatistics(pb.ModelStatisticsRequest(name=name)).model_stats
        told = statistics[0].inference_stats
        assert statistics[0].inference_count > 0 and 0 < told.queue.ns < told.success.ns == told.queue.ns + told.compute_infer.ns
        assert told.queue.count == told.compute_infer.count == told.success.count
        for path in paths:
            [first, *_] = get(server, path)[1]["model_stats"]
            assert (first["name"], first["inference_count"]) == ("en-de", statistics[0].inference_count)
            assert first["inference_stats"]["queue"] == {"count": told.queue.count, "ns": told.queue.ns}
    index = inference.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
    assert [(x.name, x.state) for x in index] == [("en-de", "READY"), ("en-fr", "READY")]
    listed = requests.post(f"{server.http_address}/v2/repository/index", timeout=60).json()
    assert listed == [{"name": x.name, "version": x.version, "state": "READY", "reason": ""} for x in index]


def test_unknown_models_and_methods_without_an_offer_are_refused(server: Server, inference: Any) -> None:
    def code(method: str, **fields: Any) -> tuple[str, str]:
        return failure(lambda: getattr(inference, method)(getattr(pb, f"{method}Request")(**fields)))

    for name in ("ModelMetadata", "ModelConfig"):
        assert code(name, name="x")[0] == "NOT_FOUND"
    assert code("RepositoryIndex", repository_name="x")[0] == "INVALID_ARGUMENT"
    index = f"{server.http_address}/v2/repository/index"
    assert requests.post(index, json={"repository_name": "x"}, timeout=60).status_code == 400
    assert get(server, "/v2/models/x/config")[0] == 404
    reasons = {}
    memory = [f"{kind}SharedMemory{do}" for kind in ("System", "Cuda") for do in ("Status", "Register", "Unregister")]
    for name in ("RepositoryModelLoad", "RepositoryModelUnload", *memory, "TraceSetting", "LogSettings"):
        status, reasons[name] = code(name)
        assert status == "UNIMPLEMENTED" and reasons[name]
    paths = [
        *[(method, path, "LogSettings") for path in ("/trace/setting", "/logging") for method in ("GET", "POST")],
        ("GET", "/models/en-de/trace/setting", "TraceSetting"),
        *[("GET", f"/{kind}sharedmemory{part}/status", memory[0]) for kind in ("system", "cuda") for part in ("", "/region/mine")],
        *[("POST", f"/systemsharedmemory/region/mine/{do}", memory[1]) for do in ("register", "unregister")],
        *[("POST", f"/repository/models/en-de/{do}", "RepositoryModelLoad") for do in ("load", "unload")],
    ]
    for method, path, name in paths:
        response = requests.request(method, f"{server.http_address}/v2{path}", timeout=60)
        assert (response.status_code, response.json()) == (501, {"error": reasons[name]}), path
