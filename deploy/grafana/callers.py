"""The dashboard's row about callers and about files that change: who uses how much, who is refused, what is not in use."""

from deploy.grafana.panels import Row, timeseries
from deploy.grafana.queries import PLACE, metric, rate


def callers() -> Row:
    """Who calls, and which limits hold?"""
    panels = [
        timeseries(
            "Requests by caller", "A second, let in.", "reqps", {"{{caller}}": rate("caller_requests_total", "caller", PLACE)}
        ),
        timeseries(
            "Refusals by limit",
            "A second, by the caller's own limits.",
            "reqps",
            {"{{caller}} {{limit}}": rate("caller_refusals_total", "caller, limit", PLACE)},
        ),
        timeseries(
            "Tokens by caller",
            "A second, read and generated.",
            "none",
            {"{{caller}} {{kind}}": rate("caller_tokens_total", "caller, kind", PLACE)},
        ),
        timeseries(
            "Under way by caller",
            "Requests, waiting ones among them.",
            "none",
            {"{{caller}}": f"sum by (caller) ({metric('caller_requests_running', PLACE)})"},
        ),
        timeseries(
            "Files that change",
            "Times they were read again in the last quarter of an hour; 1 while one cannot be used.",
            "none",
            {
                "{{source}} {{result}}": f"sum by (source, result) (increase({metric('reloads_total', PLACE)}[15m]))",
                "{{source}} not in use": f"max by (source) ({metric('reload_stale', PLACE)})",
            },
        ),
        timeseries(
            "Certificate",
            "Days until the first one expires.",
            "none",
            {"days left": f"min({metric('tls_certificate_days_left', PLACE)})"},
        ),
    ]
    return "Callers", 3, panels
