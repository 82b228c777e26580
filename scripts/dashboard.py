#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard over a real load, drawn without Grafana.

    dashboard.py PROMETHEUS PROGRAMS MODEL LOGS SVG

A router, two prefill and two decode workers run under Prometheus and a load that
rises, has clients that leave, and loses a decode worker to SIGKILL. Then every
query of deploy/grafana/tandem.json is asked of that Prometheus, as Grafana would
ask it. Fails if a panel has no data. SVG is where the picture goes.
"""

import http.client
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import dashboard_svg

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
from free_ports import free_port

ROOT = pathlib.Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "deploy/grafana/tandem.json"
# What Grafana would put in their place. Scraped each second for a minute or
# two, where production scrapes each 15 or 30 s for months.
VARIABLES = {"$model": ".*", "$namespace": ".*", "$__rate_interval": "8s"}
STEP_S = 2
CALM_S, BUSY_S, BROKEN_S, AGAIN_S, LAST_S = 25, 30, 8, 25, 25
# Targets that have no data while nothing is wrong.
QUIET = {"error {{operation}}"}
WORKER_FLAGS = [
    "--threads", "1", "--num-kv-blocks", "256", "--max-num-seqs", "24",
    "--kv-offload-bytes", "2MiB", "--kv-offload-file-bytes", "16MiB",
]
DECODE_FLAGS = [
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 3}',
]


class Cluster:
    """One router, two workers of each role, and their addresses."""

    def __init__(self, programs: pathlib.Path, model: str, logs: pathlib.Path):
        self._programs, self._model, self._logs = programs, model, logs
        self.grpc, self._internal = free_port(), free_port()
        self.http = {
            name: free_port()
            for name in ("router", "prefill-0", "prefill-1", "decode-0", "decode-1")
        }
        self._processes: dict[str, subprocess.Popen] = {}

    def start(self, name: str) -> None:
        role = name.split("-")[0]
        flags = ["--port", str(self.http[name])]
        if role == "router":
            flags += ["--log-level", "warning",
                      "--grpc-port", str(self.grpc), "--admin-port", str(free_port()),
                      "--internal-port", str(self._internal)]
        else:
            flags += ["--worker-id", name, "--router", f"127.0.0.1:{self._internal}",
                      "--kv-offload-path", str(self._logs), *WORKER_FLAGS]
        if role == "decode":
            flags += DECODE_FLAGS
        with open(self._logs / f"dashboard-{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [self._programs / f"tandem-{role}", self._model, *flags],
                stdout=log, stderr=log)

    def wait_until_ready(self, name: str) -> None:
        wait_for(f"http://127.0.0.1:{self.http[name]}/readyz", name)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()

    def bench(self, *flags: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self._programs / "tandem", "bench", "--router", f"127.0.0.1:{self.grpc}",
             "--no-progress", "--num-prompts", "100000", *flags],
            stdout=subprocess.DEVNULL)


def wait_for(url: str, what: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=5).read()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"{what} does not become ready at {url}")


def leave_early(port: int, done: threading.Event) -> None:
    """A client each second that reads a little of its answer and goes."""
    body = json.dumps({"model": "tales", "prompt": "Once upon a time", "stream": True,
                       "max_tokens": 400, "ignore_eos": True})
    while not done.wait(1):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/v1/completions", body,
                           {"Content-Type": "application/json"})
        connection.getresponse().read(200)
        connection.close()


def load(cluster: Cluster) -> list[tuple[float, str]]:
    """Minutes of work; the times at which something happened."""
    shape = ["--random-input-len", "120", "--random-output-len", "160",
             "--random-range-ratio", "0.6", "--random-prefix-len", "128",
             "--random-num-prefixes", "6"]
    done, events, running = threading.Event(), [], []
    leaver = threading.Thread(target=leave_early, args=(cluster.http["router"], done))
    leaver.start()
    try:
        running.append(cluster.bench("--max-concurrency", "8", *shape))
        time.sleep(CALM_S)
        events.append((time.time(), "more clients"))
        running.append(cluster.bench("--max-concurrency", "32", "--seed", "1", *shape))
        time.sleep(BUSY_S)
        events.append((time.time(), "decode-1 killed"))
        cluster.kill("decode-1")
        time.sleep(BROKEN_S)
        events.append((time.time(), "and back"))
        cluster.start("decode-1")
        time.sleep(AGAIN_S)
        events.append((time.time(), "fewer clients"))
        running.pop().terminate()
        time.sleep(LAST_S)
    finally:
        done.set()
        for process in running:
            process.terminate()
        leaver.join()
    return events


class Prometheus:
    def __init__(self, program: str, cluster: Cluster, logs: pathlib.Path):
        self._url = f"http://127.0.0.1:{free_port()}"
        scrapes = [{"targets": [f"127.0.0.1:{port}"],
                    "labels": {"namespace": "tandem", "pod": pod}}
                   for pod, port in cluster.http.items()]
        config = logs / "dashboard-prometheus.yml"
        config.write_text(json.dumps({  # JSON is YAML
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "tandem", "static_configs": scrapes}],
        }))
        data = logs / "dashboard-prometheus"
        shutil.rmtree(data, ignore_errors=True)
        with open(logs / "dashboard-prometheus.log", "wb") as log:
            self._process = subprocess.Popen(
                [program, f"--config.file={config}", f"--storage.tsdb.path={data}",
                 f"--web.listen-address={self._url.removeprefix('http://')}"],
                stdout=log, stderr=log)
        wait_for(self._url + "/-/ready", "prometheus")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def series(self, query: str, start: float, end: float) -> list[dict]:
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        asked = urllib.parse.urlencode(
            {"query": query, "start": start, "end": end, "step": STEP_S})
        with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{asked}") as answer:
            return json.load(answer)["data"]["result"]


def legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), form)


def fill(panels: list[dict], prometheus: Prometheus, start: float, end: float) -> list[str]:
    """Adds the panels' lines; the targets for which there are none."""
    empty = []
    for panel in panels:
        panel["lines"] = []
        for target in panel.get("targets", []):
            found = prometheus.series(target["expr"], start, end)
            lines = [(legend(target["legendFormat"], one["metric"]),
                      [(at, float(value)) for at, value in one["values"]
                       if value not in ("NaN", "+Inf", "-Inf")])
                     for one in found]
            lines = sorted((line for line in lines if line[1]), key=lambda line: line[0])
            panel["lines"] += lines
            if not lines and target["legendFormat"] not in QUIET:
                empty.append(f"{panel['title']}: {target['expr']}")
    return empty


def main(prometheus_program: str, programs: str, model: str, logs: str, svg: str) -> None:
    cluster = Cluster(pathlib.Path(programs), model, pathlib.Path(logs))
    prometheus = None
    try:
        for name in cluster.http:
            cluster.start(name)
        for name in cluster.http:
            cluster.wait_until_ready(name)
        prometheus = Prometheus(prometheus_program, cluster, pathlib.Path(logs))
        start = time.time()
        events = load(cluster)
        panels = json.loads(DASHBOARD.read_text())["panels"]
        empty = fill(panels, prometheus, start, time.time())
        pathlib.Path(svg).write_text(
            dashboard_svg.draw(panels, events, start, time.time(), STEP_S))
    finally:
        cluster.stop()
        if prometheus:
            prometheus.stop()
    drawn = sum(len(panel["lines"]) for panel in panels)
    print(f"{svg}: {len(panels)} panels and rows, {drawn} lines")
    if empty:
        sys.exit("no data under load:\n  " + "\n  ".join(empty))


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
