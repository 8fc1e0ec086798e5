"""The pieces that the dashboard's queries are made of."""

from deploy.grafana.objectives import SERVER_ERRORS

PLACE = 'namespace=~"$namespace",instance=~"$instance"'
MODEL = f'{PLACE},model=~"$model"'
KNOWN = f'{MODEL},model!=""'
EVERY = "[$__rate_interval]"


def metric(name: str, labels: str = MODEL, **more: str) -> str:
    """Return a selector of one of our metrics; `code__re="A|B"` matches a pattern."""
    extra = "".join(f',{key.removesuffix("__re")}{"=~" if key.endswith("__re") else "="}"{value}"' for key, value in more.items())
    return f"dragoman_{name}{{{labels}{extra}}}"


def rate(name: str, by: str = "model", labels: str = MODEL, **more: str) -> str:
    """Return a counter's growth a second."""
    return f"sum by ({by}) (rate({metric(name, labels, **more)}{EVERY}))"


def mean(name: str) -> str:
    """Return the mean of what a histogram observed lately, by model."""
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


def quantiles(name: str) -> dict[str, str]:
    """Return percentiles of a histogram over all models, by legend."""
    return {f"p{round(100 * share)}": f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})" for share in (0.5, 0.95, 0.99)}


def buckets(name: str) -> str:
    """Return what a heatmap shows."""
    return f"sum by (le) (increase({metric(f'{name}_bucket')}{EVERY}))"


def share_within(name: str, seconds: float) -> str:
    """Return the share of what a histogram observed over the time shown that was no longer than an edge."""
    return (
        f"sum(increase({metric(f'{name}_bucket', le=str(seconds))}[$__range])) / sum(increase({metric(f'{name}_count')}[$__range]))"
    )


def share_available() -> str:
    """Return the share of requests without an error of the server's, over the time shown."""
    answered = f"sum(increase({metric('request_success_total')}[$__range]))"
    failed = f"sum(increase({metric('requests_failed_total', KNOWN, code__re=SERVER_ERRORS)}[$__range]))"
    return f"{answered} / ({answered} + {failed})"
