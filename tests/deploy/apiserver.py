# SPDX-License-Identifier: Apache-2.0
"""Creates rendered objects, and their pods, in a real kube-apiserver.

    apiserver.py FILE.yaml...

Starts etcd and kube-apiserver (both from PATH) on loopback, one namespace per
file under the Pod Security Standard `restricted`, and posts every object with
strict field validation. A pod of each template is posted as well: its fields,
defaults and security are checked only there. Custom resources are skipped.
"""

import contextlib
import json
import pathlib
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from free_ports import free_port

TOKEN = "test"
CUSTOM = ("cert-manager.io", "keda.sh", "monitoring.coreos.com")


class Api:
    def __init__(self, port: int) -> None:
        self.base = f"https://127.0.0.1:{port}"
        self.tls = ssl.create_default_context()
        self.tls.check_hostname = False
        self.tls.verify_mode = ssl.CERT_NONE
        self.plurals: dict[tuple[str, str], str] = {}

    def call(self, method: str, path: str, body: dict | None = None) -> dict:
        request = urllib.request.Request(
            self.base + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "authorization": f"Bearer {TOKEN}",
                "content-type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, context=self.tls, timeout=30) as r:
                text = r.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            if text.startswith("{"):
                text = json.loads(text)["message"]
            raise RuntimeError(text) from None
        return json.loads(text) if text.startswith(b"{") else {}

    def plural(self, version: str, kind: str) -> str:
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self.plurals:
            for r in self.call("GET", root)["resources"]:
                if "/" not in r["name"]:
                    self.plurals[version, r["kind"]] = r["name"]
        return f"{root}/namespaces/%s/{self.plurals[version, kind]}"

    def create(self, namespace: str, thing: dict) -> None:
        path = self.plural(thing["apiVersion"], thing["kind"]) % namespace
        thing["metadata"]["namespace"] = namespace
        self.call("POST", f"{path}?fieldValidation=Strict", thing)


@contextlib.contextmanager
def server(folder: pathlib.Path) -> Iterator[Api]:
    etcd, port = free_port(), free_port()
    key = folder / "sa.key"
    subprocess.run(
        ["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True
    )
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
    commands = [
        ["etcd", f"--data-dir={folder}/etcd",
         f"--listen-client-urls=http://127.0.0.1:{etcd}",
         f"--advertise-client-urls=http://127.0.0.1:{etcd}",
         f"--listen-peer-urls=http://127.0.0.1:{free_port()}"],
        ["kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd}",
         "--bind-address=127.0.0.1", f"--secure-port={port}",
         f"--cert-dir={folder}", "--service-cluster-ip-range=10.0.0.0/24",
         "--service-account-issuer=https://kubernetes.default.svc",
         f"--service-account-key-file={key}",
         f"--service-account-signing-key-file={key}",
         f"--token-auth-file={folder}/tokens.csv",
         "--authorization-mode=AlwaysAllow", "--endpoint-reconciler-type=none"],
    ]
    processes = []
    try:
        for command in commands:
            log = (folder / f"{command[0]}.log").open("w")
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        api = Api(port)
        for _ in range(240):
            for command, process in zip(commands, processes):
                if process.poll() is not None:
                    log = (folder / f"{command[0]}.log").read_text()
                    raise SystemExit(f"{command[0]} ended:\n{log[-3000:]}")
            with contextlib.suppress(OSError, RuntimeError):
                api.call("GET", "/readyz")
                break
            time.sleep(0.5)
        else:
            raise SystemExit("kube-apiserver does not become ready")
        yield api
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


def pod_of(thing: dict) -> dict | None:
    if thing["kind"] not in ("Deployment", "StatefulSet"):
        return None
    template = json.loads(json.dumps(thing["spec"]["template"]))
    template["metadata"]["name"] = thing["metadata"]["name"] + "-0"
    return {"apiVersion": "v1", "kind": "Pod", **template}


def check(api: Api, namespace: str, things: list[dict]) -> tuple[int, list[str]]:
    api.call("POST", "/api/v1/namespaces", {
        "metadata": {
            "name": namespace,
            "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
        },
    })
    pods = [pod for pod in map(pod_of, things) if pod]
    wrong, done = [], 0
    for thing in things + pods:
        if thing["apiVersion"].split("/")[0] in CUSTOM:
            continue
        try:
            api.create(namespace, thing)
            done += 1
        except RuntimeError as error:
            wrong.append(f"{namespace}: {thing['kind']} "
                         f"{thing['metadata']['name']}: {error}")
    return done, wrong


def main() -> None:
    wrong: list[str] = []
    created = 0
    with tempfile.TemporaryDirectory() as folder, server(pathlib.Path(folder)) as api:
        for file in sys.argv[1:]:
            path = pathlib.Path(file)
            things = [t for t in yaml.safe_load_all(path.read_text()) if t]
            # Accounts first: pods name them.
            things.sort(key=lambda t: t["kind"] != "ServiceAccount")
            done, faults = check(api, path.stem, things)
            created += done
            wrong += faults
    print(f"{created} objects created")
    if wrong or not created:
        raise SystemExit("\n".join(wrong) or "nothing was created")


if __name__ == "__main__":
    main()
