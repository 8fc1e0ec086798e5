"""Routes of the Gateway API: to this release, and to a canary beside it."""

from collections.abc import Callable
from typing import Any

import pytest

Render = Callable[..., Any]
GATEWAY = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
GENERATION = "dragoman.v1.Generation"
TESTERS = {"headers": [{"name": "dragoman-canary", "value": "yes"}]}
CANARY = [
    {"matches": [TESTERS], "backends": [{"name": "dragoman-canary"}]},
    {"backends": [{"weight": 95}, {"name": "dragoman-canary", "weight": 5}]},
]


def rules(render: Render, kind: str = "GRPCRoute", **route: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = render({"grpcRoute": GATEWAY | {"kind": kind} | route}).one(kind)["spec"]["rules"]
    return found


def test_without_rules_everything_goes_to_this_release(render: Render) -> None:
    for kind in ("GRPCRoute", "HTTPRoute"):
        assert rules(render, kind) == [{"backendRefs": [{"name": "dragoman", "port": 8500}]}]


def test_a_canary_gets_its_share_and_who_asks_for_it(render: Render) -> None:
    asked, shared = rules(render, rules=CANARY)
    assert asked["matches"] == [TESTERS]
    assert asked["backendRefs"] == [{"name": "dragoman-canary", "port": 8500}]
    assert shared == {
        "backendRefs": [
            {"name": "dragoman", "port": 8500, "weight": 95},
            {"name": "dragoman-canary", "port": 8500, "weight": 5},
        ]
    }


def test_backends_are_services_that_two_releases_have_with_ports_that_those_have(render: Render) -> None:
    services = {
        service["metadata"]["name"]: {port["port"] for port in service["spec"]["ports"]}
        for release in ("dragoman", "dragoman-canary")
        for service in render(release=release).all("Service")
    }
    backends = [backend for rule in rules(render, rules=CANARY) for backend in rule["backendRefs"]]
    assert {backend["name"] for backend in backends} == {"dragoman", "dragoman-canary"}
    assert all(backend["port"] in services[backend["name"]] for backend in backends)


def test_a_weight_of_nothing_is_said(render: Render) -> None:
    """One that is left out would be 1."""
    [rule] = rules(render, rules=[{"backends": [{"weight": 0}, {"name": "other", "namespace": "beside", "port": 9000}]}])
    assert rule["backendRefs"] == [
        {"name": "dragoman", "port": 8500, "weight": 0},
        {"name": "other", "namespace": "beside", "port": 9000},
    ]


def test_filters_go_along_as_they_are(render: Render) -> None:
    mirror = {"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "dragoman-canary", "port": 8500}}}
    assert rules(render, rules=[{"filters": [mirror]}]) == [
        {"filters": [mirror], "backendRefs": [{"name": "dragoman", "port": 8500}]}
    ]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ({"service": GENERATION}, {"type": "PathPrefix", "value": f"/{GENERATION}"}),
        ({"service": GENERATION, "method": "Score"}, {"type": "Exact", "value": f"/{GENERATION}/Score"}),
    ],
)
def test_a_method_is_matched_by_either_kind(render: Render, method: dict[str, str], path: dict[str, str]) -> None:
    given = [{"matches": [{"method": method} | TESTERS]}]
    [grpc], [http] = (rules(render, kind, rules=given) for kind in ("GRPCRoute", "HTTPRoute"))
    assert grpc["matches"] == [{"method": {"type": "Exact"} | method} | TESTERS]
    assert http["matches"] == [{"path": path} | TESTERS]


def test_an_http_route_has_timeouts_and_a_grpc_route_none(render: Render, refused: type[Exception]) -> None:
    given = [{"timeouts": {"request": "0s", "backendRequest": "1m30s"}}]
    [rule] = rules(render, "HTTPRoute", rules=given)
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "1m30s"}
    with pytest.raises(refused, match=r"a GRPCRoute has no timeouts; use grpcRoute\.kind: HTTPRoute"):
        rules(render, rules=given)


def http_rules(render: Render, *rules: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = render({"httpRoute": GATEWAY | {"rules": list(rules)}}).one("HTTPRoute")["spec"]["rules"]
    return found


def test_http_has_a_route_of_its_own_to_its_port(render: Render) -> None:
    assert http_rules(render) == [{"backendRefs": [{"name": "dragoman", "port": 8080}]}]
    rendered = render(
        {"service": {"httpPort": 80}, "httpRoute": GATEWAY | {"hostnames": ["mt.example"], "annotations": {"a": "b"}}}
    )
    route = rendered.one("HTTPRoute")
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert {"name": "http", "port": backend["port"]}.items() <= rendered.one("Service", backend["name"])["spec"]["ports"][1].items()
    assert route["spec"]["hostnames"] == ["mt.example"] and route["metadata"]["annotations"] == {"a": "b"}


def test_both_routes_may_be_of_one_kind(render: Render) -> None:
    routes = render({"grpcRoute": GATEWAY | {"kind": "HTTPRoute"}, "httpRoute": GATEWAY}).all("HTTPRoute")
    ports = {route["metadata"]["name"]: route["spec"]["rules"][0]["backendRefs"][0]["port"] for route in routes}
    assert ports == {"dragoman": 8500, "dragoman-http": 8080}


def test_paths_filters_and_timeouts_of_http_go_along_as_they_are(render: Render) -> None:
    path = {"type": "Exact", "value": "/v1/generate:stream"}
    filters = [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["x-request-id"]}}]
    given = {"matches": [{"path": path}, TESTERS], "filters": filters, "timeouts": {"request": "0s"}}
    shared = {"backends": [{"weight": 95}, {"name": "dragoman-canary", "weight": 5}]}
    first, second = http_rules(render, given, shared)
    assert first == given | {"backendRefs": [{"name": "dragoman", "port": 8080}]}
    assert second == {
        "backendRefs": [
            {"name": "dragoman", "port": 8080, "weight": 95},
            {"name": "dragoman-canary", "port": 8080, "weight": 5},
        ]
    }
