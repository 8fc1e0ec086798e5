"""JSON schemas of KServe's kinds, from the models in its Python package, whose files are read and not run.

The package lists for each of its classes the fields, their names in YAML and their types, as the published API has them. What is
Kubernetes' own in there is checked by Kubernetes' schemas.
"""

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PLAIN: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "bool": {"type": "boolean"},
    "float": {"type": "number"},
    "object": {},
    # Quantities, which are strings or numbers.
    "ResourceQuantity": {"type": ["string", "number"]},
    "V1beta1MetricQuantity": {"type": ["string", "number"]},
}
KUBERNETES = "1.37"


def models_folder() -> Path:
    """Return where the package's models are; skip if it is not installed."""
    found = importlib.util.find_spec("kserve")
    if found is None or not found.submodule_search_locations:
        pytest.skip("KServe's package is not installed: make setup")
    return Path(found.submodule_search_locations[0]) / "models"


class Schemas:
    """Makes the schemas."""

    def __init__(self) -> None:
        """Read where classes are; none is read before it is asked for."""
        self._files = {}
        for path in models_folder().glob("*.py"):
            for name in re.findall(r"^class (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                self._files[name] = path

    def of(self, kind: str) -> dict[str, Any]:
        """Return the schema of objects of a class, strictly: what it does not list is an error."""
        definitions: dict[str, Any] = {}
        return {"$ref": f"#/$defs/{self._add(kind, definitions)}", "$defs": definitions}

    def _add(self, name: str, definitions: dict[str, Any]) -> str:
        if name in definitions:
            return name
        definitions[name] = {}
        if name in self._files:
            types, keys, needed = _fields(self._files[name])
            definitions[name] |= {
                "type": "object",
                "additionalProperties": False,
                "properties": {key: self._type(types[field], definitions) for field, key in keys.items()},
                "required": [keys[field] for field in needed],
            }
        else:
            definitions[name] |= _of_kubernetes(name, definitions)
        return name

    def _type(self, text: str, definitions: dict[str, Any]) -> dict[str, Any]:
        if text in PLAIN:
            return PLAIN[text]
        if found := re.fullmatch(r"list\[(.*)\]", text):
            return {"type": "array", "items": self._type(found[1], definitions)}
        if found := re.fullmatch(r"dict\(str, (.*)\)", text):
            return {"type": "object", "additionalProperties": self._type(found[1], definitions)}
        return {"$ref": f"#/$defs/{self._add(text, definitions)}"}


def _fields(path: Path) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return the types of a class's fields, their names in YAML, and those that must be there."""
    text = path.read_text(encoding="utf-8")
    tables = {
        target.id: ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("openapi_types", "attribute_map")
    }
    needed = re.findall(r"Invalid value for `(\w+)`, must not be `None`", text)
    return tables["openapi_types"], tables["attribute_map"], needed


@cache
def _kubernetes() -> dict[str, Any]:
    utils = pytest.importorskip("kubernetes_validate.utils", reason="kubernetes-validate is not installed: make setup")
    folder = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
    definitions: dict[str, Any] = utils.schema_contents(f"{folder}/_definitions.json", KUBERNETES)["$defs"]
    return definitions


def _of_kubernetes(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one of Kubernetes' own types, such as V1Container, and add what it refers to.

    A type that neither the package nor Kubernetes describes has no value that is right.
    """
    parts = re.fullmatch(r"(?:K8sIoApi\w+?)?(V\d+(?:(?:alpha|beta)\d+)?)(\w+)", name)
    candidates = [full for full in _kubernetes() if parts is not None and full.endswith(f".{parts[1].lower()}.{parts[2]}")]
    if len(candidates) != 1:
        return {"not": {}}
    (full,) = candidates
    waiting, added = [full], set()
    while waiting:
        current = waiting.pop()
        if current not in added:
            added.add(current)
            definitions[current] = _kubernetes()[current]
            waiting += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(definitions[current]))
    return {"$ref": f"#/$defs/{full}"}
