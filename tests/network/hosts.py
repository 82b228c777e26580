# SPDX-License-Identifier: Apache-2.0
"""A small network on this machine: hosts are network namespaces on one bridge,
and the way between two of them can be cut, lossy, slow or reset.

Each host drops what reaches it (nft, `input`), so that one direction can go and
the other stay, as where a route or a cable is bad; what a host sends is queued at
a rate (tc, tbf). netem is not asked for: many kernels lack it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

SUBNET = "10.77.0"
CLIENTS = f"{SUBNET}.1"  # whose own connections are left alone
TABLE = "faults"
TOOLS = ("ip", "nft", "tc", "nsenter", "setpriv", "unshare")
INSIDE = "TANDEM_NETWORK_INSIDE"


def run(*words: str, text: str | None = None) -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}\n{text or ''}")


def enter_own_network() -> str:
    """Runs this program again in a network of its own, so that nothing of the
    machine's is touched and all ends with it. What is missing, where that does
    not go; "" inside."""
    if os.environ.get(INSIDE):
        run("ip", "link", "set", "lo", "up")
        return ""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"no {', '.join(lacking)} (scripts/setup.sh --tests)"
    new = ["unshare", "--net"]
    if os.geteuid() != 0:
        new += ["--user", "--map-root-user"]
    probe = "nft add table inet probe && ip link add v0 type veth peer name v1"
    done = subprocess.run([*new, "sh", "-c", probe], capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        return f"no network namespaces here: {done.stderr.strip()}"
    os.environ[INSIDE] = "1"
    os.execvp(new[0], [*new, sys.executable, "-B", *sys.argv])


class Host:
    """A namespace with one interface, `eth0`, and the faults of what reaches it."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"{SUBNET}.{number}"
        self._link = f"v{number}"
        self._rules: dict[str, str] = {}
        # It holds the namespace and ends with this process.
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c",
             "echo; exec sleep infinity"], stdout=subprocess.PIPE)
        self._holder.stdout.readline()
        self._path = f"/proc/{self._holder.pid}/ns/net"
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0",
            "netns", str(self._holder.pid))
        run("ip", "link", "set", self._link, "master", "br0", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "link", "set", "lo", "up")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()

    def words(self, *words: str) -> list[str]:
        """The command line that runs these in the namespace and ends with us."""
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={self._path}",
                *words]

    def run(self, *words: str, text: str | None = None) -> None:
        run(*self.words(*words), text=text)

    def drop_from(self, other: Host) -> None:
        self._add(f"from {other.name}", f"ip saddr {other.address} drop")

    def lose(self, percent: int) -> None:
        self._add("loss", f"ip saddr != {CLIENTS} meta l4proto tcp "
                  f"numgen random mod 100 < {percent} drop")

    def reset(self, per_second: int) -> None:
        """Answers so many segments of connections that exist with a reset."""
        self._add("reset", f"ip saddr != {CLIENTS} tcp flags & (syn | rst) == 0 "
                  f"limit rate {per_second}/second burst 1 packets "
                  "reject with tcp reset")

    def slow(self, rate: str) -> None:
        """Both ways: `rate` as tc has it, "1mbit"."""
        tbf = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        self.run("tc", "qdisc", "replace", "dev", "eth0", *tbf)
        run("tc", "qdisc", "replace", "dev", self._link, *tbf)

    def heal(self) -> None:
        self._rules.clear()
        self._apply()
        for words in (self.words("tc", "qdisc", "del", "dev", "eth0", "root"),
                      ["tc", "qdisc", "del", "dev", self._link, "root"]):
            subprocess.run(words, capture_output=True, check=False)  # may have none

    def _add(self, name: str, rule: str) -> None:
        self._rules[name] = rule
        self._apply()

    def _apply(self) -> None:
        chain = "\n".join(["type filter hook input priority 0; policy accept;",
                           "iif lo accept",
                           *self._rules.values()])
        # As one transaction: there is no moment without rules.
        self.run("nft", "-f", "-", text=f"table inet {TABLE}\n"
                 f"delete table inet {TABLE}\n"
                 f"table inet {TABLE} {{\nchain input {{\n{chain}\n}}\n}}\n")


class Network:
    """Hosts by name on one bridge, on which this process sits too, as .1."""

    def __init__(self, names: list[str]) -> None:
        run("ip", "link", "add", "br0", "type", "bridge")
        run("ip", "addr", "add", f"{CLIENTS}/24", "dev", "br0")
        run("ip", "link", "set", "br0", "up")
        self.hosts = {name: Host(name, 10 + i) for i, name in enumerate(names)}

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, a: str, b: str, way: str) -> None:
        """`way`: what is lost, "both", "from" (what a sends) or "to" (what b
        sends)."""
        if way in ("both", "from"):
            self[b].drop_from(self[a])
        if way in ("both", "to"):
            self[a].drop_from(self[b])

    def heal(self) -> None:
        for host in self.hosts.values():
            host.heal()

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
