"""Writes the OpenAPI document of what is answered over HTTP: messages and their comments from the contract, paths from here.

What is of the Open Inference Protocol is in `inference_paths.py`, and what is of LibreTranslate's API in `libretranslate_paths.py`.

    python protos/openapi.py [--check]

With `--check` nothing is written, and the exit code says whether the committed document is that of the contract.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import inference_paths
import libretranslate_paths
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
GENERATION, REPOSITORY = "dragoman/v1/generation.proto", "dragoman/v1/repository.proto"
OUTPUT = ROOT / "server" / "protocols" / "http" / "openapi.json"
SCHEMAS = "#/components/schemas"

# Numbers of fields within descriptors, of which paths to comments are made: a file's messages and enums, a message's fields, an
# enum's values.
MESSAGES, ENUMS, FIELDS, VALUES = 4, 5, 2, 2
Path_ = tuple[int, ...]
Schema = dict[str, Any]

# Below a model of the repository, what is asked of it.
OF_MODEL = "/v1/repository/models/{model}"
# Method, path, RPC, request and response.
REPOSITORY_OPERATIONS = (
    ("get", "/v1/repository", "ListRepository", "", "ListRepositoryResponse"),
    ("post", "/v1/repository:refresh", "RefreshRepository", "RefreshRepositoryRequest", "ListRepositoryResponse"),
    ("post", f"{OF_MODEL}:load", "LoadModel", "LoadModelRequest", "RepositoryModel"),
    ("post", f"{OF_MODEL}:unload", "UnloadModel", "UnloadModelRequest", "RepositoryModel"),
    ("post", f"{OF_MODEL}:reload", "ReloadModel", "ReloadModelRequest", "RepositoryModel"),
    ("post", f"{OF_MODEL}:rollback", "RollbackModel", "RollbackModelRequest", "RepositoryModel"),
    ("post", f"{OF_MODEL}:label", "SetLabel", "SetLabelRequest", "RepositoryModel"),
)
FOR_OPERATORS = "For operators, where `http_admin` is set; it is not there where it is not."
OPERATIONS = (
    ("post", "/v1/generate", "Generate", "GenerateRequest", "GenerateResponse"),
    ("post", "/v1/generate:stream", "GenerateStream", "GenerateRequest", "GenerateStreamResponse"),
    ("post", "/v1/score", "Score", "ScoreRequest", "ScoreResponse"),
    ("get", "/v1/models", "ListModels", "", "ListModelsResponse"),
    ("get", "/v1/models/{model}", "GetModel", "", "Model"),
)
ERRORS = {
    "400": "A field is missing, malformed or over its limit; the message begins with its name.",
    "401": "No token, or one that this server does not know.",
    "404": "No such model or version, or nothing is at this path.",
    "405": "The path is there, but not for this method.",
    "408": "The body did not come in time.",
    "413": "The body is larger than `max_message_bytes` of the server.",
    "415": "The body is not `application/json`, or compressed otherwise than by gzip or deflate.",
    "429": "The queue is full, or a limit of the caller's is reached; `Retry-After` says when to come back.",
    "500": "The server's fault; the message quotes an incident that its log has.",
    "503": "Draining, or the model is starting; `Retry-After` says when to come back.",
    "504": "The deadline passed, or is sure to pass.",
}
HEADERS = (
    ("X-Request-Id", "Id of the request, where the body has none: 128 printable ASCII characters at the most.", {"maxLength": 128}),
    (
        "Grpc-Timeout",
        "Time until the caller's deadline: digits and a unit, of H, M, S, m, u and n.",
        {"pattern": "^[0-9]{1,8}[HMSmun]$"},
    ),
    ("traceparent", "W3C Trace Context: the caller's span.", {}),
)


class Contract:
    """A file of the contract as protoc reads it, with its comments."""

    def __init__(self, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "set"
            options = [f"--proto_path={ROOT / 'protos'}", f"--proto_path={files('grpc_tools') / '_proto'}"]
            options += ["--include_source_info", f"--descriptor_set_out={path}"]
            if protoc.main(["protoc", *options, name]):
                raise SystemExit("the contract cannot be read")
            self.file: FileDescriptorProto = FileDescriptorSet.FromString(path.read_bytes()).file[0]
        self.name = name
        self._comments = {tuple(where.path): where.leading_comments for where in self.file.source_code_info.location}

    def comment(self, *path: int) -> str:
        """Return the comment before something, its lines joined."""
        paragraphs = self._comments.get(path, "").split("\n\n")
        return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())

    def rpc_comment(self, name: str) -> str:
        """Return the comment before an RPC of the first service."""
        names = [method.name for method in self.file.service[0].method]
        return self.comment(6, 0, 2, names.index(name))

    def schemas(self) -> Iterator[tuple[str, Schema]]:
        """Yield a schema for each message and enum but those that only streams of messages have."""
        for i, enum in enumerate(self.file.enum_type):
            yield enum.name, self._enum(enum, (ENUMS, i))
        for i, message in enumerate(self.file.message_type):
            yield message.name, self._message(message, (MESSAGES, i))

    def _enum(self, enum: EnumDescriptorProto, path: Path_) -> Schema:
        said = [f"- `{value.name}`: {comment}" for i, value in enumerate(enum.value) if (comment := self.comment(*path, VALUES, i))]
        return _described({"type": "string", "enum": [value.name for value in enum.value]}, "\n".join(said))

    def _message(self, message: DescriptorProto, path: Path_) -> Schema:
        entries = {f".dragoman.v1.{message.name}.{entry.name}": entry for entry in message.nested_type if entry.options.map_entry}
        properties = {
            field.json_name: _described(_field(field, entries.get(field.type_name)), self.comment(*path, FIELDS, i))
            for i, field in enumerate(message.field)
        }
        schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return _described(schema, self.comment(*path))


def _described(schema: Schema, text: str) -> Schema:
    return schema | ({"description": text} if text else {})


def _field(field: FieldDescriptorProto, entry: DescriptorProto | None = None) -> Schema:
    """Return the schema of a field, as canonical JSON has it; a map's entries are a message."""
    if entry is not None:
        return {"type": "object", "additionalProperties": _one(entry.field[1])}
    one = _one(field)
    return {"type": "array", "items": one} if field.label == FieldDescriptorProto.LABEL_REPEATED else one


def _one(field: FieldDescriptorProto) -> Schema:
    kind, kinds = field.type, FieldDescriptorProto
    name = field.type_name.removeprefix(".dragoman.v1.")
    plain: dict[int, Schema] = {
        kinds.TYPE_STRING: {"type": "string"},
        kinds.TYPE_BOOL: {"type": "boolean"},
        kinds.TYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
        kinds.TYPE_INT32: {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
        kinds.TYPE_UINT64: {"type": "string", "format": "uint64", "pattern": "^[0-9]{1,20}$"},
        kinds.TYPE_FLOAT: {"type": "number", "format": "float"},
        kinds.TYPE_DOUBLE: {"type": "number", "format": "double"},
        kinds.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    }
    if kind in plain:
        return plain[kind]
    return {"type": "object"} if name.startswith(".google") else {"$ref": f"{SCHEMAS}/{name}"}


def operation(contract: Contract, rpc: str, request: str, response: str) -> Schema:
    """Return what one method of one path is."""
    is_stream = rpc.endswith("Stream")
    comment = contract.rpc_comment(rpc)
    content: Schema = {"application/json": {"schema": {"$ref": f"{SCHEMAS}/{response}"}}}
    if is_stream:
        text = f"Server-sent events: `data` of each is a {response}; one named `error`, with a Status, ends a stream that fails."
        content = {"text/event-stream": {"schema": {"type": "string", "description": text}}}
    told: Schema = {
        "operationId": rpc,
        "summary": comment.partition(". ")[0].rstrip("."),
        "description": comment,
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name, *_ in HEADERS],
        "responses": {"200": {"description": "OK", "content": content}}
        | {
            status: {"$ref": f"#/components/responses/{status}"}
            for status in ERRORS
            if request or status not in ("408", "413", "415")
        },
        "security": [{}, {"bearer": []}],
    }
    if request:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"$ref": f"{SCHEMAS}/{request}"}}}}
    model: Schema = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    if rpc == "GetModel":
        told["parameters"] = [model, {"name": "modelVersion", "in": "query", "schema": {"type": "string"}}, *told["parameters"]]
    elif rpc == "ListRepository":
        told["parameters"] = [model | {"in": "query", "required": False}, *told["parameters"]]
    elif response == "RepositoryModel":
        told["parameters"] = [model, *told["parameters"]]
    if contract.name == REPOSITORY:
        told |= {"description": f"{comment} {FOR_OPERATORS}", "security": [{"bearer": []}]}
    return told


def reachable(schemas: dict[str, Schema], names: set[str]) -> dict[str, Schema]:
    """Return the schemas that some need, themselves among them."""
    found: set[str] = set()
    while names:
        name = names.pop()
        found.add(name)
        names |= {other for other in schemas if f'"{SCHEMAS}/{other}"' in json.dumps(schemas[name])} - found
    return {name: schema for name, schema in schemas.items() if name in found}


def document() -> Schema:
    """Return the whole document."""
    contract, repository = Contract(GENERATION), Contract(REPOSITORY)
    paths: dict[str, Schema] = {}
    for of, operations in ((contract, OPERATIONS), (repository, REPOSITORY_OPERATIONS)):
        for method, path, rpc, request, response in operations:
            paths.setdefault(path, {})[method] = operation(of, rpc, request, response)
    used = {name for *_, request, response in (*OPERATIONS, *REPOSITORY_OPERATIONS) for name in (request, response) if name}
    status = {
        "type": "object",
        "description": "google.rpc.Status: why a request failed.",
        "properties": {
            "code": {"type": "integer", "description": "Number of the gRPC status, for example 8 for RESOURCE_EXHAUSTED."},
            "message": {"type": "string", "description": "What went wrong, in English; for people, so its wording may change."},
            "details": {"type": "array", "items": {"type": "object"}, "description": "google.rpc.RetryInfo and RequestInfo."},
        },
        "required": ["code", "message"],
    }
    error = {"application/json": {"schema": {"$ref": f"{SCHEMAS}/Status"}}}
    headers = [{"$ref": f"#/components/parameters/{name}"} for name, *_ in HEADERS]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dragoman", "version": "1", "description": contract.comment(12)},
        "paths": paths | inference_paths.paths(headers) | libretranslate_paths.paths(headers),
        "components": {
            "schemas": reachable(dict(contract.schemas()) | dict(repository.schemas()), used)
            | {"Status": status}
            | inference_paths.schemas()
            | libretranslate_paths.schemas(),
            "parameters": {
                name: {"name": name, "in": "header", "description": text, "schema": {"type": "string"} | more}
                for name, text, more in HEADERS
            },
            "responses": {number: {"description": text, "content": error} for number, text in ERRORS.items()}
            | inference_paths.responses(ERRORS),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def main() -> None:
    """Write the document, or compare it."""
    text = json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
    if "--check" not in sys.argv[1:]:
        OUTPUT.write_text(text, encoding="utf-8")
    elif OUTPUT.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{OUTPUT.name} is out of date: run make protos")


if __name__ == "__main__":
    main()
