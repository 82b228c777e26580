# SPDX-License-Identifier: Apache-2.0
"""Tandem's CPU backend beside llama.cpp and this machine's limits, one table.

llama.cpp is built natively (-march=native) from the sources inside PyPI's
llama-cpp-python. Random weights of each shape become a Hugging Face directory in
bf16 and GGUF files in bf16, q8_0 and q4_0, the latter by llama.cpp's own quantiser, which
gives the head of q4_0 eight bits, as Tandem's int4 does. Both programs run one after the other on the
same threads, figure by figure; every one is the median of --repeats runs after a
warm-up, Tandem's beside the mean of the limits right before and after it: on some hosts
memory gives half as much from one second to the next. llama.cpp's batched figures are
one run of 32 steps. llama.cpp always rounds the inputs of bf16 weights to bf16; Tandem's
are --activation-dtype, one for all rows.

Beside each ratio and share stands what is wanted of it, where something is:
--quick measures these rows alone, with two repeats unless told otherwise. --goals FILE
notes there which are met (goals.py).

Usage: build/venv/bin/python bench/compare_llama.py [--shapes 135m,500m]
         [--formats bf16,int8,int4,w8a8] [--activation-dtype f32|bf16|bf16-amx]
         [--threads 2] [--repeats 5] [--quick] [--goals FILE] [--work build/llama]
         [--binaries build/release/bin] [--no-amx]
Needs numpy and gguf (pip), a C++ compiler, cmake and ninja.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tarfile

import goals

ROOT = pathlib.Path(__file__).parents[1]
# hidden, layers, heads, kv heads, head dim, feed-forward, vocabulary
SHAPES = {"15m": (288, 6, 6, 6, 48, 768, 32000),
          "135m": (576, 30, 9, 3, 64, 1536, 49152),
          "500m": (896, 24, 14, 2, 64, 4864, 151936)}
# The peer's file.
PEER = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0", "w8a8": "q8_0"}
# Whose goals a format has.
GOAL_OF = {"w8a8": "int8"}
# Bytes of a number in layers and in the head; scales of rows are left out.
BYTES = {"bf16": (2.0, 2.0), "int8": (34 / 32, 34 / 32), "int4": (18 / 32, 34 / 32),
         "w8a8": (1.0, 34 / 32)}
# Whose peak in kernels_bench's limits is that of chains with these inputs.
PEAK = {"f32": "fma", "bf16": "pairs", "bf16-amx": "tiles"}
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
TARGETS = ("llama-bench", "llama-batched-bench", "llama-server", "llama-quantize")


def wanted(shape: str, fmt: str, what: str) -> tuple[float, float] | None:
    """At least this ratio to llama.cpp, and this share of the limit; of bf16's
    prefill of the FMA peak, whatever computes it. W8A8 is int8 by rows."""
    fmt = GOAL_OF.get(fmt, fmt)
    if what == "batch":
        return (5, 0.6) if shape == "135m" and fmt != "int4" else None
    if what == "prefill":
        return {"bf16": (1.8, 0.7), "int8": (2.5, 0.5)}.get(fmt)
    if fmt == "bf16":
        return (2.0, 0.75) if shape == "135m" else (1.4, 0.85)
    return 2.0, 0.8


def has_goal(shape: str, fmt: str, what: str, at: int) -> bool:
    """Quantised weights are wanted to be fast at short contexts."""
    short = at <= (512 if what == "prefill" else 128)
    return (wanted(shape, fmt, what) is not None
            and (fmt == "bf16" or what == "batch" or short))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(command: list, **options) -> str:
    done = subprocess.run([str(c) for c in command], text=True, capture_output=True,
                          check=False, **options)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def build_llama(work: pathlib.Path, amx: bool) -> pathlib.Path:
    """The folder with llama.cpp's programs."""
    build = work / ("build" if amx else "build-no-amx")
    binaries = build / "bin"
    if all((binaries / target).exists() for target in TARGETS):
        return binaries
    work.mkdir(parents=True, exist_ok=True)
    say("llama.cpp: fetching the sources from PyPI")
    run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary",
         "llama-cpp-python", "--dest", work, "llama-cpp-python"])
    archive = max(work.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    source = work / archive.name.removesuffix(".tar.gz") / "vendor/llama.cpp"
    say("llama.cpp: building")
    native = ["-DGGML_NATIVE=ON"]
    if not amx:
        native += [f"-DCMAKE_{language}_FLAGS={WITHOUT_AMX}" for language in ("C", "CXX")]
    run(["cmake", "-S", source, "-B", build, "-G", "Ninja",
         "-DCMAKE_BUILD_TYPE=Release", *native, "-DLLAMA_BUILD_TESTS=OFF",
         "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF",
         "-DLLAMA_BUILD_UI=OFF"])
    run(["ninja", "-C", build, *TARGETS])
    return binaries


def tensors(shape: str):
    """(Hugging Face name, GGUF name, values) of each tensor."""
    import numpy as np

    hidden, layers, heads, kv_heads, dim, wide, vocab = SHAPES[shape]
    rng = np.random.default_rng(0)

    def random(*size: int):
        return rng.standard_normal(size, np.float32) * np.float32(0.02)

    yield "model.embed_tokens.weight", "token_embd.weight", random(vocab, hidden)
    for layer in range(layers):
        hf, gguf = f"model.layers.{layer}.", f"blk.{layer}."
        for ours, theirs, rows, cols in (
                ("self_attn.q_proj", "attn_q", heads * dim, hidden),
                ("self_attn.k_proj", "attn_k", kv_heads * dim, hidden),
                ("self_attn.v_proj", "attn_v", kv_heads * dim, hidden),
                ("self_attn.o_proj", "attn_output", hidden, heads * dim),
                ("mlp.gate_proj", "ffn_gate", wide, hidden),
                ("mlp.up_proj", "ffn_up", wide, hidden),
                ("mlp.down_proj", "ffn_down", hidden, wide)):
            yield hf + ours + ".weight", gguf + theirs + ".weight", random(rows, cols)
        for ours, theirs in (("input_layernorm", "attn_norm"),
                             ("post_attention_layernorm", "ffn_norm")):
            yield (hf + ours + ".weight", gguf + theirs + ".weight",
                   np.ones(hidden, np.float32))
    yield "model.norm.weight", "output_norm.weight", np.ones(hidden, np.float32)


def write_huggingface(shape: str, out: pathlib.Path) -> None:
    import numpy as np

    hidden, layers, heads, kv_heads, dim, wide, vocab = SHAPES[shape]
    out.mkdir(parents=True, exist_ok=True)
    header, chunks, at = {}, [], 0
    for name, _, values in tensors(shape):
        bits = values.view(np.uint32)
        chunk = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(values.shape),
                        "data_offsets": [at, at + len(chunk)]}
        chunks.append(chunk)
        at += len(chunk)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (out / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(chunks)
    (out / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
        "vocab_size": vocab, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2}))


def write_gguf(shape: str, path: pathlib.Path) -> None:
    """The same weights in bf16."""
    import gguf

    hidden, layers, heads, kv_heads, dim, wide, vocab = SHAPES[shape]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(dim)
    writer.add_vocab_size(vocab)
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    words += [f"\u2581w{i}" for i in range(vocab - len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(vocab - 259)])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocab - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    bf16 = gguf.GGMLQuantizationType.BF16
    for _, name, values in tensors(shape):
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_checkpoint(shape: str, work: pathlib.Path) -> None:
    if not (work / shape / "config.json").exists():
        say(f"{shape}: making the checkpoint")
        write_huggingface(shape, work / shape)


def make_peer_files(shape: str, formats: list[str], work: pathlib.Path,
                    peer: pathlib.Path) -> None:
    source = work / f"{shape}.bf16.gguf"
    for kind in ["bf16", *(PEER[name] for name in formats)]:
        path = work / f"{shape}.{kind}.gguf"
        if path.exists():
            continue
        say(f"{shape}: making {path.name}")
        part = path.with_suffix(".part")
        if path == source:
            write_gguf(shape, part)
        else:
            run([peer / "llama-quantize", source, part, kind])
        part.rename(path)


def peer_bench(binaries, model, threads: int, repeats: int, prompt: int, steps: int,
               depth: int) -> float:
    """Median tokens/s of llama-bench."""
    out = run([binaries / "llama-bench", "-m", model, "-t", threads, "-r", repeats,
               "-p", prompt, "-n", steps, "-d", depth, "-b", 2048, "-ub", 512,
               "-ngl", 0, "-o", "json"])
    return statistics.median(json.loads(out)[0]["samples_ts"])


def peer_batch(binaries, model, threads: int, count: int) -> float:
    out = run([binaries / "llama-batched-bench", "-m", model, "-t", threads, "-tb", threads,
               "-c", count * 560, "-npp", 512, "-ntg", 32, "-npl", count, "-ngl", 0,
               "--output-format", "jsonl"])
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return lines[-1]["speed_tg"]


def ours(binaries, model, threads: int, repeats: int, fmt: str, dtype: str, what: str,
         at: int) -> float:
    flags = {"prefill": "", "decode": "", "batch": ""} | {what: str(at)}
    quantised = [] if fmt == "bf16" else ["--quantization", fmt]
    out = run([binaries / "cpu_bench", "--model", model, "--threads", threads,
               "--repeats", repeats, *quantised, "--activations", dtype,
               "--prefill", flags["prefill"], "--decode", flags["decode"],
               "--batch", flags["batch"]])
    return json.loads(out.splitlines()[-1])["tokens_per_second"]


def measure_limits(binaries, threads: int, size: int) -> dict:
    """Peaks, and the read bandwidth over `size` bytes."""
    out = run([binaries / "kernels_bench", "--threads", threads, "--quick", "--limits", size])
    return json.loads(out.splitlines()[-1])


class Work:
    """What one step reads and computes, by the shape's arithmetic."""

    def __init__(self, shape: str, fmt: str) -> None:
        hidden, layers, heads, kv_heads, dim, wide, vocab = SHAPES[shape]
        self.layer_numbers = layers * ((heads + 2 * kv_heads) * dim * hidden
                                       + heads * dim * hidden + 3 * wide * hidden)
        self.head_numbers = vocab * hidden
        self.quantised = fmt != "bf16"
        of_layers, of_head = BYTES[fmt]
        self.weight_bytes = self.layer_numbers * of_layers + self.head_numbers * of_head
        self.kv_bytes = 2 * layers * kv_heads * dim * 2  # of a position, bf16
        self.attention_flops = 4 * layers * heads * dim  # of a position and key

    def limit(self, what: str, at: int, dtype: str, limits: dict, read: float) -> float:
        """Tokens/s if nothing but the slower of arithmetic and reading counted."""
        # Attention: of chains with a bf16 cache. Pairs may be slower than FMA.
        attend = max(limits[PEAK[dtype]], limits["fma"])
        dot = limits["dot"] if self.quantised else attend
        if what == "prefill":
            attention = self.attention_flops * at * (at + 1) / 2 / attend
            products = 2 * self.layer_numbers * at / dot
            return at / (products + attention)
        count, context = (1, at) if what == "decode" else (at, 512)
        numbers = self.layer_numbers + self.head_numbers
        kv = count * context * self.kv_bytes
        seconds = max((self.weight_bytes + kv) / read,
                      2 * numbers * count / dot
                      + count * context * self.attention_flops / attend)
        return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="135m,500m")
    parser.add_argument("--formats", default="bf16,int8,int4,w8a8")
    parser.add_argument("--activation-dtype", default="f32", choices=PEAK)
    parser.add_argument("--work-items", default="prefill:512,prefill:2048,decode:128,"
                        "decode:2048,batch:16,batch:32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, help="five; with --quick two")
    parser.add_argument("--quick", action="store_true",
                        help="only what has a goal, two repeats")
    parser.add_argument("--goals", type=pathlib.Path, help="file to note in which are met")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/llama")
    parser.add_argument("--no-amx", action="store_true",
                        help="build llama.cpp for AVX-512 with VNNI and BF16 instead: where "
                        "its AMX kernels end with an illegal instruction")
    parser.add_argument("--llama", type=pathlib.Path, help="llama.cpp's programs, built before")
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build/release/bin")
    args = parser.parse_args()
    args.repeats = args.repeats or (2 if args.quick else 5)
    peer = args.llama or build_llama(args.work, not args.no_amx)
    shapes, formats = args.shapes.split(","), args.formats.split(",")
    items = [(what, int(at)) for what, at in
             (item.split(":") for item in args.work_items.split(","))]
    for shape in shapes:
        make_checkpoint(shape, args.work)
        make_peer_files(shape, formats, args.work, peer)
    print("| shape | weights | work | Tandem, tokens/s | llama.cpp | ratio | wanted | limit "
          "| of it | wanted |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for shape in shapes:
        for fmt in formats:
            work = Work(shape, fmt)
            size = int(work.weight_bytes)
            for what, at in items:
                if what == "batch" and (shape != "135m" or fmt == "int4"):
                    continue
                if args.quick and not has_goal(shape, fmt, what, at):
                    continue
                before = measure_limits(args.binaries, args.threads, size)
                mine = ours(args.binaries, args.work / shape, args.threads, args.repeats,
                            fmt, args.activation_dtype, what, at)
                after = measure_limits(args.binaries, args.threads, size)
                limits = {key: (before[key] + after[key]) / 2 for key in before}
                model = args.work / f"{shape}.{PEER[fmt]}.gguf"
                if what == "batch":
                    theirs = peer_batch(peer, model, args.threads, at)
                else:
                    prompt, steps, depth = (at, 0, 0) if what == "prefill" else (0, 32, at)
                    theirs = peer_bench(peer, model, args.threads, args.repeats, prompt,
                                        steps, depth)
                limit = work.limit(what, at, args.activation_dtype, limits,
                                   limits[str(size)])
                of_goal = mine / limit
                ratio = share = ""
                if has_goal(shape, fmt, what, at):
                    times, part = wanted(shape, fmt, what)
                    ratio, share = f"{times:g}", f"{100 * part:.0f} %"
                    if what == "prefill" and fmt == "bf16" and args.activation_dtype != "f32":
                        of_goal = mine / work.limit(what, at, "f32", limits, 0)
                        share += f" of FMA's; is {100 * of_goal:.0f} %"
                    goal = f"{shape} {GOAL_OF.get(fmt, fmt)} {what} {at}"
                    goals.note(args.goals, f"{goal}, ratio", mine >= times * theirs)
                    goals.note(args.goals, f"{goal}, share", of_goal >= part)
                print(f"| {shape} | {fmt} | {what} {at} | {mine:.4g} | {theirs:.4g} | "
                      f"{mine / theirs:.2f} | {ratio} | {limit:.4g} | "
                      f"{100 * mine / limit:.0f} % | {share} |", flush=True)
    load = os.getloadavg()
    print(f"\n--activation-dtype {args.activation_dtype}, {args.threads} threads, medians "
          f"of {args.repeats}; load averages at the end "
          f"{load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f}.")


if __name__ == "__main__":
    main()
