# SPDX-License-Identifier: Apache-2.0
"""lm-eval's `local-completions` and `local-chat-completions` against a running
server that serves `tales`.

The loglikelihoods of a tiny multiple-choice task must be those of
`transformers` (lm_eval_tales.jsonl, tools/oracle/make_lm_eval_goldens.py), with
token ids as prompts, one and several a call. Texts that it has generated up to a
stop string must be what the server writes without one, cut here.

Usage: lm_eval_client.py http://127.0.0.1:8000/v1 models/tales
"""

import json
import os
import pathlib
import sys
import tempfile
import urllib.request

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1",
                  HF_HOME=tempfile.mkdtemp())
import lm_eval

DATA = pathlib.Path(__file__).with_name("lm_eval_tales.jsonl")
# bf16 weights and activations against float64 ones.
TOLERANCE = 0.05

TASK = {
    "task": "tales",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(DATA)}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}


def run(base: str, tokenizer: str, batch: int) -> None:
    result = lm_eval.simple_evaluate(
        model="local-completions", tasks=[dict(TASK)], batch_size=batch,
        model_args={"model": "tales", "base_url": f"{base}/completions",
                    "tokenizer": tokenizer, "max_length": 512, "num_concurrent": 1},
        bootstrap_iters=0)
    samples = sorted(result["samples"]["tales"], key=lambda s: s["doc_id"])
    documents = [json.loads(line) for line in DATA.read_text().splitlines()]
    if len(samples) != len(documents):
        raise SystemExit(f"{len(samples)} samples of {len(documents)}")
    worst = 0.0
    for sample, document in zip(samples, documents):
        got = [float(choice[0][0]) for choice in sample["resps"]]
        for have, want in zip(got, document["loglikelihoods"], strict=True):
            worst = max(worst, abs(have - want))
        greedy = [str(choice[0][1]) == "True" for choice in sample["resps"]]
        if greedy != document["greedy"]:
            raise SystemExit(f"{document['context']}: greedy {greedy}")
    if worst > TOLERANCE:
        raise SystemExit(f"a loglikelihood is off by {worst}")
    print(f"lm_eval, batches of {batch}: ok, off by {worst:.2g} at most", flush=True)


UNTIL = [".", "\n"]
MOST = 24
GENERATE = {
    **{key: TASK[key] for key in ("dataset_path", "dataset_kwargs", "test_split")},
    "task": "tales_generate",
    "output_type": "generate_until",
    "doc_to_text": "{{context}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": UNTIL, "max_gen_toks": MOST, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


def written(base: str, path: str, prompt: dict) -> str:
    """The server's greedy text, without stop strings."""
    body = {"model": "tales", "temperature": 0, "max_tokens": MOST, **prompt}
    request = urllib.request.Request(
        f"{base}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def generate(base: str, tokenizer: str, model: str, path: str) -> None:
    chat = path.startswith("chat")
    result = lm_eval.simple_evaluate(
        model=model, tasks=[dict(GENERATE)], batch_size=1, apply_chat_template=chat,
        model_args={"model": "tales", "base_url": f"{base}/{path}", "max_length": 512,
                    "tokenizer": tokenizer, "num_concurrent": 1, "tokenized_requests": False},
        bootstrap_iters=0)
    samples = sorted(result["samples"]["tales_generate"], key=lambda s: s["doc_id"])
    documents = [json.loads(line) for line in DATA.read_text().splitlines()]
    if len(samples) != len(documents):
        raise SystemExit(f"{len(samples)} samples of {len(documents)}")
    stopped = 0
    for sample, document in zip(samples, documents):
        context = document["context"]
        prompt = ({"messages": [{"role": "user", "content": context}]}
                  if chat else {"prompt": context})
        whole = written(base, path, prompt)
        ends = [whole.find(stop) for stop in UNTIL if stop in whole]
        want = whole[:min(ends)] if ends else whole
        stopped += bool(ends)
        if sample["resps"][0][0] != want:
            raise SystemExit(f"{context!r}: {sample['resps'][0][0]!r}, expected {want!r}")
    if stopped == 0:
        raise SystemExit("no text had a stop string: this checks nothing")
    print(f"lm_eval, {model}, generate_until: ok, {stopped} of {len(samples)} stopped",
          flush=True)


for size in (1, 4):
    run(sys.argv[1], sys.argv[2], size)
generate(sys.argv[1], sys.argv[2], "local-completions", "completions")
generate(sys.argv[1], sys.argv[2], "local-chat-completions", "chat/completions")
