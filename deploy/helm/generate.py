"""Update what repeats the settings: the schema of the chart's values, and the tables of settings and values.

Run `python deploy/helm/generate.py` after a change of `server/config.py` or of the chart's values; with `--check` it only reports
stale files.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/dragoman"
SCHEMA = CHART / "values.schema.json"
# Settings that the chart derives from other values.
MANAGED = frozenset(
    {
        *("models", "model_files", "require_signatures", "port", "http_port", "metrics_port", "drain_seconds", "weights_cache"),
        *("tls_certificate", "tls_key", "tls_client_ca", "auth_tokens_file"),
        *("metrics_token_file", "metrics_tls_certificate", "metrics_tls_key"),
    }
)
KEYWORDS = (
    *("type", "enum", "const", "pattern", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of each setting that `config` may hold, by name."""
    from dragoman.server.config import GONE, ServerConfig

    schema = ServerConfig.model_json_schema()
    fields = {name: _plain(field, schema.get("$defs", {})) for name, field in schema["properties"].items() if name not in MANAGED}
    return fields | {name: {"const": f"removed: {reason}"} for name, reason in GONE.items()}


def model_file_schema() -> dict[str, Any]:
    """Return the JSON schema of what `models.files` may say of a model; null takes something away."""
    from dragoman.server.models.model_file import ModelFile

    schema = ModelFile.model_json_schema()
    tables: dict[str, dict[str, Any]] = {}
    for name, field in schema["properties"].items():
        table = schema["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field
        tables[name] = {"type": ["object", "null"]}
        if "properties" in table:
            fields = {key: _plain(value, schema["$defs"]) for key, value in table["properties"].items()}
            tables[name] |= {"additionalProperties": False, "properties": fields}
        else:
            # Such as labels, whose names anybody may choose.
            ((pattern, value),) = table["patternProperties"].items()
            tables[name] |= {"propertyNames": {"pattern": pattern}, "additionalProperties": _plain(value, {})}
    return {"type": ["object", "null"], "additionalProperties": False, "properties": tables}


def _plain(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a setting's schema with the words that the values need, null included: it takes a value of the chart away."""
    if "$ref" in field:
        field = definitions[field["$ref"].rpartition("/")[2]] | field
    branches = [branch for branch in field.get("anyOf", [field]) if branch.get("type") != "null"]
    if len(branches) != 1:
        raise SystemExit(f"generate.py: {field}: more than one type; say here how the chart shall have it")
    plain = {key: value for key, value in branches[0].items() if key in KEYWORDS}
    if plain.get("type") == "array":
        plain["items"] = {key: value for key, value in branches[0]["items"].items() if key in KEYWORDS}
    if "enum" in plain:
        plain["enum"] = [*plain["enum"], None]
    if "type" in plain:
        plain["type"] = [plain["type"], "null"]
    return plain | ({"description": field["description"]} if "description" in field else {})


def schema_text() -> str:
    """Return the values' schema with the settings of the server and of models as they are."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["config"]["properties"] = settings_schema()
    files = schema["properties"]["models"]["properties"]["files"]
    schema["properties"]["models"]["properties"]["files"] = files | {"additionalProperties": model_file_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def settings_rows() -> Iterator[tuple[str, str, str]]:
    """Yield each setting of the server: name, default, description."""
    from dragoman.server.config import ServerConfig

    for name, field in ServerConfig.model_fields.items():
        if field.is_required():
            default = "required"
        elif field.default_factory is not None:
            default = "`host`"
        else:
            default = "" if field.default in (None, ()) else _number(field.default)
        yield name, default, str(field.description)


def _number(value: object) -> str:
    """Return a default as it is written in a configuration file."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def values_rows(schema: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each value of the chart: name, default, description."""
    return _rows(schema, yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")), "")


def _rows(schema: dict[str, Any], values: Any, path: str) -> Iterator[tuple[str, str, str]]:
    for name, field in schema["properties"].items():
        full = f"{path}{name}"
        if full == "global" or "const" in field:
            continue
        inner = [each for each in field.get("properties", {}).values() if "const" not in each]
        if full != "config" and inner and all("description" in each for each in inner):
            yield from _rows(field, values[name], f"{full}.")
        else:
            yield full, _cell(values[name]), field["description"]


def _cell(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return f"`{text}`" if text and len(text) <= 60 else "" if not text else "see `values.yaml`"


def document_text(document: Path, what: str, rows: Iterator[tuple[str, str, str]]) -> str:
    """Return a document with the rows in its table, which stands between two marks."""
    begin, end = f"<!-- {what}s: begin -->\n", f"<!-- {what}s: end -->\n"
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise SystemExit(f"generate.py: {document}: the marks of the table are missing")
    lines = [f"| {what} | default | |", "|---|---|---|", *(f"| `{name}` | {default} | {text} |" for name, default, text in rows)]
    return "\n".join([f"{before}{begin}", *lines, f"\n{end}{after}"])


def wanted() -> dict[Path, str]:
    """Return what each generated file must hold."""
    text = schema_text()
    values, settings = CHART / "README.md", ROOT / "docs/settings.md"
    return {
        SCHEMA: text,
        values: document_text(values, "value", values_rows(json.loads(text))),
        settings: document_text(settings, "setting", settings_rows()),
    }


def main(arguments: list[str]) -> int:
    """Write stale files, or with `--check` report them; return the exit code."""
    stale = {path: text for path, text in wanted().items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is stale' if '--check' in arguments else 'brought up to date'}")
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
