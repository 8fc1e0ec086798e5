"""The dashboard's rows about the service: promises, latency, throughput, batching, queue, errors."""

from deploy.grafana.objectives import AVAILABILITY, FIRST_TOKEN_SECONDS, LATENCY, LATENCY_SECONDS, SERVER_ERRORS
from deploy.grafana.panels import GREEN, RED, YELLOW, Row, heatmap, tile, timeseries
from deploy.grafana.queries import KNOWN, buckets, mean, metric, quantiles, rate, share_available, share_within


def overview() -> Row:
    """Are promises kept, and how much is going on?"""
    panels = [
        tile(
            "Availability",
            f"Requests without an error of the server's, over the time shown. Objective: {AVAILABILITY:.1%}.",
            "percentunit",
            share_available(),
            (YELLOW, AVAILABILITY),
            (GREEN, (1 + AVAILABILITY) / 2),
            base=RED,
            decimals=3,
        ),
        tile(
            f"Answers within {LATENCY_SECONDS:g} s",
            f"Arrival to last token, over the time shown. Objective: {LATENCY:.0%}.",
            "percentunit",
            share_within("e2e_request_latency_seconds", LATENCY_SECONDS),
            (YELLOW, LATENCY),
            (GREEN, (1 + LATENCY) / 2),
            base=RED,
            decimals=2,
        ),
        tile(
            f"First token within {FIRST_TOKEN_SECONDS:g} s",
            "Arrival to first token, over the time shown.",
            "percentunit",
            share_within("time_to_first_token_seconds", FIRST_TOKEN_SECONDS),
            (YELLOW, 0.95),
            (GREEN, 0.99),
            base=RED,
            decimals=2,
        ),
        tile(
            "Error budget left",
            "Of the errors that the objective allows for the time shown; below zero it is overdrawn.",
            "percentunit",
            f"1 - (1 - {share_available()}) / {1 - AVAILABILITY:.4g}",
            (YELLOW, 0),
            (GREEN, 0.5),
            base=RED,
            decimals=0,
        ),
        tile("Answers", "Requests answered a second.", "reqps", f"sum({rate('request_success_total')})"),
        tile(
            "Queue",
            "Longest wait for a slot that is to be expected now.",
            "s",
            f"max({metric('estimated_queue_seconds')})",
            (YELLOW, 1),
            (RED, 5),
        ),
        tile(
            "Slots in use",
            "All replicas together.",
            "percentunit",
            f"sum({metric('slots_in_use')}) / sum({metric('slots')})",
            (YELLOW, 0.8),
            (RED, 0.95),
            decimals=0,
        ),
        tile("Models not ready", "On any replica.", "none", f"sum(1 - {metric('model_ready')})", (RED, 1)),
    ]
    return "Overview", 8, panels


def latency() -> Row:
    """How long do answers take, and where does the time go?"""
    parts = {
        "queue": "request_queue_time_seconds",
        "prefill": "request_prefill_time_seconds",
        "decode": "request_decode_time_seconds",
    }
    where = {legend: f"{rate(f'{name}_sum', 'namespace')} / {rate(f'{name}_count', 'namespace')}" for legend, name in parts.items()}
    panels = [
        timeseries("Answer", "Arrival to last token.", "s", quantiles("e2e_request_latency_seconds"), limit=LATENCY_SECONDS),
        timeseries(
            "First token", "Arrival to first token.", "s", quantiles("time_to_first_token_seconds"), limit=FIRST_TOKEN_SECONDS
        ),
        timeseries("Between tokens", "Mean of each request's longest answer.", "s", quantiles("inter_token_latency_seconds")),
        heatmap("Answers by time", "How many answers took how long.", "s", buckets("e2e_request_latency_seconds")),
        heatmap("First tokens by time", "How many first tokens took how long.", "s", buckets("time_to_first_token_seconds")),
        timeseries(
            "Where the time goes", "Means of waiting, of the encoder's pass and of the decode steps.", "s", where, is_stacked=True
        ),
    ]
    return "Latency", 3, panels


def throughput() -> Row:
    """How much is done?"""
    ends = {
        "{{finish_reason}}": rate("request_success_total", "finish_reason"),
        "failed": f"sum({rate('requests_failed_total')})",
    }
    tokens = {
        "source": f"sum({rate('prompt_tokens_total')})",
        "generated": f"sum({rate('generation_tokens_total')})",
        "scored": f"sum({rate('score_tokens_total')})",
    }
    lengths = {
        "source p95": f"histogram_quantile(0.95, {rate('request_prompt_tokens_bucket', 'le')})",
        "generated p95": f"histogram_quantile(0.95, {rate('request_generation_tokens_bucket', 'le')})",
        "source mean": f"sum({rate('request_prompt_tokens_sum')}) / sum({rate('request_prompt_tokens_count')})",
        "generated mean": f"sum({rate('request_generation_tokens_sum')}) / sum({rate('request_generation_tokens_count')})",
    }
    panels = [
        timeseries("Requests by end", "A second.", "reqps", ends, is_stacked=True),
        timeseries("Tokens", "A second, counted when a request ends.", "suffix: tok/s", tokens),
        timeseries("Lengths", "Tokens of sources and of answers.", "suffix: tok", lengths),
    ]
    return "Throughput", 3, panels


def batching() -> Row:
    """How well are steps filled?"""
    padding = f"1 - {rate('encoder_tokens_total')} / {rate('encoder_padded_tokens_total')}"
    panels = [
        timeseries(
            "Rows a step",
            "Mean of the decode batch. Larger is cheaper, until steps take longer.",
            "none",
            {"{{model}}": mean("step_batch_size")},
        ),
        timeseries("Decode step", "How long a step takes, search included.", "s", quantiles("step_duration_seconds")),
        heatmap("Steps by rows", "How many steps had how many rows.", "none", buckets("step_batch_size")),
        timeseries(
            "Prefill",
            "How long encoding the sources of a step takes; running requests wait meanwhile.",
            "s",
            quantiles("prefill_duration_seconds"),
        ),
        timeseries("Sources a prefill", "Mean of the encoder's batch.", "none", {"{{model}}": mean("prefill_batch_size")}),
        timeseries("Padding", "Share of what the encoder computed for nothing.", "percentunit", {"{{model}}": padding}, maximum=1),
    ]
    return "Batching", 3, panels


def queue() -> Row:
    """Who waits, and how full is it?"""
    panels = [
        timeseries(
            "Running and waiting",
            "Requests in slots, and not yet; of these, whose sources have been encoded already.",
            "none",
            {
                "running": f"sum({metric('num_requests_running')})",
                "waiting": f"sum({metric('num_requests_waiting')})",
                "encoded ahead": f"sum({metric('requests_encoded_ahead')})",
            },
        ),
        timeseries(
            "Wait to be expected",
            "For a slot, if a request comes now.",
            "s",
            {"{{model}} {{instance}}": f"max by (model, instance) ({metric('estimated_queue_seconds')})"},
        ),
        timeseries(
            "Source tokens waiting",
            "What the encoder has before it.",
            "suffix: tok",
            {"{{model}}": f"sum by (model) ({metric('num_tokens_waiting')})"},
        ),
        timeseries(
            "Slots",
            "Rows of the decode batch in use, and all of them.",
            "none",
            {"in use": f"sum({metric('slots_in_use')})", "all": f"sum({metric('slots')})"},
        ),
        timeseries(
            "Admitted and turned away",
            "Requests that got slots, and refusals by cause, a second.",
            "reqps",
            {"admitted": f"sum({rate('requests_admitted_total')})", "{{reason}}": rate("requests_rejected_total", "reason")},
        ),
        timeseries(
            "Waiting time", "Arrival to slot, of requests that were answered.", "s", quantiles("request_queue_time_seconds")
        ),
    ]
    return "Queue and admission", 3, panels


def errors() -> Row:
    """What goes wrong?"""
    failed = rate("requests_failed_total", labels=KNOWN, code__re=SERVER_ERRORS)
    share = f"{failed} / ({rate('request_success_total')} + {failed})"
    panels = [
        timeseries(
            "Failures by status",
            "A second; those of no model are under an empty name.",
            "reqps",
            {"{{code}}": rate("requests_failed_total", "code")},
        ),
        timeseries(
            "Share of the server's errors",
            f"{SERVER_ERRORS.replace('|', ', ')}.",
            "percentunit",
            {"{{model}}": share},
            limit=1 - AVAILABILITY,
        ),
        timeseries(
            "Engine restarts",
            "In the last quarter of an hour.",
            "none",
            {"{{model}} {{instance}}": f"sum by (model, instance) (increase({metric('engine_restarts_total')}[15m]))"},
        ),
    ]
    return "Errors", 3, panels
