"""The Grafana dashboard: queries for metrics that exist, JSON that Grafana imports; and the list of metrics."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "docs" / "grafana" / "slipstream.json"
DASHBOARD = json.loads(PATH.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
FUNCTIONS = {"sum", "min", "max", "avg", "rate", "scalar", "histogram_quantile", "by"}
needs_server = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "httpx")),
    reason="the server's packages (extra serve) are not installed",
)


def names(query: str) -> set[str]:
    """Names of the metrics a query asks for."""
    return set(re.findall(r"slipstream_\w+", query))


def check_queries(exposed: str) -> None:
    """Every metric with every label it is asked by is in the text of /metrics."""
    found: dict[str, set[str]] = {}
    for line in exposed.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels = set(re.findall(r'(\w+)="', rest.rpartition("}")[0])) if rest else set()
            found.setdefault(name.split(" ")[0], set()).update(labels)
    for query in QUERIES:
        for name in names(query):
            assert name in found, f"{name} is not exposed"
        asked = set(re.findall(r"by \((\w+)\)", query)) | set(re.findall(r'(\w+)=~?"', query)) - {"job", "instance"}
        for label in asked:
            assert any(label in found[name] for name in names(query)), f"{label} in {query}"


@needs_server
def test_every_query_asks_for_what_is_there(monkeypatch):
    import serve_beds

    with serve_beds.running(serve_beds.small(monkeypatch)) as server:
        with server.client() as client:
            body = {"messages": [{"role": "user", "content": "abc abc"}], "max_completion_tokens": 40}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            exposed = client.get("/metrics").text
        check_queries(exposed)
        with pytest.raises(AssertionError, match="is not exposed"):
            check_queries(exposed.replace("slipstream_engine_up", "slipstream_engine_gone"))
        with pytest.raises(AssertionError, match="position"):
            check_queries(exposed.replace('position="', 'place="'))


@needs_server
def test_the_metrics_are_those_of_the_document(monkeypatch):
    import serve_beds

    text = (PATH.parent.parent / "serving.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    listed = {name: row[2].strip() for row in rows for name in re.findall(r"`(slipstream_\w+)", row[1])}
    with serve_beds.running(serve_beds.small(monkeypatch)) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": "aaaa"})
        exposed = client.get("/metrics").text
    types = dict(re.findall(r"^# TYPE (slipstream_\w+) (\w+)$", exposed, re.M))
    assert {name: kind for name, kind in types.items() if not name.endswith("_created")} == listed


def test_queries_are_well_formed():
    for query in QUERIES:
        for left, right in ("()", "{}", "[]"):
            assert query.count(left) == query.count(right), query
        assert set(re.findall(r"([a-z_]+) ?\(", query)) <= FUNCTIONS, query
        assert names(query)
        for name in names(query):
            assert name.endswith(("_total", "_bucket")) == bool(re.search(rf"rate\({name}|alarms_total", query)), query


def test_the_file_is_what_grafana_imports():
    assert DASHBOARD["title"] == "Slipstream"
    assert DASHBOARD["uid"]
    assert DASHBOARD["id"] is None, "Grafana gives the id"
    assert DASHBOARD["schemaVersion"] >= 36
    variables = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert variables == ["datasource", "job", "instance"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    used = {panel["type"] for panel in PANELS}
    assert used <= {need["id"] for need in DASHBOARD["__requires"] if need["type"] == "panel"}
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])


def test_panels_fill_the_grid_without_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len(taken) == 24 * (max(y for _, y in taken) + 1)
