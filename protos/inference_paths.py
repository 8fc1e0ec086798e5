"""The Open Inference Protocol's REST for the OpenAPI document: paths, and schemas of what goes in and out."""

from typing import Any

from dragoman.server.protocols.http.openinference import MODEL, NOT_OFFERED, ROOT
from dragoman.server.protocols.openinference.requests import (
    FIELDS,
    FLAGS,
    INPUTS,
    MAX_TEXTS,
    NUM_PARAMETERS,
    OUTPUTS,
    PARAMETERS,
    SYNONYMS,
    Kind,
    Output,
)
from dragoman.server.protocols.openinference.tensors import DATATYPES

Schema = dict[str, Any]
SCHEMAS, RESPONSES = "#/components/schemas", "#/components/responses"
PREFIX = "inference"
JSON, BINARY, EVENTS = "application/json", "application/octet-stream", "text/event-stream"
TEXT, FLAG, NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
BYTES = {"type": "string", "format": "binary"}
TYPES: dict[Kind, str] = {"flag": "boolean", "integer": "integer", "number": "number", "text": "string", "tokens": "array"}
# Beside those that every path has; what has a body has all of them.
OF_BODIES = ("403", "408", "413", "415")
ALWAYS = ("400", "401", "404", "405", "429", "500", "503")


def ref(name: str) -> Schema:
    """Return a reference to a schema."""
    return {"$ref": f"{SCHEMAS}/{name}"}


def some(of: Schema, **more: Any) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": of} | more


def one_or_some(of: Schema, **more: Any) -> Schema:
    """Return the schema of a value or a list of such; no type is a list of types, which few generators of clients read."""
    return {"oneOf": [of, some(of, **more)]}


def thing(description: str, required: tuple[str, ...] = (), is_open: bool = False, **properties: Schema) -> Schema:
    """Return the schema of an object."""
    more: Schema = {"required": list(required)} if required else {}
    return {"type": "object", "description": description, "properties": properties, "additionalProperties": is_open} | more


def described(schema: Schema, text: str) -> Schema:
    """Return a schema with what is said of it."""
    return schema | {"description": text}


def parameter(kind: Kind, text: str) -> Schema:
    """Return the schema of a parameter; that it may be JSON in a text, too, is left out."""
    return {"type": TYPES[kind], "description": text} | ({"items": NUMBER} if kind == "tokens" else {})


def parameters() -> dict[str, Schema]:
    """Return the schema of each parameter of a request."""
    found = {name: parameter(field.kind, "As in GenerateRequest.") for name, field in FIELDS.items()}
    found |= {name: parameter(FIELDS[field].kind, f"Another name of {field}.") for name, field in SYNONYMS.items()}
    found |= {name: parameter(field.kind, "See docs/open-inference.md.") for name, field in (FLAGS | PARAMETERS).items()}
    found["timeout"] = parameter("integer", "Microseconds from the request's arrival; 0 for none.")
    found["sampling_parameters"] = {"type": "object", "description": "Fields of GenerateRequest."}
    return found


def generated(output: Output) -> Schema:
    """Return the schema of an output in the shorter form: a value, or a list where there are several."""
    kind = {"BYTES": "string", "BOOL": "boolean", "FP64": "number"}.get(output.datatype, "integer")
    return one_or_some({"type": kind})


def schemas() -> dict[str, Schema]:
    """Return every schema by its name."""
    said = parameters()
    tensor = {"name": TEXT, "datatype": {"type": "string", "enum": list(DATATYPES)}, "shape": some(NUMBER)}
    described_tensor = thing("What a model takes or gives.", ("name", "datatype", "shape"), **tensor)
    configured = {"name": TEXT, "data_type": TEXT, "dims": some(NUMBER)}
    duration = thing("", ("count", "ns"), count=NUMBER, ns=NUMBER)
    return {
        "InferenceRequest": thing(
            "Texts, and what is said of them, as tensors and parameters.",
            ("inputs",),
            id={"type": "string", "maxLength": 128},
            model_name=described({"type": "string"}, "That of the path, if it is said."),
            inputs=some(ref("InferenceInput"), maxItems=len(INPUTS)),
            outputs=some(ref("InferenceWanted"), maxItems=len(OUTPUTS)),
            parameters={
                "type": "object",
                "properties": said | {"binary_data_output": described(FLAG, "Whether outputs are wanted as bytes.")},
                "additionalProperties": False,
                "maxProperties": NUM_PARAMETERS + 1,
            },
        ),
        "InferenceInput": thing(
            "A tensor; `text_input` has to be there. Its elements are in `data`, or behind the JSON.",
            ("name", "datatype", "shape"),
            name={"type": "string", "enum": list(INPUTS)},
            datatype=tensor["datatype"],
            shape=some({"type": "integer", "minimum": 0, "maximum": MAX_TEXTS}, minItems=1, maxItems=2),
            data=described({"type": "array", "items": {}}, "Elements, or rows of them."),
            parameters={
                "type": "object",
                "properties": {"binary_data_size": described({"type": "integer", "minimum": 0}, "Bytes of it behind the JSON.")},
                "additionalProperties": False,
            },
        ),
        "InferenceWanted": thing(
            "An output that is wanted.",
            ("name",),
            name={"type": "string", "enum": list(OUTPUTS)},
            parameters={"type": "object", "properties": {"binary_data": FLAG}, "additionalProperties": False},
        ),
        "InferenceResponse": thing(
            "The answers to all texts.",
            ("id", "model_name", "outputs"),
            id=TEXT,
            model_name=TEXT,
            model_version=TEXT,
            outputs=some(ref("InferenceOutput")),
        ),
        "InferenceOutput": thing(
            "A tensor; its elements are in `data`, or behind the JSON.",
            ("name", "datatype", "shape"),
            **tensor,
            data={"type": "array", "items": {}},
            parameters={"type": "object", "properties": {"binary_data_size": NUMBER}},
        ),
        "TextRequest": thing(
            "One text, or several, and what is said of them.",
            ("text_input",),
            text_input=one_or_some(TEXT, minItems=1, maxItems=MAX_TEXTS),
            id={"type": "string", "maxLength": 128},
            parameters={"type": "object", "properties": said, "additionalProperties": False},
            **said,
        ),
        "TextResponse": thing(
            "Each output by its name: a value, or a list where there are several.",
            ("id", "model_name"),
            id=TEXT,
            model_name=TEXT,
            model_version=TEXT,
            **{name: generated(output) for name, output in OUTPUTS.items()},
        ),
        "InferenceError": thing("Why a request failed.", ("error",), error=TEXT),
        "ServerMetadata": thing(
            "What the server is.", ("name", "version", "extensions"), name=TEXT, version=TEXT, extensions=some(TEXT)
        ),
        "ModelNames": thing("Models that the caller may use.", ("models",), models=some(TEXT)),
        "ModelMetadata": thing(
            "What a model takes and gives.",
            ("name", "versions", "platform", "inputs", "outputs"),
            name=TEXT,
            versions=some(TEXT),
            platform=TEXT,
            inputs=some(described_tensor),
            outputs=some(described_tensor),
        ),
        "ModelConfig": thing(
            "The same in Triton's words.",
            ("name", "max_batch_size", "input", "output"),
            name=TEXT,
            platform=TEXT,
            backend=TEXT,
            max_batch_size=NUMBER,
            input=some(thing("", ("name",), optional=FLAG, **configured)),
            output=some(thing("", ("name",), **configured)),
            model_transaction_policy=thing("", ("decoupled",), decoupled=FLAG),
        ),
        "Statistics": thing("What became of requests.", ("model_stats",), model_stats=some(ref("StatisticsOfModel"))),
        "StatisticsOfModel": thing(
            "Of one version of a model.",
            ("name", "version"),
            name=TEXT,
            version=TEXT,
            inference_count=NUMBER,
            inference_stats=thing("", (), success=duration, fail=duration, queue=duration, compute_infer=duration),
        ),
        "IndexRequest": thing(
            "What to list.", (), ready=described(FLAG, "Only what is ready."), repository_name={"type": "string"}
        ),
        "IndexEntry": thing(
            "A version of a model.",
            ("name", "version", "state"),
            name=TEXT,
            version=TEXT,
            state={"type": "string", "enum": ["READY", "UNAVAILABLE"]},
            reason=TEXT,
        ),
        "Live": thing("", ("live",), live=FLAG),
        "Ready": thing("", ("ready",), name=TEXT, ready=FLAG),
    }


# Path behind that of a model, id, what it is, request, answer, kinds of the answer.
OF_MODELS = (
    ("get", "", "InferenceModel", "What a model takes and gives.", "", "ModelMetadata", JSON),
    ("get", "/config", "InferenceModelConfig", "The same in Triton's words.", "", "ModelConfig", JSON),
    ("get", "/stats", "InferenceModelStats", "What became of requests, in the process that answers.", "", "Statistics", JSON),
    ("post", "/infer", "Infer", "Answers up to 1,024 texts.", "InferenceRequest", "InferenceResponse", JSON),
    ("post", "/generate", "InferenceGenerate", "The same in a shorter form.", "TextRequest", "TextResponse", JSON),
    ("post", "/generate_stream", "InferenceGenerateStream", "The same in pieces.", "TextRequest", "TextResponse", EVENTS),
)
OF_SERVER = (
    ("get", ROOT, "InferenceServer", "What the server is.", "", ref("ServerMetadata")),
    ("get", f"{ROOT}/models", "InferenceModels", "Models that the caller may use.", "", ref("ModelNames")),
    ("get", f"{ROOT}/models/stats", "InferenceStats", "What became of requests, of every model.", "", ref("Statistics")),
    (
        "post",
        f"{ROOT}/repository/index",
        "InferenceIndex",
        "Every version of every model.",
        "IndexRequest",
        some(ref("IndexEntry")),
    ),
)
PROBES = (
    (f"{ROOT}/health/live", "InferenceLive", "Whether the process answers.", "Live"),
    (f"{ROOT}/health/ready", "InferenceReady", "Whether the server is ready; 503 if it is not.", "Ready"),
    (f"{MODEL}/ready", "InferenceModelReady", "Whether a model is ready; 503 if it is not, or there is none.", "Ready"),
    (f"{MODEL}/versions/{{version}}/ready", "InferenceModelVersionReady", "Whether a version of a model is ready.", "Ready"),
)


def operation(
    name: str,
    text: str,
    path: str,
    headers: list[Schema],
    request: str,
    answers: Schema,
    statuses: list[str],
    protocol: str = "Open Inference Protocol",
) -> Schema:
    """Return what one method of one path is."""
    parts = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    told: Schema = {
        "operationId": name,
        "summary": text.rstrip("."),
        "description": f"{protocol}. {text}",
        "parameters": [*({"name": part, "in": "path", "required": True, "schema": TEXT} for part in parts), *headers],
        "responses": {"200": {"description": "OK", "content": answers}}
        | {status: {"$ref": f"{RESPONSES}/{PREFIX}{status}"} for status in statuses},
        "security": [{}, {"bearer": []}],
    }
    if request:
        told["requestBody"] = {"required": request != "IndexRequest", "content": {JSON: {"schema": ref(request)}}}
    return told


def paths(headers: list[Schema]) -> dict[str, Schema]:
    """Return every path; what is not offered is not among them.

    Args:
        headers: Those that requests may have.
    """
    found: dict[str, Schema] = {}
    for method, path, name, text, request, answer in OF_SERVER:
        statuses = sorted((*ALWAYS, *((*OF_BODIES, "504") if request else ())))
        found.setdefault(path, {})[method] = operation(name, text, path, headers, request, {JSON: {"schema": answer}}, statuses)
    for prefix, more in ((MODEL, ""), (f"{MODEL}/versions/{{version}}", "Version")):
        for method, end, name, text, request, answer, kind in OF_MODELS:
            statuses = sorted((*ALWAYS, *((*OF_BODIES, "504") if request else ())))
            content: Schema = {kind: {"schema": ref(answer)}}
            if kind == EVENTS:
                said = f"Server-sent events: `data` of each is a {answer}; where it fails, that of the last an InferenceError."
                content = {kind: {"schema": described(TEXT, said)}}
            path = prefix + end
            one = operation(name + more, text, path, headers, request, content, statuses)
            if request == "InferenceRequest":
                said = "JSON, and behind it the content of tensors; Inference-Header-Content-Length says how many bytes are JSON."
                one["requestBody"]["content"][BINARY] = {"schema": described(BYTES, said)}
                content[BINARY] = {"schema": described(BYTES, said)}
            found.setdefault(path, {})[method] = one
    for path, name, text, answer in PROBES:
        told = operation(name, text, path, [], "", {JSON: {"schema": ref(answer)}}, ["405", "503"])
        found.setdefault(path, {})["get"] = told | {"security": [{}]}
    assert not any((method.lower(), path) in {(m, p) for p in found for m in found[p]} for method, path, _ in NOT_OFFERED)
    return found


def responses(errors: dict[str, str]) -> dict[str, Schema]:
    """Return what is answered instead, by the name of the response.

    Args:
        errors: What each status means.
    """
    error = {JSON: {"schema": ref("InferenceError")}}
    said = errors | {
        "403": "A page of another origin sent it, which may not; at paths of LibreTranslate, no token that the server knows.",
        "415": "The body is compressed otherwise than by gzip or deflate.",
    }
    return {f"{PREFIX}{status}": {"description": said[status], "content": error} for status in sorted({*ALWAYS, *OF_BODIES, "504"})}
