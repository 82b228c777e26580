# SPDX-License-Identifier: Apache-2.0
"""Dashboards, alerts and autoscalers ask only for metrics and labels that there
are: those of tests/golden/metrics.txt, to which cluster_operation_test holds a
running cluster's /metrics.
"""

import json
import pathlib
import re
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
RULES = ROOT / "deploy/prometheus/tandem.rules.yaml"
VALUES = ROOT / "deploy/helm/tandem/values.yaml"
# Of whoever scrapes.
TARGET_LABELS = {"namespace", "pod", "instance", "job"}
# Not there before the first event, so not in the golden list.
LATER = {
    "tandem_router_retries_total": {"cause", "stage"},
    "tandem_streams_resumed_total": {"cause"},
    # Under TLS alone.
    "tandem_tls_certificate_expiry_timestamp_seconds": {"certificate"},
}


def known() -> dict[str, set[str]]:
    labels: dict[str, set[str]] = {}
    for line in (ROOT / "tests/golden/metrics.txt").read_text().splitlines():
        _, name, *rest = line.split()
        labels.setdefault(name, set()).update(rest)
    for name, own in LATER.items():
        labels[name] = {"model_name", "role", *own}
    return labels


def queries() -> list[tuple[str, str]]:
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.name}: {panel['title']}", target["expr"])
                      for target in panel.get("targets", [])]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        found += [(rule["alert"], rule["expr"]) for rule in group["rules"]]
    return found


class Monitoring(unittest.TestCase):
    def test_every_metric_and_label_exists(self) -> None:
        labels = known()
        self.assertGreater(len(queries()), 50)
        for where, expr in queries():
            used = set(re.findall(r"\b(?:tandem|process)_[a-z0-9_]+", expr))
            self.assertTrue(used, where)
            for name in used:
                with self.subTest(where, metric=name):
                    self.assertIn(name, labels)
            there = TARGET_LABELS.union(*(labels.get(name, set()) for name in used))
            selected = re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", expr)
            grouped = re.findall(r"(?:by|on|without)\s*\(([^)]*)\)", expr)
            named = selected + [n.strip() for g in grouped for n in g.split(",")]
            for label in named:
                with self.subTest(where, label=label):
                    self.assertIn(label, there)

    def test_histograms_are_asked_for_buckets(self) -> None:
        for where, expr in queries():
            for name in re.findall(r"\btandem_\w+_bucket", expr):
                with self.subTest(where, metric=name):
                    self.assertIn("histogram_quantile", expr)
                    self.assertRegex(expr, r"by \([^)]*\ble\b")

    def test_autoscalers_ask_for_gauges_of_their_role(self) -> None:
        lines = (ROOT / "tests/golden/metrics.txt").read_text().splitlines()
        there = {tuple(line.split()[:2]) for line in lines}
        values = yaml.safe_load(VALUES.read_text())
        for role in ("router", "prefill", "decode"):
            for metric in values[role]["autoscaling"]["metrics"]:
                with self.subTest(role, metric=metric["name"]):
                    self.assertIn((role, metric["name"]), there)

    def test_every_alert_is_explained(self) -> None:
        text = (ROOT / "docs/operations.md").read_text()
        for group in yaml.safe_load(RULES.read_text())["groups"]:
            for rule in group["rules"]:
                with self.subTest(rule["alert"]):
                    self.assertIn(f"`{rule['alert']}`", text)
                    self.assertIn("severity", rule["labels"])

    def test_panels_do_not_overlap(self) -> None:
        for path in DASHBOARDS:
            taken: set[tuple[int, int]] = set()
            for panel in json.loads(path.read_text())["panels"]:
                p = panel["gridPos"]
                cells = {(x, y) for x in range(p["x"], p["x"] + p["w"])
                         for y in range(p["y"], p["y"] + p["h"])}
                with self.subTest(path.name, panel=panel["title"]):
                    self.assertFalse(cells & taken)
                    self.assertLessEqual(p["x"] + p["w"], 24)
                taken |= cells


if __name__ == "__main__":
    unittest.main()
