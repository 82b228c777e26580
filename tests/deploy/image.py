# SPDX-License-Identifier: Apache-2.0
"""Does what deploy/docker/Dockerfile says, in chroots instead of Docker.

    image.py build TARGET [PROGRAMS]
                            makes build/image/TARGET/ and checks it; with a
                            folder of finished programs, these take the place
                            of what the stage build-TARGET makes
    image.py run TARGET     runs compose.yaml's commands in it (in namespaces of
                            its own, as scripts/image.sh calls it)

Knows the instructions that the Dockerfile has, and fails on any other.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import urllib.request

from dockerfile_parse import DockerfileParser

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMAGE = ROOT / "build/image"
DOCKER = ROOT / "deploy/docker"
SUITES = """\
deb http://deb.debian.org/debian bookworm main
deb http://deb.debian.org/debian bookworm-updates main
deb http://deb.debian.org/debian-security bookworm-security main
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def remove(path: pathlib.Path) -> None:
    """Of a root. Refuses where anything is mounted in it: what a mount shows
    would be deleted too."""
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        if pathlib.Path(line.split()[4]).is_relative_to(path):
            raise SystemExit(f"{line.split()[4]} is mounted: umount it first")
    if path.exists():
        shutil.rmtree(path)


def mount(*arguments: str | pathlib.Path) -> None:
    """Only in a namespace of our own, where no mount outlives us."""
    own = os.readlink("/proc/self/ns/mnt")
    if os.environ.get("TANDEM_HOST_MOUNTS", own) == own:
        raise SystemExit("run this by scripts/image.sh, in its own namespace")
    subprocess.run(["mount", *arguments], check=True)


def mount_system(root: pathlib.Path) -> None:
    """/proc, and a /dev that is not the host's."""
    for name in ("proc", "dev"):
        (root / name).mkdir(exist_ok=True)
    mount("-t", "proc", "proc", root / "proc")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev")
    for name, minor in (("null", 3), ("zero", 5), ("random", 8), ("urandom", 9)):
        node = root / "dev" / name
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        node.chmod(0o666)
    (root / "dev/fd").symlink_to("/proc/self/fd")


def base() -> pathlib.Path:
    """debian:12-slim, or what is nearest to it."""
    path = IMAGE / "debian:12-slim"
    if not (path / "done").exists():
        remove(path)
        subprocess.run(
            ["debootstrap", "--variant=minbase", "bookworm", path,
             "http://deb.debian.org/debian"], check=True,
        )
        (path / "etc/apt/sources.list").write_text(SUITES)
        (path / "done").touch()
    return path


def ignored(file: str) -> bool:
    """By the few forms of pattern that Dockerfile.dockerignore uses."""
    result = False
    for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        if pattern == "*":
            result = True
        elif pattern.startswith("!"):
            allowed = pattern[1:]
            if file == allowed or file.startswith(allowed + "/"):
                result = False
        elif pattern.startswith("**/"):
            if pattern[3:] in file.split("/"):
                result = True
        else:
            raise SystemExit(f"Dockerfile.dockerignore: cannot read '{pattern}'")
    return result


class Stage:
    def __init__(self, name: str, parent: "Stage | pathlib.Path") -> None:
        self.root = IMAGE / name
        self.env = {"PATH": PATH}
        self.workdir, self.user, self.shell = "/", "0:0", ["/bin/sh", "-c"]
        origin = parent
        if isinstance(parent, Stage):
            origin = parent.root
            self.env = dict(parent.env)
            self.workdir, self.user = parent.workdir, parent.user
            self.shell = parent.shell
        remove(self.root)
        subprocess.run(["cp", "-a", origin, self.root], check=True)

    def run(self, command: str) -> None:
        match = re.match(r"--mount=type=cache,target=(\S+)\s+", command)
        shutil.copy("/etc/resolv.conf", self.root / "etc/resolv.conf")
        # A machine behind a proxy may trust an authority of its own.
        trusted = "/tmp/host-ca.crt"
        shutil.copy("/etc/ssl/certs/ca-certificates.crt",
                    self.root / trusted.lstrip("/"))
        mounted = ["proc", "dev"]
        try:
            mount_system(self.root)
            if match:
                command = command[match.end():]
                inside = self.root / match[1].lstrip("/")
                inside.mkdir(parents=True, exist_ok=True)
                (IMAGE / "cache").mkdir(exist_ok=True)
                mount("--bind", IMAGE / "cache", inside)
                mounted.append(match[1].lstrip("/"))
            script = f"cd {shlex.quote(self.workdir)} && {command}"
            subprocess.run(
                ["chroot", f"--userspec={self.user}", self.root,
                 *self.shell, script], check=True,
                env={**self.env, "HOME": "/root", "PIP_CERT": trusted,
                     "SSL_CERT_FILE": trusted, "CARGO_HTTP_CAINFO": trusted},
            )
        finally:
            for name in reversed(mounted):
                subprocess.run(["umount", "--lazy", self.root / name], check=False)

    def copy(self, words: list[str], stages: dict[str, "Stage"]) -> None:
        mode, origin = None, None
        while words[0].startswith("--"):
            key, _, value = words.pop(0)[2:].partition("=")
            if key == "from":
                origin = stages[value]
            elif key == "chmod":
                mode = int(value, 8)
            else:
                raise SystemExit(f"COPY: cannot do --{key}")
        *sources, target = words
        inside = self.root / os.path.join(self.workdir, target).lstrip("/")
        if origin:
            (source,) = sources
            shutil.copytree(origin.root / source.strip("/"), inside,
                            symlinks=True, dirs_exist_ok=True)
            return
        tracked = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.split("\n")
        context = [f for f in tracked if f and not ignored(f) and (ROOT / f).exists()]
        for source in sources:
            if source in context:  # a file
                to = inside / source.rsplit("/", 1)[-1] if target.endswith(
                    "/") else inside
                files = {source: to}
            else:
                prefix = "" if source == "." else source.rstrip("/") + "/"
                files = {f: inside / f.removeprefix(prefix)
                         for f in context if f.startswith(prefix)}
            if not files:
                raise SystemExit(f"COPY {source}: nothing of that name")
            for name, to in files.items():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, to)
                if mode is not None:
                    to.chmod(mode)


def needed(target: str, steps: list[dict]) -> set[str]:
    """The stages that `target` is made of, by what they name."""
    names: dict[str, set[str]] = {}
    now = ""
    for step in steps:
        value = step["value"]
        if step["instruction"] == "FROM":
            parent, _, now = value.split()
            names[now] = {parent}
        elif step["instruction"] == "COPY" and "--from=" in value:
            names[now].add(re.search(r"--from=(\S+)", value)[1])
    found, todo = set(), [target]
    while todo:
        name = todo.pop()
        if name in names and name not in found:
            found.add(name)
            todo += names[name]
    return found


def build(target: str, programs: str = "") -> None:
    steps = DockerfileParser(path=str(DOCKER / "Dockerfile")).structure
    wanted = needed(target, steps)
    stages: dict[str, Stage] = {}
    if programs:
        made = f"build-{target}"
        wanted = needed(target, steps) - needed(made, steps)
        given = Stage.__new__(Stage)
        given.root = IMAGE / made
        remove(given.root)
        (given.root / "out/bin").mkdir(parents=True)
        for role in ("", "-router", "-prefill", "-decode"):
            subprocess.run(["install", "--strip", f"{programs}/tandem{role}",
                            given.root / "out/bin"], check=True)
        stages[made] = given
    stage = None
    for step in steps:
        value = step["value"]
        kind = step["instruction"]
        if kind == "FROM":
            parent, _, name = value.split()
            stage = None
            if name in wanted:
                stage = Stage(name, stages.get(parent) or base())
                stages[name] = stage
        elif kind == "COMMENT" or stage is None:
            continue
        else:
            print(f"+ {kind} {value}", flush=True)
            if kind == "RUN":
                stage.run(value)
            elif kind == "COPY":
                stage.copy(value.split(), stages)
            elif kind == "ENV":
                for word in shlex.split(value):
                    key, _, text = word.partition("=")
                    stage.env[key] = text
            elif kind == "WORKDIR":
                stage.workdir = value
                (stage.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif kind == "USER":
                stage.user = value
            elif kind == "SHELL":
                stage.shell = json.loads(value)
            elif kind != "CMD":
                raise SystemExit(f"cannot do {kind}")
    check(stages[target])


def check(stage: Stage) -> None:
    user = stage.user.split(":")[0]
    if user in ("0", "root"):
        raise SystemExit("the image runs as root")
    missing = []
    for file in sorted((stage.root / "usr/local").rglob("*")):
        if not file.is_file() or file.read_bytes()[:4] != b"\x7fELF":
            continue
        name = "/" + str(file.relative_to(stage.root))
        done = subprocess.run(["chroot", stage.root, "/usr/bin/ldd", name],
                              capture_output=True, text=True, env=stage.env,
                              check=False)
        missing += [f"{name}: {line.strip()}" for line in done.stdout.splitlines()
                    if "not found" in line]
    if missing:
        raise SystemExit("\n".join(missing))
    size = subprocess.run(["du", "-sm", stage.root], capture_output=True,
                          text=True, check=True).stdout.split()[0]
    print(f"{stage.root.name}: {size} MB, every library found")


def run(target: str) -> None:
    """compose.yaml's services, as the image's user, on loopback."""
    root = IMAGE / target
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # The root is read-only but for /tmp, as compose.yaml says.
    mount("--bind", root, root)
    mount_system(root)
    mount("-t", "tmpfs", "tmpfs", root / "tmp")
    (root / "model").mkdir(exist_ok=True)
    mount("--bind", ROOT / "models/tales", root / "model")
    mount("-o", "remount,bind,ro", root)
    services = json.loads((IMAGE / "compose.json").read_text())["services"]
    user = ["chroot", "--userspec=65532:65532", root]
    env = {"PATH": PATH, "TANDEM_LOG_FORMAT": "json"}
    processes = {}
    try:
        for name in ("router", "prefill", "decode"):
            processes[name] = subprocess.Popen(
                [*user, *services[name]["command"]], env=env)
        for name, process in processes.items():
            test = services[name]["healthcheck"]["test"]
            for _ in range(300):
                if process.poll() is not None:
                    raise SystemExit(f"{name} ended")
                if subprocess.run([*user, *test[1:]], env=env, check=False,
                                  capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)
            else:
                raise SystemExit(f"{name} does not become healthy")
        # The second is long enough to be prefilled on the other worker.
        for text in ("What is 7 + 5?", "Mia has a red ball. " * 12):
            body = {"messages": [{"role": "user", "content": text}],
                    "temperature": 0, "max_tokens": 16}
            request = urllib.request.Request(
                "http://127.0.0.1:8000/v1/chat/completions",
                data=json.dumps(body).encode(),
                headers={"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                said = json.loads(answer.read())["choices"][0]["message"]
            print("answer:", said["content"])
            if "7 + 5" in text and "12" not in said["content"]:
                raise SystemExit("a wrong answer")
        way = r'^tandem_handoff_total\{.*outcome="ok".*way="shm".*\} 1'
        for _ in range(50):  # gauges and counters are set once a second
            metrics = urllib.request.urlopen(
                "http://127.0.0.1:8001/metrics", timeout=5).read().decode()
            if re.search(way, metrics, re.MULTILINE):
                break
            time.sleep(0.1)
        else:
            print(*re.findall("tandem_handoff_total.*", metrics), sep="\n")
            raise SystemExit("the handoff did not go through shared memory")
        for name in ("decode", "prefill", "router"):
            processes[name].terminate()
            code = processes[name].wait(timeout=40)
            if code not in (143, -15):
                raise SystemExit(f"{name} ended with {code}")
    finally:
        for process in processes.values():
            process.kill()


if __name__ == "__main__":
    {"build": build, "run": run}[sys.argv[1]](*sys.argv[2:])
