# SPDX-License-Identifier: Apache-2.0
"""What splitting prefill from decode does on this machine, one table.

Two worker processes of one thread each: a prefill and a decode worker, which takes
no prompt (split) or those that would be done sooner there (auto); or two decode
workers that compute their prompts themselves, in chunks between their steps (both).
Each takes the same open-loop load from `tandem bench`, at several rates.
The model has random weights and the embedded model's tokenizer.

Usage: build/venv/bin/python bench/split_or_both.py [--rates 0.5,1,1.5]
         [--seconds 40] [--input 512] [--output 64] [--goodput ttft:2000,tpot:100]
         [--work build/split] [--binaries build/release/bin]
Needs numpy (pip).
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys

import cluster
import compare_llama

ROOT = pathlib.Path(__file__).parents[1]
# The 135M shape, with as few words as the tokenizer has.
compare_llama.SHAPES["split"] = (576, 30, 9, 3, 64, 1536, 1024)
# Prefill and decode workers, and where prompts go.
LAYOUTS = {"split": ("1", "1", "split"), "auto": ("1", "1", "auto"),
           "both": ("0", "2", "auto")}


def measure(options, running: cluster.Cluster, rate: float, placement: str) -> dict:
    count = max(8, round(rate * options.seconds))
    return running.load(
        options.work / "run.json", "--request-rate", str(rate), "--num-prompts", str(count),
        "--random-input-len", str(options.input), "--random-output-len",
        str(options.output), "--random-range-ratio", "0.5", "--goodput", options.goodput,
        "--placement", placement)


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
          "| ITL p99 | good requests/s | split | failed |")
    print("|" + " --- |" * 10)
    for rate in (float(r) for r in options.rates.split(",")):
        for layout, (prefill, decode, placement) in LAYOUTS.items():
            with cluster.Cluster(options.binaries, model, options.work / f"{layout}.log",
                                 "--prefill", prefill, "--decode", decode,
                                 "--threads", "1") as running:
                run = measure(options, running, rate, placement)
            print(f"| {rate:g} | {layout} | {run['median_ttft_ms']:.0f} | "
                  f"{run['p99_ttft_ms']:.0f} | {run['median_tpot_ms']:.1f} | "
                  f"{run['p99_tpot_ms']:.1f} | {run['p99_itl_ms']:.1f} | "
                  f"{run['request_goodput']:.2f} | "
                  f"{run['split_requests']} of {run['completed']} | {run['failed']} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
