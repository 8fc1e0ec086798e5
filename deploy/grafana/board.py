"""The dashboard: rows in order, and what can be chosen at its top."""

from typing import Any

from deploy.grafana import callers, machine, service
from deploy.grafana.panels import Row


def rows() -> list[Row]:
    """Return the rows in order."""
    return [
        service.overview(),
        service.latency(),
        service.throughput(),
        service.batching(),
        service.queue(),
        service.errors(),
        callers.callers(),
        machine.models(),
        machine.versions(),
        machine.process(),
        machine.front_ends(),
        machine.gpu(),
    ]


def variables() -> list[dict[str, Any]]:
    """Return what can be chosen at the top."""
    chosen: list[dict[str, Any]] = [
        {
            "type": "datasource",
            "name": "datasource",
            "label": "Data source",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "refresh": 1,
        }
    ]
    for name, source in (("namespace", "build_info"), ("model", "model_info"), ("instance", "build_info")):
        narrower = "" if name == "namespace" else '{namespace=~"$namespace"}'
        query = f"label_values(dragoman_{source}{narrower}, {name})"
        chosen.append(
            {
                "type": "query",
                "name": name,
                "label": name.capitalize(),
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "definition": query,
                "query": {"query": query, "refId": f"variable-{name}"},
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
                "hide": 0,
            }
        )
    return chosen
