"""Grafana's panels as Python: each function returns the JSON of one, without its place and number, which `board.py` gives it."""

from collections.abc import Mapping, Sequence
from typing import Any

Panel = dict[str, Any]
Row = tuple[str, int, Sequence[Panel]]
"""Title, panels beside each other, panels."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"


def timeseries(
    title: str,
    text: str,
    unit: str,
    queries: Mapping[str, str],
    *,
    is_stacked: bool = False,
    maximum: float | None = None,
    limit: float | None = None,
) -> Panel:
    """Return lines over time.

    Args:
        title: Above the panel.
        text: What it shows and how to read it.
        unit: Grafana's name of the unit.
        queries: PromQL by legend.
        is_stacked: Whether lines lie on top of each other.
        maximum: Upper end of the axis; as the data demand if None.
        limit: Where a dashed red line is drawn.
    """
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "fillOpacity": 30 if is_stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "off" if limit is None else "dashed"},
    }
    defaults: dict[str, Any] = {"unit": unit, "min": 0, "color": {"mode": "palette-classic"}, "custom": custom}
    if maximum is not None:
        defaults["max"] = maximum
    if limit is not None:
        defaults["thresholds"] = _thresholds((RED, limit))
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel("timeseries", title, text, defaults, options, _targets(queries))


def heatmap(title: str, text: str, unit: str, query: str) -> Panel:
    """Return a histogram over time, counts a bucket as colours; the query must give increases by `le`."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange", "reverse": False},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
    }
    (target,) = _targets({"{{le}}": query})
    return _panel("heatmap", title, text, {}, options, [target | {"format": "heatmap"}])


def tile(
    title: str, text: str, unit: str, query: str, *steps: tuple[str, float], base: str = GREEN, decimals: int | None = None
) -> Panel:
    """Return one figure on a coloured ground; from each step's value on, its colour holds."""
    defaults: dict[str, Any] = {"unit": unit, "color": {"mode": "thresholds"}, "thresholds": _thresholds(*steps, base=base)}
    if decimals is not None:
        defaults["decimals"] = decimals
    options = {
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
        "wideLayout": True,
    }
    (target,) = _targets({"": query})
    return _panel("stat", title, text, defaults, options, [target | {"instant": True, "range": False}])


def table(title: str, text: str, query: str, columns: Sequence[str]) -> Panel:
    """Return the labels of an info metric as a table."""
    hidden = ("Time", "Value", "__name__")
    (target,) = _targets({"": query})
    panel = _panel(
        "table",
        title,
        text,
        {},
        {"showHeader": True, "cellHeight": "sm"},
        [target | {"format": "table", "instant": True, "range": False}],
    )
    organize = {"excludeByName": dict.fromkeys(hidden, True), "indexByName": {name: i for i, name in enumerate(columns)}}
    return panel | {"transformations": [{"id": "organize", "options": organize | {"renameByName": {}}}]}


def _panel(
    kind: str, title: str, text: str, defaults: dict[str, Any], options: dict[str, Any], targets: list[dict[str, Any]]
) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _targets(queries: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + i),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query,
            "legendFormat": legend,
            "range": True,
        }
        for i, (legend, query) in enumerate(queries.items())
    ]


def _thresholds(*steps: tuple[str, float], base: str = GREEN) -> dict[str, Any]:
    rising = [{"color": base, "value": None}, *({"color": color, "value": value} for color, value in steps)]
    return {"mode": "absolute", "steps": rising}
