"""The Grafana board and the alert rules name what /metrics serves, in queries that parse."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon import Daemon

DOCKER = Path(__file__).parents[2] / "docker"
BOARD = json.loads((DOCKER / "grafana" / "moed.json").read_text())
ALERTS = yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())
# Prometheus' own, for every target that it scrapes; and the labels that it puts on.
UP = "up"
PUT_ON = {"instance", "job"}
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
VALUES = {"__rate_interval": "1m", "model": "m", "instance": "i"}
Labels = dict[str, set[str]]


def rules() -> list[Any]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def panels() -> list[Any]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    found = [rule["expr"] for rule in rules()]
    found += [target["expr"] for panel in panels() for target in panel["targets"]]
    return [VARIABLE.sub(lambda match: VALUES[match.group(1)], query) for query in found]


def nodes(node: Any) -> Iterator[Any]:
    """The query's tree, flattened."""
    yield node
    for name in ("lhs", "rhs", "expr", "args", "param", "vector_selector", "vs"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, promql_parser.Expr):
                yield from nodes(each)


@pytest.fixture
def shown(served: Daemon) -> Labels:
    """Sample name → label names, of a daemon that has answered a request."""
    assert served.post("/v1/completions", {"prompt": [65], "max_tokens": 4}).status_code == 200
    found: Labels = {}
    text = httpx.get(f"{served.url}/metrics", timeout=10).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def faults(query: str, shown: Labels) -> list[str]:
    """Names and labels in a query that nobody serves."""
    found, known = [], set(PUT_ON)
    tree = list(nodes(promql_parser.parse(query)))
    for node in tree:
        if isinstance(node, promql_parser.VectorSelector):
            name = node.name or ""
            labels = shown.get(name, set()) | PUT_ON
            if name not in shown and name != UP:
                found.append(name)
            matched = {matcher.name for matcher in node.matchers.matchers}
            found += sorted(f"{name}.{label}" for label in matched - labels)
            known |= labels
    for node in tree:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found += sorted(set(node.modifier.labels) - known)
    return found


def test_every_name_and_label_is_served(shown: Labels) -> None:
    wrong = {query: bad for query in queries() if (bad := faults(query, shown))}
    assert wrong == {}


def test_a_wrong_name_or_label_is_noticed(shown: Labels) -> None:
    query = 'sum by (rank) (rate(moed:tokens_total{model="x"}[1m])) / sum(moed:rank_up{gpu="1"})'
    assert faults(query, shown) == ["moed:tokens_total", "moed:tokens_total.model"] + [
        "moed:rank_up.gpu",
        "rank",
    ]
    with pytest.raises(ValueError):
        faults("rate(moed:rank_up[1m)", shown)


def test_counters_are_taken_as_rates_and_gauges_are_not() -> None:
    for query in queries():
        for node in nodes(promql_parser.parse(query)):
            if isinstance(node, promql_parser.Call) and node.func.name == "rate":
                (selector,) = (
                    each for each in nodes(node) if isinstance(each, promql_parser.VectorSelector)
                )
                assert re.search(r"_(total|bucket|sum|count)$", selector.name or ""), query


def test_labels_in_texts_are_those_of_the_query() -> None:
    for rule in rules():
        told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = {
            label
            for node in nodes(promql_parser.parse(rule["expr"]))
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
            for label in node.modifier.labels
        }
        assert told <= (kept or PUT_ON), rule["alert"]
    for panel in panels():
        for target in panel["targets"]:
            told = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert all(re.search(rf"by \([^)]*\b{label}\b", target["expr"]) for label in told)


def test_rules_are_whole() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 8
    for rule in rules():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert promql_parser.parse_duration(rule["for"]).total_seconds() >= 60


def test_panels_have_places_of_their_own() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert set(VARIABLE.findall(json.dumps(panels()))) - {"__rate_interval"} == variables
