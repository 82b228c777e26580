# SPDX-License-Identifier: Apache-2.0
"""lm-eval's `local-completions` against a running server that serves `tales`.

The loglikelihoods of a tiny multiple-choice task must be those of
`transformers` (lm_eval_tales.jsonl, tools/oracle/make_lm_eval_goldens.py), with
token ids as prompts, one and several a call.

Usage: lm_eval_client.py http://127.0.0.1:8000/v1 models/tales
"""

import json
import os
import pathlib
import sys
import tempfile

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


for size in (1, 4):
    run(sys.argv[1], sys.argv[2], size)
