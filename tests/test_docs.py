"""The documents against the program."""

import ast
import importlib
import itertools
import re
import tomllib
from pathlib import Path

import pytest
from prometheus_client.registry import CollectorRegistry

from dragoman.model.training.config import TrainingConfig
from dragoman.server.config import ServerConfig
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.model_file import ModelFile
from dragoman.server.models.policy import wanted
from dragoman.server.service.callers_file import Limits
from dragoman.server.telemetry.metrics import Metrics
from dragoman.v1 import generation_pb2, repository_pb2

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("model/pretrained/*/README.md"))]


def table_rows(document: str) -> dict[str, list[str]]:
    """Rows whose first cell is code, by that code."""
    lines = (ROOT / "docs" / document).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def is_told(cell: str, default: object) -> bool:
    """Return whether a cell has a default, if that is a number, a text or a switch."""
    if isinstance(default, bool):
        return cell == str(default).lower()
    if isinstance(default, int | float):
        return float(cell) == default
    return not isinstance(default, str) or cell == default


def test_every_call_and_state_of_the_admin_service_is_described() -> None:
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    for method in repository_pb2.DESCRIPTOR.services_by_name["Repository"].methods:
        assert f"`{method.name}`" in text
    for state in list(dict(repository_pb2.VersionState.items()))[1:]:
        assert f"`{state.removeprefix('VERSION_STATE_').lower()}`" in text


def test_every_metric_is_described_as_it_is() -> None:
    rows = table_rows("metrics.md")
    registry = CollectorRegistry()
    labels = Metrics(registry).labels
    names = set()
    for metric in registry.collect():
        name = metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
        wanted = [metric.type, ", ".join(f"`{label}`" for label in labels[name]), metric.documentation]
        assert rows[name] == wanted, "run: make chart"
        names.add(name)
    assert {name for name in rows if name.startswith("dragoman_")} == names


def headings(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_files_and_python_examples_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = target.partition("#")
        if "://" in target:
            continue
        links.append(document.parent / path if path else document)
        assert not heading or heading in headings(links[-1]), target
    named = re.findall(r"`((?:server|model|export|client|protos|deploy|tests)/[\w./-]+\.\w+)`", text)
    assert [path for path in (*links, *(ROOT / name for name in named)) if not path.exists()] == []
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def model_file(text: str) -> ModelFile:
    return ModelFile.model_validate(tomllib.loads(text))


def test_every_field_of_a_models_file_is_described_with_its_default() -> None:
    rows = {name: row for name, row in table_rows("models.md").items() if "." in name}
    fields = {}
    for table, field in ModelFile.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {{"labels": "LABEL", "weights": "NAME"}.get(table, ""): None})
        fields |= {f"{table}.{name}": getattr(inner[name], "default", None) for name in inner}
    assert list(rows) == list(fields)
    for name, default in fields.items():
        is_of_server = name.startswith("settings.") and name.removeprefix("settings.") in ServerConfig.model_fields
        assert rows[name][0] == "the server's" if is_of_server else is_told(rows[name][0], default), name
    assert rows["versions.latest"][0] == str(ModelFile().versions.num_latest)


def test_every_key_of_the_file_of_callers_is_described() -> None:
    text = (ROOT / "docs/serve.md").read_text(encoding="utf-8").partition("## Callers and limits\n")[2].partition("\n## ")[0]
    described = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `")))
    assert Limits.model_fields.keys() <= set(described)


def test_examples_of_configurations_are_valid() -> None:
    (training,), models = (
        re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
        for name in ("bring-a-model.md", "models.md")
    )
    assert TrainingConfig.parse(tomllib.loads(training), "docs/bring-a-model.md").name == "en-de"
    assert [model_file(example).weights for example in models] == [{"canary": 0.1}]


def test_examples_of_the_policy_are_what_it_decides() -> None:
    lines = (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| versions | model.toml | served | requests that name no version |") + 2
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))
    assert len(rows) == 9
    for row in rows:
        there, text, served, shares = (cell.strip(" `") for cell in row.strip("|").split("|"))
        found = [FoundVersion(name, ROOT / name, (1, 1, 1)) for name in there.split()]
        answer = wanted(found, model_file(text.replace("; ", "\n")))
        assert [version.name for version in answer.versions] == served.split(), row
        said = {name: float(share) for name, share in (part.split(": ") for part in shares.split(", "))}
        assert answer.shares == pytest.approx(said), row


def test_every_field_of_the_api_is_described() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    messages = "GenerateRequest GenerateResponse Answer TokenLogProb GenerateBatchResponse GenerateBulkRequest"
    messages += " GenerateBulkResponse Error ScoreRequest ScoreResponse Alignment"
    for name in messages.split():
        fields = generation_pb2.DESCRIPTOR.message_types_by_name[name].fields
        assert [field.name for field in fields if f"`{field.name}`" not in text] == [], name


def test_every_threat_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/threat-model.md").read_text(encoding="utf-8")))
    there: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8")))
    assert named and named <= there, named - there


def test_benchmarks_are_run_by_names_that_exist() -> None:
    """In the documents, in what the benchmarks tell of themselves, and in the table of them all."""
    named = {f"benchmarks.{name}" for name in table_rows("benchmarks.md")}
    for path in [*DOCUMENTS, *(ROOT / "benchmarks").rglob("*.py")]:
        named |= set(re.findall(r"python -m (benchmarks(?:\.\w+)+)", path.read_text(encoding="utf-8")))
    assert named
    for name in named:
        path = ROOT / name.replace(".", "/")
        file = path.with_suffix(".py")
        is_program = file.is_file() and 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")
        assert is_program or (path / "__main__.py").is_file(), name
