# SPDX-License-Identifier: Apache-2.0
"""What splitting prefill from decode does on this machine, one table.

Two worker processes of one thread each: once a prefill and a decode worker, once
two decode workers that compute their prompts themselves, in chunks between their
steps. Each takes the same open-loop load from `tandem bench`, at several rates.
The model has random weights and the embedded model's tokenizer.

Usage: build/venv/bin/python bench/split_or_both.py [--rates 0.5,1,1.5]
         [--seconds 40] [--input 512] [--output 64] [--goodput ttft:2000,tpot:100]
         [--work build/split] [--binaries build/release/bin]
Needs numpy (pip).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import compare_llama

ROOT = pathlib.Path(__file__).parents[1]
# The 135M shape, with as few words as the tokenizer has.
compare_llama.SHAPES["split"] = (576, 30, 9, 3, 64, 1536, 1024)
LAYOUTS = {"split": ("1", "1"), "both": ("0", "2")}  # prefill and decode workers


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    def __init__(self, binaries, model, layout: str, work):
        prefill, decode = LAYOUTS[layout]
        self.router = f"127.0.0.1:{free_port()}"
        log = work / f"{layout}.log"
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [str(binaries / "tandem"), "serve", str(model), "--device", "cpu",
                 "--prefill", prefill, "--decode", decode, "--threads", "1",
                 "--grpc-port", self.router.split(":")[1],
                 "--port", str(free_port())], stdout=out, stderr=out)
        for _ in range(600):
            if "Tandem is ready" in log.read_text():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.close()
        raise SystemExit(f"the cluster did not start; see {log}")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def measure(options, cluster: Cluster, rate: float) -> dict:
    out = options.work / "run.json"
    count = max(8, round(rate * options.seconds))
    done = subprocess.run(
        [str(options.binaries / "tandem"), "bench", "--router", cluster.router,
         "--request-rate", str(rate), "--num-prompts", str(count),
         "--random-input-len", str(options.input), "--random-output-len",
         str(options.output), "--random-range-ratio", "0.5", "--goodput",
         options.goodput, "--json", str(out), "--no-progress"],
        capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="0.5,1,1.5")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--goodput", default="ttft:2000,tpot:100")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/split")
    parser.add_argument("--binaries", type=pathlib.Path,
                        default=ROOT / "build/release/bin")
    options = parser.parse_args()
    model = options.work / "model"
    if not (model / "config.json").exists():
        compare_llama.write_huggingface("split", model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "models/tales" / name, model)
    print(f"prompts of {options.input} tokens, outputs of {options.output}, both "
          f"within a half; good: {options.goodput}\n")
    print("| requests/s | workers | TTFT p50, ms | TTFT p99 | TPOT p50 | TPOT p99 "
          "| ITL p99 | good requests/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for rate in (float(r) for r in options.rates.split(",")):
        for layout in LAYOUTS:
            cluster = Cluster(options.binaries, model, layout, options.work)
            try:
                run = measure(options, cluster, rate)
            finally:
                cluster.close()
            print(f"| {rate:g} | {layout} | {run['median_ttft_ms']:.0f} | "
                  f"{run['p99_ttft_ms']:.0f} | {run['median_tpot_ms']:.1f} | "
                  f"{run['p99_tpot_ms']:.1f} | {run['p99_itl_ms']:.1f} | "
                  f"{run['request_goodput']:.2f} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
