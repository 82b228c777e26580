# SPDX-License-Identifier: Apache-2.0
"""Figures of the whole system on CPUs beside their limits or peers, one table.

  streams  32 open streams of the 135M shape in bf16, 128 tokens in and 64 out, beside
           llama-server with 32 slots on as many threads: output tokens/s and p99 of the
           time per output token. Each server takes the same lengths from a client of
           its own protocol (`tandem bench` over gRPC, and HTTP from here), 32 requests
           in flight, none sharing a prefix; Tandem is one decode worker that computes
           its prompts itself.
  router   CPU of the router process per streamed token at 256 streams of the embedded
           model, text included, beside a bare gRPC relay of messages of 32 bytes in a
           process of its own at the same pace.
  handoff  shm beside one thread's memcpy, and grpc beside one loopback gRPC stream of
           1 MiB messages; and the share of prefill's time after which KV still moves,
           1024 tokens of the 135M shape between two processes.
  prefix   time to the first token of a prompt whose first 4000 tokens were seen before.
  guesses  output tokens/s of one stream after another, split, of the 135M shape, which
           with random weights and temperature 0 falls into a loop: with guesses looked
           up in the text so far, beside none.

Usage: build/venv/bin/python bench/system_goals.py [--only streams,router,handoff,prefix,
         guesses] [--threads 2] [--activation-dtype auto] [--quick] [--goals FILE]
         [--work build/llama] [--no-amx] [--binaries ...]
--goals notes in that file which are met (goals.py).
Needs numpy and gguf (pip), and from the build: tandem and its processes,
handoff_bench, rpc_relay_bench.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import threading
import time

import cluster
import compare_llama
import goals

ROOT = pathlib.Path(__file__).parents[1]
ROUTER_STREAMS = 256
PREFIX = 4000


def row(options, what: str, measured: str, beside: str, ratio: float, wanted: str,
        met: bool) -> None:
    goals.note(options.goals, what, met)
    print(f"| {what} | {measured} | {beside} | {ratio:.2f} | {wanted} | "
          f"{'yes' if met else 'no'} |", flush=True)


def served_model(work: pathlib.Path) -> pathlib.Path:
    """The 135M shape with random weights, and the embedded model's tokenizer."""
    compare_llama.make_checkpoint("135m", work)
    model = work / "135m-served"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        if not (model / name).exists():
            (model / name).symlink_to(work.resolve() / "135m" / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models/tales" / name, model)
    return model


def numbers(options) -> tuple[str, ...]:
    """What workers of the 135M shape are told of number formats."""
    return "--kv-cache-dtype", "bf16", "--activation-dtype", options.activation_dtype


def percentile(values: list[float], percent: float) -> float:
    values = sorted(values)
    at = (len(values) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


# ---- 32 streams.

class LlamaServer:
    def __init__(self, binaries, model, threads: int, slots: int, log) -> None:
        self.port = cluster.free_port()
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [str(binaries / "llama-server"), "-m", str(model), "-t", str(threads),
                 "-tb", str(threads), "-np", str(slots), "-c", str(slots * 256), "-ngl", "0",
                 "--host", "127.0.0.1", "--port", str(self.port), "--cache-ram", "0"],
                stdout=out, stderr=out)
        for _ in range(1200):
            if self.process.poll() is None and self.healthy():
                return
            time.sleep(0.1)
        self.close()
        raise SystemExit(f"llama-server did not start; see {log}")

    def healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def stream(self, prompt: list[int], tokens: int) -> list[float]:
        """When each piece of the answer came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(
            "POST", "/completion",
            json.dumps({"prompt": prompt, "n_predict": tokens, "stream": True,
                        "temperature": 0, "ignore_eos": True, "cache_prompt": False,
                        "return_tokens": True}),
            {"Content-Type": "application/json"})
        arrivals = []
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                arrivals += [time.monotonic()] * len(event.get("tokens", []))
        return arrivals


def llama_load(server: LlamaServer, requests: int, in_flight: int) -> tuple[float, list[float]]:
    """Output tokens/s, and every request's time per output token in ms."""
    rng = random.Random(0)
    prompts = [[rng.randrange(300, 49000) for _ in range(128)] for _ in range(requests)]
    per_token, count, lock = [], [0], threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if not prompts:
                    return
                prompt = prompts.pop()
            arrivals = server.stream(prompt, 64)
            with lock:
                count[0] += len(arrivals)
                per_token.append((arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) * 1e3)

    begin = time.monotonic()
    clients = [threading.Thread(target=client) for _ in range(in_flight)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return count[0] / (time.monotonic() - begin), per_token


def streams(options) -> None:
    model = served_model(options.work)
    peer = compare_llama.build_llama(options.work, not options.no_amx)
    compare_llama.make_peer_files("135m", ["bf16"], options.work, peer)
    requests = 64 if options.quick else 128
    with cluster.Cluster(options.binaries, model, options.work / "streams.log", "--prefill", "0",
                         "--decode", "1", "--threads", str(options.threads),
                         *numbers(options)) as running:
        def load(count: int) -> dict:
            return running.load(options.work / "run.json", "--max-concurrency", "32",
                                "--num-prompts", str(count), "--random-input-len", "128",
                                "--random-output-len", "64", "--no-detokenize",
                                "--temperature", "0")

        load(32)  # both after a warm-up: memory is touched for the first time
        run = load(requests)
    server = LlamaServer(peer, options.work / "135m.bf16.gguf", options.threads, 32,
                         options.work / "llama-server.log")
    try:
        llama_load(server, 32, 32)
        rate, per_token = llama_load(server, requests, 32)
    finally:
        server.close()
    ours = run["output_throughput"]
    row(options, "32 streams, output tokens/s", f"{ours:.1f}", f"llama-server {rate:.1f}",
        ours / rate, "at least 4", ours / rate >= 4)
    mine, theirs = run["p99_tpot_ms"], percentile(per_token, 99)
    row(options, "32 streams, p99 TPOT, ms", f"{mine:.0f}", f"llama-server {theirs:.0f}",
        theirs / mine, "at least 3", theirs / mine >= 3)


# ---- The router.

def router(options) -> None:
    requests = ROUTER_STREAMS * (2 if options.quick else 4)
    with cluster.Cluster(options.binaries, ROOT / "models/tales", options.work / "router.log",
                         "--prefill", "0", "--decode", "1", "--threads", "1",
                         "--max-num-seqs", str(ROUTER_STREAMS)) as running:
        def load(count: int) -> dict:
            return running.load(options.work / "run.json", "--max-concurrency",
                                str(ROUTER_STREAMS), "--num-prompts", str(count),
                                "--random-input-len", "16", "--random-output-len", "128")

        load(ROUTER_STREAMS)
        before = running.cpu_seconds("tandem-router")
        run = load(requests)
        cpu = running.cpu_seconds("tandem-router") - before
    mine = cpu / run["total_output_tokens"] * 1e6
    pace = max(1, round(run["median_tpot_ms"] * 1e3))
    relay = json.loads(compare_llama.run(
        [options.tests / "rpc_relay_bench", ROUTER_STREAMS, 256, pace]))["cpu_us_per_message"]
    row(options, "router, CPU us per token at 256 streams", f"{mine:.1f}", "", mine / 20,
        "at most 20 us", mine <= 20)
    row(options, "router beside a bare relay at the same pace", f"{mine:.1f}",
        f"relay {relay:.1f}", mine / relay, "at most 1.5", mine / relay <= 1.5)


# ---- The handoff.

def handoff(options) -> None:
    runs = [json.loads(compare_llama.run([options.binaries / "handoff_bench"]))
            for _ in range(3)]
    figures = {name: max(run[name] for run in runs) for name in runs[0]}
    bulk = json.loads(compare_llama.run([options.tests / "rpc_relay_bench", "bulk"]))
    stream = bulk["gigabytes_per_second"]
    row(options, "handoff by shm, GB/s", f"{figures['shm']:.2f}",
        f"memcpy {figures['memcpy']:.2f}",
        figures["shm"] / figures["memcpy"], "at least 0.8",
        figures["shm"] / figures["memcpy"] >= 0.8)
    row(options, "handoff by grpc, GB/s", f"{figures['grpc']:.2f}",
        f"one gRPC stream {stream:.2f}", figures["grpc"] / stream, "at least 0.6",
        figures["grpc"] / stream >= 0.6)
    model = served_model(options.work)
    for way in ("shm", "grpc"):
        with cluster.Cluster(options.binaries, model, options.work / f"handoff-{way}.log",
                             "--prefill", "1", "--decode", "1", "--threads", "1",
                             "--handoff", way, *numbers(options)) as running:
            run = running.load(options.work / "run.json", "--max-concurrency", "1",
                               "--num-prompts", "4" if options.quick else "8",
                               "--random-input-len", "1024", "--random-output-len", "4",
                               "--placement", "split", "--no-detokenize")
        split = [r for r in run["requests"] if r["split"]]
        exposed = statistics.median(r["handoff_exposed_ms"] for r in split)
        prefill = statistics.median(r["prefill_ms"] for r in split)
        row(options, f"{way} not hidden behind prefill, ms", f"{exposed:.1f}",
            f"prefill {prefill:.0f}", exposed / prefill, "under 0.03", exposed / prefill < 0.03)


# ---- Prefixes.

def prefix(options) -> None:
    model = served_model(options.work)
    with cluster.Cluster(options.binaries, model, options.work / "prefix.log", "--prefill", "1",
                         "--decode", "1", "--threads", "1", "--max-model-len", "8192",
                         *numbers(options)) as running:
        run = running.load(options.work / "run.json", "--max-concurrency", "1",
                           "--num-prompts", "4" if options.quick else "8",
                           "--random-prefix-len", str(PREFIX), "--random-input-len", "16",
                           "--random-output-len", "4", "--no-detokenize")
    first, *later = [1e3 * (r["arrivals"][0][0] - r["sent_s"]) for r in run["requests"]]
    repeated = statistics.median(later)
    row(options, f"TTFT of {PREFIX} tokens seen before, ms", f"{repeated:.0f}",
        f"first time {first:.0f}",
        repeated / first, "under 0.05", repeated / first < 0.05)


# ---- Guesses.

def guesses(options) -> None:
    model = served_model(options.work)
    lookups = '{"method": "ngram", "num_speculative_tokens": 8}'
    runs = []
    for flags in ((), ("--speculative-config", lookups)):
        with cluster.Cluster(options.binaries, model, options.work / "guesses.log",
                             "--prefill", "1", "--decode", "1",
                             "--threads", str(options.threads),
                             *numbers(options), *flags) as running:
            runs.append(running.load(
                options.work / "run.json", "--max-concurrency", "1",
                "--num-prompts", "4" if options.quick else "12",
                "--random-input-len", "96", "--random-output-len", "384",
                "--placement", "split", "--no-detokenize", "--temperature", "0"))
    without, with_guesses = (run["output_throughput"] for run in runs)
    ratio = with_guesses / without
    row(options, "one stream with guesses, output tokens/s", f"{with_guesses:.1f}",
        f"none {without:.1f}", ratio, "at least 1.6", ratio >= 1.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="streams,router,handoff,prefix,guesses")
    parser.add_argument("--threads", type=int, default=2, help="of each server in `streams`")
    parser.add_argument("--activation-dtype", default="auto",
                        help="of the 135M shape; llama.cpp always rounds to bf16")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--goals", type=pathlib.Path, help="file to note in which are met")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/llama")
    parser.add_argument("--no-amx", action="store_true", help="as compare_llama.py")
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument("--tests", type=pathlib.Path, default=ROOT / "build/release/tests")
    options = parser.parse_args()
    for program in (options.binaries / "tandem", options.binaries / "handoff_bench",
                    options.tests / "rpc_relay_bench"):
        if not program.exists():
            parser.error(f"{program} is missing: ninja -C {options.binaries.parent} "
                         f"{program.name}")
    options.work.mkdir(parents=True, exist_ok=True)
    parts = {"streams": streams, "router": router, "handoff": handoff, "prefix": prefix,
             "guesses": guesses}
    print("| figure | Tandem | beside | ratio | wanted | met |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.only.split(","):
        parts[name](options)
    print(f"\nLoad averages at the end: {os.getloadavg()[0]:.1f}, {os.getloadavg()[1]:.1f}.")


if __name__ == "__main__":
    main()
