# SPDX-License-Identifier: Apache-2.0
"""The chart without Helm: its values against their schema, and the manifests
that it renders (deploy/kubernetes) against the programs that they start.

    chart_test.py FOLDER_OF_PROGRAMS
"""

import copy
import json
import pathlib
import re
import subprocess
import sys
import unittest

import jsonschema
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/tandem"
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
PROGRAMS = pathlib.Path(sys.argv.pop(1))


def merge(base: dict, over: dict) -> dict:
    """As Helm does: maps by key, all else replaced."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else value
    return result


def objects() -> list[tuple[str, dict]]:
    return [
        (f"{path.name}: {thing['kind']} {thing['metadata']['name']}", thing)
        for path in MANIFESTS
        if path.name != "kustomization.yaml"
        for thing in yaml.safe_load_all(path.read_text())
        if thing
    ]


def pods() -> list[tuple[str, dict]]:
    return [
        (name, thing["spec"]["template"])
        for name, thing in objects()
        if thing["kind"] in ("Deployment", "StatefulSet")
    ]


def seconds(flag: str) -> int:
    return int(re.fullmatch(r"--shutdown-timeout=(\d+)s", flag).group(1))


class Values(unittest.TestCase):
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def test_rendered_alerts_are_those_there_are(self) -> None:
        rules = yaml.safe_load((ROOT / "deploy/prometheus/tandem.rules.yaml").read_text())
        rendered = [thing for _, thing in objects() if thing["kind"] == "PrometheusRule"]
        self.assertTrue(rendered)
        for thing in rendered:
            self.assertEqual(thing["spec"]["groups"], rules["groups"],
                             "scripts/chart.sh --write renders them anew")

    def test_examples_fit_the_schema(self) -> None:
        jsonschema.validate(self.values, self.schema)
        for path in sorted((CHART / "examples").glob("*.yaml")):
            with self.subTest(path.name):
                own = yaml.safe_load(path.read_text())
                jsonschema.validate(merge(self.values, own), self.schema)

    def test_every_value_has_a_schema(self) -> None:
        """What is in values.yaml is described, so a misspelling is refused."""
        loose = ("nodeSelector", "affinity", "volume", "issuerRef")

        def walk(values: dict, schema: dict, path: str) -> None:
            if "$ref" in schema:
                target = self.schema
                for part in schema["$ref"].removeprefix("#/").split("/"):
                    target = target[part]
                schema = target
            if path.rsplit(".", 1)[-1] in (*loose, "args") or not values:
                return
            if "properties" not in schema:
                return
            self.assertIs(schema["additionalProperties"], False, path)
            for key, value in values.items():
                self.assertIn(key, schema["properties"], path)
                if isinstance(value, dict):
                    walk(value, schema["properties"][key], f"{path}.{key}")

        walk(self.values, self.schema, "values")

    def test_mistakes_are_refused(self) -> None:
        mistakes = {
            "misspelt key": {"decode": {"replica": 2}},
            "flag with dashes": {"decode": {"args": {"--device": "cpu"}}},
            "negated flag": {"decode": {"args": {"no-mixed-numerics": True}}},
            "way that no two pods have": {"handoff": {"way": "shm"}},
            "duration for seconds": {"router": {"shutdownTimeoutSeconds": "600s"}},
            "no time to drain": {"router": {"shutdownTimeoutSeconds": 0}},
            "target with a unit": {
                "decode": {
                    "autoscaling": {"metrics": [{"name": "a_b", "target": "70%"}]}
                }
            },
            "digest that is none": {"image": {"digest": "latest"}},
            "two volumes": {"model": {"volume": {"nfs": {}, "hostPath": {}}}},
            "relative path": {"model": {"path": "models/x"}},
            "keys in the values": {"apiKeys": {"keys": ["sk-x"]}},
            "path for a file's name": {"apiKeys": {"key": "../keys"}},
            "certificate's path": {"clientTls": {"certfile": "/x"}},
        }
        for what, values in mistakes.items():
            with self.subTest(what), self.assertRaises(jsonschema.ValidationError):
                jsonschema.validate(merge(self.values, values), self.schema)


class Manifests(unittest.TestCase):
    def test_programs_know_their_flags(self) -> None:
        known = {}
        for role in ("router", "prefill", "decode"):
            text = subprocess.run(
                [PROGRAMS / f"tandem-{role}", "--help"],
                check=True, capture_output=True, text=True,
            ).stdout
            flags = re.findall(r"^  --(\[no-\])?([a-z0-9-]+)", text, re.MULTILINE)
            known[f"tandem-{role}"] = {name for _, name in flags}
        self.assertEqual(len(pods()), 9)
        for name, pod in pods():
            container = pod["spec"]["containers"][0]
            (program,) = container["command"]
            for argument in container["args"][1:]:
                flag = argument.removeprefix("--").split("=")[0]
                with self.subTest(name, flag=flag):
                    self.assertIn(flag, known[program])

    def test_the_drain_fits_the_grace_period(self) -> None:
        for name, pod in pods():
            spec = pod["spec"]
            container = spec["containers"][0]
            (timeout,) = (
                a for a in container["args"] if a.startswith("--shutdown-timeout")
            )
            stop = container.get("lifecycle", {}).get("preStop", {})
            sleep = stop.get("sleep", {}).get("seconds", 0)
            with self.subTest(name):
                self.assertGreaterEqual(
                    spec["terminationGracePeriodSeconds"],
                    sleep + seconds(timeout) + 10,
                )

    def test_pods_may_do_nothing_but_serve(self) -> None:
        for name, pod in pods():
            spec, container = pod["spec"], pod["spec"]["containers"][0]
            own = container["securityContext"]
            with self.subTest(name):
                self.assertFalse(spec["automountServiceAccountToken"])
                self.assertFalse(spec["enableServiceLinks"])
                self.assertTrue(spec["securityContext"]["runAsNonRoot"])
                self.assertEqual(
                    spec["securityContext"]["seccompProfile"]["type"],
                    "RuntimeDefault",
                )
                self.assertFalse(own["allowPrivilegeEscalation"])
                self.assertTrue(own["readOnlyRootFilesystem"])
                self.assertEqual(own["capabilities"], {"drop": ["ALL"]})
                self.assertIn("memory", container["resources"]["limits"])
                for volume in container["volumeMounts"]:
                    if volume["name"] in ("model", "tls", "client-tls", "api-keys"):
                        self.assertTrue(volume["readOnly"])

    def test_probes_do_not_kill_what_loads_or_drains(self) -> None:
        for name, pod in pods():
            container = pod["spec"]["containers"][0]
            with self.subTest(name):
                for probe, path in (
                    ("startupProbe", "/livez"),
                    ("livenessProbe", "/livez"),
                    ("readinessProbe", "/readyz"),
                ):
                    self.assertEqual(container[probe]["httpGet"]["path"], path)
                start = container["startupProbe"]
                self.assertGreaterEqual(
                    start["periodSeconds"] * start["failureThreshold"], 300
                )

    def test_what_is_wedged_is_not_left_to_drain(self) -> None:
        """Its own grace period: preStop's sleep and time to end, no more."""
        for name, pod in pods():
            container = pod["spec"]["containers"][0]
            stop = container.get("lifecycle", {}).get("preStop", {})
            sleep = stop.get("sleep", {}).get("seconds", 0)
            with self.subTest(name):
                self.assertEqual(
                    container["livenessProbe"].get("terminationGracePeriodSeconds"),
                    sleep + 5,
                )

    def test_probes_speak_what_the_port_does(self) -> None:
        """HTTPS where the port for clients has a certificate, and there alone."""
        secured = 0
        for name, pod in pods():
            container = pod["spec"]["containers"][0]
            https = any(a.startswith("--ssl-certfile=") for a in container["args"])
            secured += https
            with self.subTest(name):
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    scheme = container[probe]["httpGet"].get("scheme", "HTTP")
                    self.assertEqual(scheme, "HTTPS" if https else "HTTP")
        self.assertEqual(secured, 1)

    def test_plaintext_is_allowed_where_there_is_no_tls_alone(self) -> None:
        """Else a pod ends at once: it listens beyond loopback."""
        secured = 0
        for name, pod in pods():
            arguments = pod["spec"]["containers"][0]["args"]
            tls = [a for a in arguments if a.startswith("--tls-")]
            secured += bool(tls)
            with self.subTest(name):
                self.assertIn(len(tls), (0, 3))
                self.assertEqual("--allow-plaintext" in arguments, not tls)
        self.assertEqual(secured, 3)

    def test_each_role_has_a_certificate_that_names_it_alone(self) -> None:
        """Else a process would be refused, or might speak as another."""
        mounted = {}
        for name, pod in pods():
            for volume in pod["spec"]["volumes"]:
                if volume["name"] == "tls":
                    secret = volume["secret"]["secretName"]
                    role = name.rsplit("-", 1)[-1]
                    mounted[secret] = [f"spiffe://tandem/{role}"]
        issued = {
            thing["spec"]["secretName"]: thing["spec"]["uris"]
            for _, thing in objects()
            if thing["kind"] == "Certificate"
        }
        self.assertEqual(len(issued), 3)
        self.assertEqual(issued, mounted)

    def test_files_that_flags_name_are_mounted(self) -> None:
        """Of Secrets, whose modes and keys are those of what reads them."""
        for name, pod in pods():
            spec, container = pod["spec"], pod["spec"]["containers"][0]
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            volumes = {v["name"]: v for v in spec["volumes"]}
            for argument in container["args"]:
                flag, _, path = argument.partition("=")
                if not path.startswith("/etc/tandem/"):
                    continue
                with self.subTest(name, flag=flag):
                    secret = volumes[mounts[str(pathlib.Path(path).parent)]]["secret"]
                    self.assertEqual(secret["defaultMode"], 0o440)
                    self.assertTrue(secret["secretName"])

    def test_workers_find_routers_that_are_not_ready(self) -> None:
        """A router becomes ready by a worker's registration."""
        services = {
            name.split(":")[0] + thing["metadata"]["name"]: thing["spec"]
            for name, thing in objects()
            if thing["kind"] == "Service"
        }
        for name, pod in pods():
            for argument in pod["spec"]["containers"][0]["args"]:
                if not argument.startswith("--router="):
                    continue
                service = argument.removeprefix("--router=").split(".")[0]
                spec = services[name.split(":")[0] + service]
                with self.subTest(name):
                    self.assertEqual(spec["clusterIP"], "None")
                    self.assertTrue(spec["publishNotReadyAddresses"])
                    self.assertEqual(spec["ports"][0]["port"], 50052)

    def test_ports_by_name_exist(self) -> None:
        names = {p["name"] for _, pod in pods()
                 for p in pod["spec"]["containers"][0]["ports"]}
        for name, thing in objects():
            used = []
            if thing["kind"] == "Service":
                used = [p["targetPort"] for p in thing["spec"]["ports"]]
            if thing["kind"] == "NetworkPolicy":
                used = [p["port"] for rule in thing["spec"]["ingress"]
                        for p in rule.get("ports", [])]
            with self.subTest(name):
                self.assertLessEqual(set(used), names)

    def test_routers_reach_the_http_port_of_workers(self) -> None:
        """`tandem doctor --admin` asks it from a router's pod."""
        found = 0
        for name, thing in objects():
            if thing["kind"] != "NetworkPolicy":
                continue
            spec, found = thing["spec"], found + 1
            with self.subTest(name):
                if name.endswith("-router"):
                    ports = [port["port"] for rule in spec["egress"]
                             if "to" in rule for port in rule["ports"]]
                    self.assertIn(8000, ports)
                    continue
                (rule,) = (r for r in spec["ingress"] if r.get("ports") == [{"port": "http"}])
                selected = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
                            for peer in rule.get("from", []) if "podSelector" in peer]
                self.assertEqual(selected, ["router"] if "from" in rule else [])
        self.assertEqual(found, 6)

    def test_no_scaled_role_has_replicas(self) -> None:
        scaled = {
            (name.split(":")[0], thing["spec"]["scaleTargetRef"]["name"])
            for name, thing in objects()
            if thing["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
        }
        self.assertEqual(len(scaled), 4)
        for name, thing in objects():
            if thing["kind"] in ("Deployment", "StatefulSet"):
                key = (name.split(":")[0], thing["metadata"]["name"])
                with self.subTest(name):
                    self.assertEqual("replicas" in thing["spec"], key not in scaled)

    def test_lost_series_are_no_idle_role(self) -> None:
        """Else KEDA takes nothing for 0 and scales to the least."""
        triggers = [
            (name, trigger)
            for name, thing in objects()
            if thing["kind"] == "ScaledObject"
            for trigger in thing["spec"]["triggers"]
        ]
        self.assertEqual(len(triggers), 3)
        for name, trigger in triggers:
            with self.subTest(name):
                self.assertEqual(trigger["metadata"].get("ignoreNullValues"), "false")


if __name__ == "__main__":
    unittest.main()
