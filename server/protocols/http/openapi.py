"""OpenAPI document of the HTTP port: `/v1` from the .proto files (descriptors lack comments), other protocols from tables."""

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from dragoman.inference import inference_pb2
from dragoman.server.protocols.deepl.reading import SPLITS
from dragoman.server.protocols.http.forms import MULTIPART
from dragoman.server.protocols.http.openinference import BINARY, BINARY_DATA, BINARY_OUTPUT, BINARY_SIZE, LENGTH_KEY, MODEL, ROOT
from dragoman.server.protocols.http.responses import JSON
from dragoman.server.protocols.openai.reading import MAX_PROMPTS, OWN, RENAMED
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
from dragoman.server.protocols.v1.descriptions import CHANGES
from dragoman.v1 import generation_pb2, repository_pb2

Schema = dict[str, Any]

EVENTS = "text/event-stream"
# Method, path, RPC, request and response.
CALLER_RPCS = (
    ("post", "/v1/generate", "Generate", "GenerateRequest", "GenerateResponse"),
    ("post", "/v1/generate:stream", "GenerateStream", "GenerateRequest", "GenerateStreamResponse"),
    ("post", "/v1/score", "Score", "ScoreRequest", "ScoreResponse"),
    ("get", "/v1/models", "ListModels", "", "ListModelsResponse"),
    ("get", "/v1/models/{model}", "GetModel", "", "Model"),
)
OPERATOR_RPCS = (
    ("get", "/v1/repository", "ListRepository", "", "ListRepositoryResponse"),
    ("post", "/v1/repository:refresh", "RefreshRepository", "RefreshRepositoryRequest", "ListRepositoryResponse"),
    *(
        ("post", f"/v1/repository/models/{{model}}:{verb}", rpc, f"{rpc}Request", "RepositoryModel")
        for rpc, verb in CHANGES.items()
    ),
)
FOR_OPERATORS = "For operators, where `http_admin` is set; it is not there where it is not."
QUERIES: dict[str, list[tuple[str, bool]]] = {
    "GetModel": [("modelVersion", False)],
    "ListRepository": [("model", False)],
    **{name: [("source_lang", True), ("target_lang", True)] for name in ("DeepLEntriesV3", "DeepLDeleteDictionary")},
}
QUERIES |= {"ListBatches": [("limit", False), ("after", False)]}
QUERIES["ListFiles"] = [*QUERIES["ListBatches"], ("purpose", False), ("order", False)]
# Open Inference Protocol: method, path, operation id, text, request, response; OF_MODEL exists with a version in the path too.
OF_SERVER = (
    ("get", ROOT, "InferenceServer", "What the server is.", "", "ServerMetadata"),
    ("get", f"{ROOT}/models", "InferenceModels", "Models that the caller may use.", "", "ModelNames"),
    ("get", f"{ROOT}/models/stats", "InferenceStats", "What became of requests, of every model.", "", "Statistics"),
    ("post", f"{ROOT}/repository/index", "InferenceIndex", "Every version of every model.", "IndexRequest", "Index"),
)
OF_MODEL = (
    ("get", "", "InferenceModel", "What a model takes and gives.", "", "ModelMetadata"),
    ("get", "/config", "InferenceModelConfig", "The same in Triton's words.", "", "ModelConfig"),
    ("get", "/stats", "InferenceModelStats", "What became of requests, in the process that answers.", "", "Statistics"),
    ("post", "/infer", "Infer", "Answers up to 1,024 texts.", "InferenceRequest", "InferenceResponse"),
    ("post", "/generate", "InferenceGenerate", "The same in a shorter form.", "TextRequest", "TextResponse"),
    ("post", "/generate_stream", "InferenceGenerateStream", "The same in pieces.", "TextRequest", "TextResponse"),
)
PROBES = (
    (f"{ROOT}/health/live", "InferenceLive", "Whether the process answers.", "Live"),
    (f"{ROOT}/health/ready", "InferenceReady", "Whether the server is ready; 503 if it is not.", "Ready"),
    (f"{MODEL}/ready", "InferenceModelReady", "Whether a model is ready; 503 if it is not, or there is none.", "Ready"),
    (f"{MODEL}/versions/{{version}}/ready", "InferenceModelVersionReady", "Whether a version of a model is ready.", "Ready"),
)
LIBRETRANSLATE = (
    ("post", "/translate", "Translate", "Translates texts.", "TranslateRequest", "TranslateResponse"),
    ("post", "/detect", "Detect", "Tells languages that a text may have.", "DetectRequest", "DetectResponse"),
    ("post", "/translate_file", "TranslateFile", "Translates a file.", "FileUpload", "FileResponse"),
    ("get", "/languages", "Languages", "Languages that there are models for.", "", "LanguagesResponse"),
    ("get", "/frontend/settings", "FrontendSettings", "What a page needs to know.", "", "FrontendSettings"),
    ("get", "/health", "Health", "Whether the server is ready; 503 if it is not.", "", "HealthResponse"),
)
DEEPL = (
    ("post", "/v2/translate", "DeepLTranslate", "Translates texts.", "DeepLRequest", "DeepLResponse"),
    ("get", "/v2/languages", "DeepLLanguages", "Languages of texts or, with `type=target`, of answers.", "", "DeepLLanguages"),
    ("get", "/v2/usage", "DeepLUsage", "Characters translated by the process that answers.", "", "DeepLUsage"),
    ("post", "/v2/document", "DeepLUpload", "Begins to translate a document.", "DeepLUpload", "DeepLDocument"),
    ("post", "/v2/document/{id}", "DeepLStatus", "How far a document is.", "DeepLKey", "DeepLDocument"),
    ("post", "/v2/document/{id}/result", "DeepLResult", "A translated document, once.", "DeepLKey", "DeepLFile"),
    ("get", "/v2/glossary-language-pairs", "DeepLPairs", "Pairs of languages that glossaries may have.", "", "DeepLPairs"),
    *(
        (method, f"/v{version}/glossaries{end}", f"DeepL{name}{'' if version == 2 else 'V3'}", text, request, response)
        for version, asked, told in ((2, "DeepLNewGlossary", "DeepLGlossary"), (3, "DeepLNewGlossaryV3", "DeepLGlossaryV3"))
        for method, end, name, text, request, response in (
            ("get", "", "ListGlossaries", "Glossaries of the caller and of models.", "", "DeepLGlossaries"),
            ("post", "", "CreateGlossary", "Makes a glossary.", asked, told),
            ("get", "/{id}", "GetGlossary", "A glossary without its entries.", "", told),
            ("delete", "/{id}", "DeleteGlossary", "Removes a glossary.", "", ""),
        )
    ),
    ("get", "/v2/glossaries/{id}/entries", "DeepLEntries", "Entries of a glossary.", "", "DeepLTsv"),
    ("get", "/v3/glossaries/{id}/entries", "DeepLEntriesV3", "Entries of a dictionary.", "", "DeepLDictionaries"),
    ("patch", "/v3/glossaries/{id}", "DeepLEditGlossary", "Renames a glossary, adds entries.", "DeepLEdit", "DeepLGlossaryV3"),
    ("put", "/v3/glossaries/{id}/dictionaries", "DeepLPut", "Replaces a dictionary.", "DeepLDictionary", "DeepLDictionary"),
    ("delete", "/v3/glossaries/{id}/dictionaries", "DeepLDeleteDictionary", "Removes a dictionary.", "", ""),
)
OPENAI = (
    (
        "post",
        "/v1/completions",
        "Completions",
        "Answers to prompts, which are the source texts.",
        "CompletionRequest",
        "CompletionResponse",
    ),
    (
        "post",
        "/v1/chat/completions",
        "ChatCompletions",
        "The answer to a conversation, whose last message of the user is the source text.",
        "ChatRequest",
        "ChatResponse",
    ),
    ("post", "/v1/files", "UploadFile", "Keeps a file.", "FileUpload", "FileObject"),
    ("get", "/v1/files", "ListFiles", "Files of the caller.", "", "ListFilesResponse"),
    ("get", "/v1/files/{id}", "GetFile", "A file.", "", "FileObject"),
    ("delete", "/v1/files/{id}", "DeleteFile", "Deletes a file.", "", "FileDeleted"),
    ("get", "/v1/files/{id}/content", "FileContent", "The content of a file.", "", "FileContent"),
    ("post", "/v1/batches", "CreateBatch", "Begins a batch.", "NewBatch", "Batch"),
    ("get", "/v1/batches", "ListBatches", "Batches of the caller, newest first.", "", "ListBatchesResponse"),
    ("get", "/v1/batches/{id}", "GetBatch", "A batch.", "", "Batch"),
    ("post", "/v1/batches/{id}/cancel", "CancelBatch", "Ends a batch; it keeps its finished lines.", "", "Batch"),
)
ERRORS = {
    "400": "A field is missing, malformed or over its limit; the message begins with its name.",
    "401": "No token, or one that this server does not know.",
    "403": "A page of another origin sent it, which may not; at paths of LibreTranslate and DeepL, no token that the server knows.",
    "404": "No such model or version, or nothing is at this path.",
    "405": "The path is there, but not for this method.",
    "408": "The body did not come in time.",
    "413": "The body is larger than `max_message_bytes` of the server.",
    "415": "The body is of another media type, or compressed otherwise than by gzip or deflate.",
    "429": "The queue is full, or a limit of the caller's is reached; `Retry-After` says when to come back.",
    "500": "The server's fault; the message quotes an incident that its log has.",
    "503": "Draining, or the model is starting; `Retry-After` says when to come back.",
    "504": "The deadline passed, or is sure to pass.",
}
# Error statuses of every operation, and of operations with a body.
Statuses = tuple[tuple[str, ...], tuple[str, ...]]
V1_STATUSES: Statuses = ("400", "401", "404", "405", "429", "500", "503", "504"), ("408", "413", "415")
V2_STATUSES: Statuses = ("400", "401", "404", "405", "429", "500", "503"), ("403", "408", "413", "415", "504")
PROBE_STATUSES: Statuses = (("405", "503"), ())
OPENAI_STATUSES: Statuses = (("400", "401", "404", "405", "429", "500", "503"), ("408", "413", "415", "504"))
DEEPL_STATUSES: Statuses = (("400", "403", "405", "429", "500", "503"), ("404", "408", "413", "415", "504"))
LIBRETRANSLATE_STATUSES: Statuses = ("405", "500", "503"), ("400", "403", "408", "413", "415", "429", "504")
HEADERS: tuple[tuple[str, str, Schema], ...] = (
    ("X-Request-Id", "Id of the request, where the body has none: 128 printable ASCII characters at the most.", {"maxLength": 128}),
    (
        "Grpc-Timeout",
        "Time until the caller's deadline: digits and a unit, of H, M, S, m, u and n.",
        {"pattern": "^[0-9]{1,8}[HMSmun]$"},
    ),
    ("traceparent", "W3C Trace Context: the caller's span.", {}),
)

PROTOCOLS = {LIBRETRANSLATE_STATUSES: "LibreTranslate's API", OPENAI_STATUSES: "OpenAI's API", DEEPL_STATUSES: "DeepL's API"}
# Names of the error responses of protocols; Open Inference's and LibreTranslate's have the same form.
ERROR_PREFIXES = {OPENAI_STATUSES: "openai", DEEPL_STATUSES: "deepl"}

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "integer"}
BYTES: Schema = {"type": "string", "format": "binary"}
KINDS: dict[Kind, str] = {
    "flag": "boolean",
    "integer": "integer",
    "number": "number",
    "text": "string",
    "tokens": "array",
    "terms": "array",
}
_DECLARATION = re.compile(r"(message|enum|service|oneof|rpc) (\w+)|[^=/]*?(\w+) = ")


@cache
def document() -> bytes:
    """Return the OpenAPI document as JSON."""
    contracts = [(Contract(generation_pb2.DESCRIPTOR), CALLER_RPCS), (Contract(repository_pb2.DESCRIPTOR), OPERATOR_RPCS)]
    paths: dict[str, Schema] = {}
    schemas: dict[str, Schema] = {}
    used: set[str] = set()
    for contract, rpcs in contracts:
        schemas |= contract.schemas()
        for method, path, rpc, request, response in rpcs:
            paths[path] = {method: _rpc_operation(contract, path, rpc, request, response)}
            used |= {request, response} - {""}
    model = {"id": TEXT, "object": TEXT, "created": NUMBER, "owned_by": TEXT}  # also as in OpenAI's API
    schemas["Model"]["properties"] |= model
    schemas["ListModelsResponse"]["properties"] |= {"object": TEXT, "data": _some(_object("", tuple(model), **model))}
    content = {
        "openapi": "3.1.0",
        "info": {"title": "Dragoman", "version": "1", "description": contracts[0][0].comments["syntax"]},
        "paths": paths | _other_paths(),
        "components": {
            "schemas": _reachable(schemas, used)
            | {"Status": _status()}
            | _inference_schemas()
            | _libretranslate_schemas()
            | _openai_schemas()
            | _deepl_schemas(),
            "parameters": {
                name: {"name": name, "in": "header", "description": text, "schema": TEXT | more} for name, text, more in HEADERS
            },
            "responses": {
                prefix + status: {"description": text, "content": {JSON: {"schema": _ref(error)}}}
                for prefix, error in (
                    ("", "Status"),
                    ("inference", "InferenceError"),
                    ("openai", "OpenAiError"),
                    ("deepl", "DeepLError"),
                )
                for status, text in ERRORS.items()
                if prefix or status != "403"
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    return json.dumps(content, ensure_ascii=False).encode()


class Contract:
    """A .proto file, with the comment of each declaration by its full name."""

    def __init__(self, file: Any) -> None:
        self.file = file
        text = files("dragoman").joinpath(file.name.removeprefix("dragoman/")).read_text(encoding="utf-8")
        self.comments = read_comments(text)

    def schemas(self) -> dict[str, Schema]:
        """Return the canonical JSON schema of each message and enum."""
        return {name: self._enum(enum) for name, enum in self.file.enum_types_by_name.items()} | {
            name: self._message(message) for name, message in self.file.message_types_by_name.items()
        }

    def _enum(self, enum: Any) -> Schema:
        names = [value.name for value in enum.values]
        lines = [f"- `{name}`: {text}" for name in names if (text := self.comments[f"{enum.name}.{name}"])]
        return _described({"type": "string", "enum": names}, "\n".join(lines))

    def _message(self, message: Any) -> Schema:
        properties = {
            field.json_name: _described(_field(field), self.comments[f"{message.name}.{field.name}"]) for field in message.fields
        }
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return _described(schema, self.comments[message.name])


def read_comments(text: str) -> dict[str, str]:
    """Return the comment before each declaration of a .proto file; empty if none."""
    found: dict[str, str] = {}
    lines: list[str] = []
    scopes: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            lines.append(line[2:].strip())
            continue
        if match := _DECLARATION.match(line):
            kind, name, field = match.groups()
            paragraphs = "\n".join(lines).split("\n\n")
            found[".".join([*filter(None, scopes), name or field])] = "\n\n".join(" ".join(part.split()) for part in paragraphs)
            if line.endswith("{"):
                scopes.append("" if kind == "oneof" else name)
        elif line == "}":
            scopes.pop()
        lines = []
    return found


def _field(field: Any, is_plain: bool = False) -> Schema:
    """Return a field's schema: canonical JSON or, if `is_plain`, inlined messages and integers as numbers."""
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _value(message.fields_by_name["value"], is_plain)}
    return _some(_value(field, is_plain)) if field.is_repeated else _value(field, is_plain)


def _value(field: Any, is_plain: bool) -> Schema:
    kind = field.message_type or field.enum_type
    if kind is not None:
        if not is_plain:
            return {"type": "object"} if kind.full_name.startswith("google") else _ref(kind.name)
        return _plain(kind) if field.message_type else {"type": "string", "enum": [value.name for value in kind.values]}
    if is_plain:
        return {field.TYPE_STRING: TEXT, field.TYPE_BOOL: FLAG}.get(field.type, NUMBER)
    schemas: dict[int, Schema] = {
        field.TYPE_STRING: TEXT,
        field.TYPE_BOOL: FLAG,
        field.TYPE_UINT32: NUMBER | {"minimum": 0, "maximum": 2**32 - 1},
        field.TYPE_INT32: NUMBER | {"minimum": -(2**31), "maximum": 2**31 - 1},
        field.TYPE_UINT64: {"type": "string", "format": "uint64", "pattern": "^[0-9]{1,20}$"},
        field.TYPE_FLOAT: {"type": "number", "format": "float"},
        field.TYPE_DOUBLE: {"type": "number", "format": "double"},
        field.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    }
    return schemas[field.type]


def _plain(message: Any) -> Schema:
    """Return a message's schema in the Open Inference Protocol's JSON."""
    properties = {field.name: _field(field, is_plain=True) for field in message.fields}
    required = [field.name for field in message.fields if not field.has_presence]
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _some(of: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": of} | more


def _one_or_some(of: Schema, **more: Any) -> Schema:
    """Return the schema of a value or a list; few client generators support a list of types."""
    return {"oneOf": [of, _some(of, **more)]}


def _object(description: str, required: Iterable[str] = (), /, **properties: Schema) -> Schema:
    more: Schema = {"required": list(required)} if required else {}
    return _described({"type": "object", "properties": properties, "additionalProperties": False} | more, description)


def _described(schema: Schema, text: str) -> Schema:
    return schema | ({"description": text} if text else {})


def _reachable(schemas: dict[str, Schema], names: set[str]) -> dict[str, Schema]:
    """Return the named schemas and all schemas that they refer to."""
    found: set[str] = set()
    while names:
        name = names.pop()
        found.add(name)
        names |= {other for other in schemas if f'"{_ref(other)["$ref"]}"' in json.dumps(schemas[name])} - found
    return {name: schema for name, schema in schemas.items() if name in found}


def _operation(
    name: str,
    path: str,
    text: str,
    request: str,
    content: Schema,
    statuses: Statuses,
    prefix: str = "",
    has_headers: bool = True,
    status: str = "200",
) -> Schema:
    in_path = [(part, True) for part in re.findall(r"\{(\w+)\}", path)]
    parameters = [
        {"name": part, "in": "path" if f"{{{part}}}" in path else "query", "required": is_required, "schema": TEXT}
        for part, is_required in (*in_path, *QUERIES.get(name, ()))
    ]
    if has_headers:
        parameters += [{"$ref": f"#/components/parameters/{header}"} for header, *_ in HEADERS]
    errors = sorted((*statuses[0], *(statuses[1] if request else ())))
    operation: Schema = {
        "operationId": name,
        "summary": text.partition(". ")[0].rstrip("."),
        "description": text,
        "parameters": parameters,
        "responses": {status: {"description": "OK"} | ({"content": content} if content else {})}
        | {status: {"$ref": f"#/components/responses/{prefix}{status}"} for status in errors},
        "security": [{}, {"bearer": []}],
    }
    if request:
        kind = MULTIPART if request.endswith("Upload") else JSON
        operation["requestBody"] = {"required": request != "IndexRequest", "content": {kind: {"schema": _ref(request)}}}
    return operation


def _rpc_operation(contract: Contract, path: str, rpc: str, request: str, response: str) -> Schema:
    text = contract.comments[f"{next(iter(contract.file.services_by_name))}.{rpc}"]
    content: Schema = {JSON: {"schema": _ref(response)}}
    if rpc == "GenerateStream":
        events = f"Server-sent events: `data` of each is a {response}; one named `error`, with a Status, ends a stream that fails."
        content = {EVENTS: {"schema": _described(TEXT, events)}}
    operation = _operation(rpc, path, text, request, content, V1_STATUSES)
    if path.startswith("/v1/repository"):
        operation |= {"description": f"{text} {FOR_OPERATORS}", "security": [{"bearer": []}]}
    return operation


def _other_paths() -> dict[str, Schema]:
    """Return the paths of other protocols."""
    paths: dict[str, Schema] = {}
    rows = [(V2_STATUSES, *row) for row in OF_SERVER] + [(LIBRETRANSLATE_STATUSES, *row) for row in LIBRETRANSLATE]
    for prefix, more in ((MODEL, ""), (f"{MODEL}/versions/{{version}}", "Version")):
        rows += [(V2_STATUSES, method, prefix + end, name + more, *rest) for method, end, name, *rest in OF_MODEL]  # type: ignore[misc]
    rows += [(OPENAI_STATUSES, *row) for row in OPENAI] + [(DEEPL_STATUSES, *row) for row in DEEPL]
    rows += [(PROBE_STATUSES, "get", path, name, text, "", response) for path, name, text, response in PROBES]
    for statuses, method, path, name, text, request, response in rows:
        content: Schema = {JSON: {"schema": _ref(response)}} if response else {}
        if path.endswith("/generate_stream"):
            events = f"Server-sent events: `data` of each is a {response}; where it fails, that of the last an InferenceError."
            content = {EVENTS: {"schema": _described(TEXT, events)}}
        if statuses is OPENAI_STATUSES and path.endswith("completions"):
            content[EVENTS] = {"schema": _described(TEXT, "With `stream`: server-sent events, the last of which is `[DONE]`.")}
        if response in ("DeepLFile", "FileContent"):
            told = "The translated document." if response == "DeepLFile" else "JSON lines."
            content = {"application/octet-stream": {"schema": _described(BYTES, told)}}
        if response == "DeepLTsv":
            content = {"text/tab-separated-values": {"schema": _described(TEXT, "Sources and targets.")}}
        status = "204" if method == "delete" and not response else "201" if name.startswith("DeepLCreate") else "200"
        is_probe = statuses is PROBE_STATUSES
        errors = ERROR_PREFIXES.get(statuses, "inference")
        operation = _operation(name, path, text, request, content, statuses, errors, not is_probe, status)
        protocol = PROTOCOLS.get(statuses, "Open Inference Protocol")
        operation["description"] = f"{protocol}. {text}"
        if is_probe:
            operation["security"] = [{}]
        if request == "InferenceRequest":
            binary = _described(BYTES, f"JSON, and behind it the content of tensors; {LENGTH_KEY} says how many bytes are JSON.")
            operation["requestBody"]["content"][BINARY] = content[BINARY] = {"schema": binary}
        paths.setdefault(path, {})[method] = operation
    return paths


def _status() -> Schema:
    return {
        "type": "object",
        "description": "google.rpc.Status: why a request failed.",
        "properties": {
            "code": _described(NUMBER, "Number of the gRPC status, for example 8 for RESOURCE_EXHAUSTED."),
            "message": _described(TEXT, "What went wrong, in English; for people, so its wording may change."),
            "details": _described(_some({"type": "object"}), "google.rpc.RetryInfo and RequestInfo."),
        },
        "required": ["code", "message"],
    }


def _parameters() -> dict[str, Schema]:
    """Return the schemas of an inference request's parameters; JSON in strings is left out."""

    def schema(kind: Kind, text: str) -> Schema:
        items = {"tokens": NUMBER, "terms": {"type": "object"}}
        return {"type": KINDS[kind], "description": text} | ({"items": items[kind]} if kind in items else {})

    found = {name: schema(field.kind, "As in GenerateRequest.") for name, field in FIELDS.items()}
    found |= {name: schema(FIELDS[field].kind, f"Another name of {field}.") for name, field in SYNONYMS.items()}
    found |= {name: schema(field.kind, "See docs/call.md.") for name, field in (FLAGS | PARAMETERS).items()}
    found["timeout"] = schema("integer", "Microseconds from the request's arrival; 0 for none.")
    found["sampling_parameters"] = {"type": "object", "description": "Fields of GenerateRequest."}
    return found


def _generated(output: Output) -> Schema:
    kind = {"BYTES": "string", "BOOL": "boolean", "FP64": "number"}.get(output.datatype, "integer")
    return _one_or_some({"type": kind})


def _inference_schemas() -> dict[str, Schema]:
    parameters, request_id = _parameters(), TEXT | {"maxLength": 128}
    tensor = {"name": TEXT, "datatype": {"type": "string", "enum": list(DATATYPES)}, "shape": _some(NUMBER)}
    answered = {"id": TEXT, "model_name": TEXT, "model_version": TEXT}
    size = _described(NUMBER | {"minimum": 0}, "Bytes of it behind the JSON.")
    return {
        "InferenceRequest": _object(
            "Texts, and what is said of them, as tensors and parameters.",
            ("inputs",),
            id=request_id,
            model_name=_described(TEXT, "That of the path, if it is said."),
            inputs=_some(_ref("InferenceInput"), maxItems=len(INPUTS)),
            outputs=_some(_ref("InferenceWanted"), maxItems=len(OUTPUTS)),
            parameters=_object("", **parameters, **{BINARY_OUTPUT: _described(FLAG, "Whether outputs are wanted as bytes.")})
            | {"maxProperties": NUM_PARAMETERS + 1},
        ),
        "InferenceInput": _object(
            "A tensor; `text_input` has to be there. Its elements are in `data`, or behind the JSON.",
            ("name", "datatype", "shape"),
            name=TEXT | {"enum": list(INPUTS)},
            datatype=tensor["datatype"],
            shape=_some(NUMBER | {"minimum": 0, "maximum": MAX_TEXTS}, minItems=1, maxItems=2),
            data=_described(_some({}), "Elements, or rows of them."),
            parameters=_object("", **{BINARY_SIZE: size}),
        ),
        "InferenceWanted": _object(
            "An output that is wanted.",
            ("name",),
            name=TEXT | {"enum": list(OUTPUTS)},
            parameters=_object("", **{BINARY_DATA: FLAG}),
        ),
        "InferenceResponse": _object(
            "The answers to all texts.", ("id", "model_name", "outputs"), **answered, outputs=_some(_ref("InferenceOutput"))
        ),
        "InferenceOutput": _object(
            "A tensor; its elements are in `data`, or behind the JSON.",
            ("name", "datatype", "shape"),
            **tensor,
            data=_some({}),
            parameters=_object("", **{BINARY_SIZE: size}),
        ),
        "TextRequest": _object(
            "One text, or several, and what is said of them.",
            ("text_input",),
            text_input=_one_or_some(TEXT, minItems=1, maxItems=MAX_TEXTS),
            id=request_id,
            parameters=_object("", **parameters),
            **parameters,
        ),
        "TextResponse": _object(
            "Each output by its name: a value, or a list where there are several.",
            ("id", "model_name"),
            **answered,
            **{name: _generated(output) for name, output in OUTPUTS.items()},
        ),
        "InferenceError": _object("Why a request failed.", ("error",), error=TEXT),
        "ServerMetadata": _described(_plain(inference_pb2.ServerMetadataResponse.DESCRIPTOR), "What the server is."),
        "ModelNames": _object("Models that the caller may use.", ("models",), models=_some(TEXT)),
        "ModelMetadata": _described(_plain(inference_pb2.ModelMetadataResponse.DESCRIPTOR), "What a model takes and gives."),
        "ModelConfig": _described(_plain(inference_pb2.ModelConfig.DESCRIPTOR), "The same in Triton's words."),
        "Statistics": _described(_plain(inference_pb2.ModelStatisticsResponse.DESCRIPTOR), "What became of requests."),
        "IndexRequest": _object("What to list.", ready=_described(FLAG, "Only what is ready."), repository_name=TEXT),
        "Index": _described(_some(_ref("IndexEntry")), "Versions of models."),
        "IndexEntry": _described(_plain(inference_pb2.RepositoryIndexResponse.ModelIndex.DESCRIPTOR), "A version of a model."),
        "Live": _object("", ("live",), live=FLAG),
        "Ready": _object("", ("ready",), name=TEXT, ready=FLAG),
    }


def _openai_schemas() -> dict[str, Schema]:
    own = {name: {"type": KINDS[FIELDS[RENAMED.get(name, name)].kind]} for name in (*RENAMED, *OWN)}
    own |= {"suppressed_tokens": _some(NUMBER), "terms": _some({"type": "object"})}
    shared: dict[str, Any] = {"model": TEXT, "stream": FLAG, **own}
    usage = {name: NUMBER for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    answer = {"id": TEXT, "object": TEXT, "created": NUMBER, "model": TEXT, "choices": _some({"type": "object"})}
    answer["usage"] = _object("", (), **usage)
    messages = _some({"type": "object", "properties": {"role": TEXT}})
    return {
        "CompletionRequest": _object("Source texts.", ("prompt",), prompt=_one_or_some(TEXT, maxItems=MAX_PROMPTS), **shared)
        | {"additionalProperties": True},
        "CompletionResponse": _object("Answers.", tuple(answer), **answer),
        "ChatRequest": _object("A conversation.", ("messages",), messages=messages, **shared) | {"additionalProperties": True},
        "ChatResponse": _object("Answers.", tuple(answer), **answer),
        **_batch_schemas(),
        "OpenAiError": _object("Why a request failed.", ("error",), error={"type": "object"}),
    }


def _batch_schemas() -> dict[str, Schema]:
    file = {"id": TEXT, "object": TEXT, "bytes": NUMBER, "created_at": NUMBER, "filename": TEXT, "purpose": TEXT}
    batch = {
        "id": TEXT,
        "object": TEXT,
        "endpoint": TEXT,
        "status": TEXT,
        "input_file_id": TEXT,
        "request_counts": {"type": "object"},
    }
    others, endpoints = {"additionalProperties": True}, ("/v1/completions", "/v1/chat/completions", "/v1/generate")
    asked = {"input_file_id": TEXT, "endpoint": TEXT | {"enum": list(endpoints)}, "completion_window": TEXT | {"enum": ["24h"]}}
    return {
        "FileUpload": _object("A file.", ("file", "purpose"), file=BYTES, purpose=TEXT | {"enum": ["batch"]}) | others,
        "FileObject": _object("A file.", tuple(file), **file) | others,
        "FileDeleted": _object("A file that is not there any more.", ("id", "deleted"), id=TEXT, object=TEXT, deleted=FLAG),
        "NewBatch": _object("A batch of the lines of a file.", tuple(asked), **asked, metadata={"type": "object"}) | others,
        "Batch": _object("A batch.", tuple(batch), **batch) | others,
    } | {
        f"List{name}Response": _object("A page.", ("data", "has_more"), data=_some(_ref(kind)), has_more=FLAG) | others
        for name, kind in (("Files", "FileObject"), ("Batches", "Batch"))
    }


def _deepl_schemas() -> dict[str, Schema]:
    translation = {"detected_source_language": TEXT, "text": TEXT, "billed_characters": NUMBER, "model_type_used": TEXT}
    answers = _some(_object("", ("detected_source_language", "text"), **translation))
    language = _object("", ("language", "name"), language=TEXT, name=TEXT, supports_formality=FLAG)
    languages, others = {"source_lang": TEXT, "target_lang": TEXT, "model": TEXT}, {"additionalProperties": True}
    pair, told = {"source_lang": TEXT, "target_lang": TEXT}, {"glossary_id": TEXT, "name": TEXT, "creation_time": TEXT}
    entries, dictionaries = (
        pair | {"entries": TEXT, "entries_format": TEXT | {"enum": ["tsv", "csv"]}},
        _some(_ref("DeepLDictionary")),
    )
    split, texts = TEXT | {"enum": list(SPLITS)}, _one_or_some(TEXT, maxItems=MAX_TEXTS)
    return {
        "DeepLRequest": _object("Texts.", ("text", "target_lang"), text=texts, split_sentences=split, **languages) | others,
        "DeepLResponse": _object("Translations.", ("translations",), translations=answers),
        "DeepLLanguages": _described(_some(language), "Languages by code."),
        "DeepLUpload": _object("A document.", ("file", "target_lang"), file=BYTES, **languages) | others,
        "DeepLKey": _object("Key of a document.", ("document_key",), document_key=TEXT),
        "DeepLDocument": _object("A document: id and key, or its state.", ("document_id",), document_id=TEXT) | others,
        "DeepLUsage": _object("Usage.", (), character_count=NUMBER, character_limit=NUMBER),
        "DeepLPairs": _object("Pairs of languages.", ("supported_languages",), supported_languages=_some(_object("", **pair))),
        "DeepLGlossary": _object("A glossary for one pair.", **told, **pair, ready=FLAG, entry_count=NUMBER),
        "DeepLGlossaryV3": _object("A glossary.", **told, dictionaries=dictionaries),
        "DeepLGlossaries": _object("Glossaries.", ("glossaries",), glossaries=_some({"type": "object"})),
        "DeepLDictionary": _object("Entries for one pair.", tuple(pair), **entries, entry_count=NUMBER),
        "DeepLDictionaries": _object("Dictionaries.", ("dictionaries",), dictionaries=dictionaries),
        "DeepLNewGlossary": _object("A glossary for one pair.", ("name", *pair, "entries"), name=TEXT, **entries),
        "DeepLNewGlossaryV3": _object("A glossary.", ("name", "dictionaries"), name=TEXT, dictionaries=dictionaries),
        "DeepLEdit": _object("Changes.", name=TEXT, dictionaries=dictionaries),
        "DeepLError": _object("Why a request failed.", ("message",), message=TEXT, detail=TEXT),
    }


def _libretranslate_schemas() -> dict[str, Schema]:
    key = _described(TEXT, "Token of the caller, where it is in no header.")
    detected = _one_or_some(_ref("DetectedLanguage"))
    return {
        "TranslateRequest": _object(
            "Texts, and their languages.",
            ("q", "source", "target"),
            q=_described(_one_or_some(TEXT, maxItems=1024), "A text, or a list of them."),
            source=_described(TEXT, "Code of a language, or `auto`."),
            target=_described(TEXT, "Code of a language."),
            format=TEXT | {"enum": ["text"]},
            alternatives=_described(NUMBER, "Further answers wanted."),
            api_key=key,
            model=_described(TEXT, "Name of a model, where several have the languages."),
        )
        | {"additionalProperties": True},
        "TranslateResponse": _object(
            "Translations, in lists where `q` is one.",
            ("translatedText",),
            translatedText=_one_or_some(TEXT),
            alternatives=_some({"oneOf": [TEXT, _some(TEXT)]}),
            detectedLanguage=_described(detected, "Where `source` is `auto`."),
        ),
        "TranslateFileUpload": _object(
            "A file, and its languages.",
            ("file", "source", "target"),
            file=BYTES,
            source=TEXT,
            target=TEXT,
            api_key=key,
            model=TEXT,
        )
        | {"additionalProperties": True},
        "TranslateFileResponse": _object("Address of a translated file.", ("translatedFileUrl",), translatedFileUrl=TEXT),
        "DetectRequest": _object("A text.", ("q",), q=TEXT, api_key=key) | {"additionalProperties": True},
        "DetectResponse": _described(_some(_ref("DetectedLanguage")), "The likeliest languages."),
        "DetectedLanguage": _object("", ("language", "confidence"), language=TEXT, confidence={"type": "number"}),
        "LanguagesResponse": _described(_some(_ref("TranslatedLanguage")), "Languages by code."),
        "TranslatedLanguage": _object("", ("code", "name", "targets"), code=TEXT, name=TEXT, targets=_some(TEXT)),
        "FrontendSettings": _described({"type": "object"}, "Settings of a page."),
        "HealthResponse": _object("", ("status",), status=TEXT),
    }
