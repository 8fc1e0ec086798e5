"""The dashboard's rows about what the service runs on: models, processes, GPUs."""

from deploy.grafana.panels import Row, table, timeseries
from deploy.grafana.queries import EVERY, PLACE, metric, quantiles, rate


def models() -> Row:
    """What is loaded, and how does each do?"""
    p95 = f"histogram_quantile(0.95, {rate('e2e_request_latency_seconds_bucket', 'model, le')})"
    load = f"{metric('model_load_seconds_sum')} / {metric('model_load_seconds_count')}"
    panels = [
        table(
            "Loaded",
            "Models, where, and on what.",
            metric("model_info"),
            ("model", "version", "precision", "device", "namespace", "instance"),
        ),
        timeseries("Answers by model", "A second.", "reqps", {"{{model}}": rate("request_success_total")}),
        timeseries("Answer p95 by model", "Arrival to last token.", "s", {"{{model}}": p95}),
        timeseries(
            "Caches",
            "Memory of the caches: what they have, and what requests take of it; and what is kept of sources that wait for a slot.",
            "bytes",
            {
                "{{model}} encoded ahead": f"sum by (model) ({metric('encoded_ahead_bytes')})",
                "{{model}} reserved": f"sum by (model) ({metric('cache_reserved_bytes')})",
                "{{model}} used": f"sum by (model) ({metric('cache_used_bytes')})",
            },
        ),
        timeseries("Pairs scored", "Arrival to scores.", "s", quantiles("score_latency_seconds")),
        timeseries("Load", "Mean time to load a model and to warm it up.", "s", {"{{model}} {{instance}}": load}),
    ]
    return "Models", 3, panels


def versions() -> Row:
    """Which versions are there, who answers, and how do changes end?"""
    by = "model, version"
    panels = [
        table(
            "Versions of models",
            "Each that is known, with the part of its life that it is in; what is refused has a cause, and the log has the reason.",
            metric("version_state"),
            ("model", "version", "state", "cause", "namespace", "instance"),
        ),
        timeseries(
            "Requests by version",
            "Answered a second, and those that failed through the server's fault: what a canary gets, and how it does.",
            "reqps",
            {
                "{{model}} {{version}}": rate("version_requests_total", by, outcome="answered"),
                "{{model}} {{version}} failed": rate("version_requests_total", by, outcome="failed"),
            },
        ),
        timeseries(
            "Changes of versions",
            "In the last five minutes: done, refused before they answered anybody, or rolled back while on probation.",
            "none",
            {"{{model}} {{outcome}}": f"sum by (model, outcome) (increase({metric('version_swaps_total')}[5m]))"},
        ),
        timeseries(
            "Sleep",
            "In the last five minutes: models unloaded, by why, and loaded again because a request came, by how that went.",
            "none",
            {
                "{{model}} asleep: {{cause}}": f"sum by (model, cause) (increase({metric('model_sleeps_total')}[5m]))",
                "{{model}} awake: {{outcome}}": f"sum by (model, outcome) (increase({metric('model_wakes_total')}[5m]))",
            },
        ),
    ]
    return "Versions", 4, panels


def process() -> Row:
    """What do the processes take?"""
    ours = f"and on (namespace, job, instance) dragoman_build_info{{{PLACE}}}"
    rows, steps = (rate(f"engine_{what}_total", "model, replica, instance") for what in ("rows", "steps"))
    panels = [
        timeseries(
            "Processor",
            "Cores in use by engines and front ends.",
            "none",
            {
                "engine {{model}} {{replica}} {{instance}}": rate("engine_cpu_seconds_total", "model, replica, instance"),
                "front end {{instance}}": f"rate(process_cpu_seconds_total{{{PLACE}}}{EVERY}) {ours}",
                "front end {{front_end}} {{instance}}": rate("front_end_cpu_seconds_total", "front_end, instance", PLACE),
            },
        ),
        timeseries(
            "Memory",
            "Resident memory of engines and front ends.",
            "bytes",
            {
                "engine {{model}} {{replica}} {{instance}}": metric("engine_resident_memory_bytes"),
                "its caches {{model}} {{replica}} {{instance}}": metric("engine_cache_reserved_bytes"),
                "used of them {{model}} {{replica}} {{instance}}": metric("engine_cache_used_bytes"),
                "front end {{instance}}": f"process_resident_memory_bytes{{{PLACE}}} {ours}",
                "front end {{front_end}} {{instance}}": metric("front_end_resident_memory_bytes", PLACE),
            },
        ),
        timeseries(
            "Open files",
            "Files and sockets.",
            "none",
            {
                "engine {{model}} {{replica}} {{instance}}": metric("engine_open_fds"),
                "front end {{instance}}": f"process_open_fds{{{PLACE}}} {ours}",
                "front end {{front_end}} {{instance}}": metric("front_end_open_fds", PLACE),
            },
        ),
        timeseries(
            "Silence",
            "Time since each engine was last heard; it speaks once a second.",
            "s",
            {"{{model}} {{replica}} {{instance}}": metric("engine_silence_seconds")},
        ),
        timeseries(
            "Engines",
            "Those that take requests, of all that a model should have.",
            "none",
            {
                "{{model}} {{instance}} up": f"sum by (model, instance) ({metric('engine_up')})",
                "{{model}} {{instance}} all": f"count by (model, instance) ({metric('engine_up')})",
            },
        ),
        timeseries(
            "Slots by engine",
            "In use; alike where all of a model's engines are well.",
            "none",
            {"{{model}} {{replica}} {{instance}}": metric("engine_slots_in_use")},
        ),
        timeseries(
            "Rows a step by engine",
            "Decoded together, on the average.",
            "none",
            {"{{model}} {{replica}} {{instance}}": f"{rows} / {steps}"},
        ),
        timeseries(
            "Garbage collections",
            "Of Python in the front end, a second, by generation.",
            "none",
            {"{{generation}}": f"sum by (generation) (rate(python_gc_collections_total{{{PLACE}}}{EVERY}) {ours})"},
        ),
        table("Versions", "What runs where.", metric("build_info", PLACE), ("version", "namespace", "instance")),
    ]
    return "Processes", 3, panels


def front_ends() -> Row:
    """What do several front ends do? Empty where there is one."""
    panels = [
        timeseries(
            "Front ends",
            "Those that answer callers, of all there should be.",
            "none",
            {
                "{{instance}} up": f"sum by (instance) ({metric('front_end_up', PLACE)})",
                "{{instance}} all": f"count by (instance) ({metric('front_end_up', PLACE)})",
            },
        ),
        timeseries(
            "Requests by front end",
            "Ended a second; as connections are spread.",
            "reqps",
            {"{{front_end}} {{instance}}": rate("front_end_requests_total", "front_end, instance", PLACE)},
        ),
        timeseries(
            "Front ends started again",
            "In the last five minutes.",
            "none",
            {"{{front_end}} {{instance}}": f"increase(dragoman_front_end_restarts_total{{{PLACE}}}[5m])"},
        ),
    ]
    return "Front ends", 3, panels


def gpu() -> Row:
    """What do the GPUs do? Empty without one."""
    memory = {
        "{{device}} {{instance}} used": metric("gpu_memory_used_bytes", PLACE),
        "{{device}} {{instance}} all": metric("gpu_memory_total_bytes", PLACE),
    }
    panels = [
        timeseries(
            "GPU utilisation",
            "Share of the time in which a kernel ran.",
            "percentunit",
            {"{{device}} {{instance}}": metric("gpu_utilization_ratio", PLACE)},
            maximum=1,
        ),
        timeseries("GPU memory", "Of all processes on the device.", "bytes", memory),
        timeseries(
            "GPU memory, as planned",
            "How a model divided what was free when it was loaded.",
            "bytes",
            {"{{model}} {{part}} {{instance}}": metric("gpu_plan_bytes")},
            is_stacked=True,
        ),
        timeseries(
            "Steps without CUDA graphs",
            "1 where a capture has failed, so that steps are slower.",
            "none",
            {"{{model}} {{instance}}": metric("cuda_graphs_disabled")},
        ),
    ]
    return "GPU", 2, panels
