# SPDX-License-Identifier: Apache-2.0
"""GuideLLM, a load generator that many know, against a running server: every
request succeeds, and its counts of tokens are the server's.

Usage: guidellm_client.py http://127.0.0.1:8000 MODEL_DIRECTORY
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

BASE, MODEL = sys.argv[1:]
REQUESTS, TOKENS = 8, 16


def check(what: str, got, want) -> None:
    if got != want:
        raise SystemExit(f"guidellm, {what}: {got!r}, not {want!r}")


def prompt_tokens(body: dict) -> int:
    plain = {key: body[key] for key in ("model", "messages")} | {"max_tokens": 1}
    request = urllib.request.Request(
        f"{BASE}/v1/chat/completions", json.dumps(plain).encode(),
        {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["usage"]["prompt_tokens"]


with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / "report.json"
    subprocess.run(
        [pathlib.Path(sys.executable).parent / "guidellm", "run", "--disable-console",
         "--backend", f"kind=openai_http,target={BASE},model=tales",
         "--profile", "kind=concurrent,streams=4",
         "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}",
         "--tokenizer", f"kind=hf_auto,model={MODEL}",
         "--output", f"kind=json,path={report}"],
        check=True, timeout=300)
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
check("errors", len(requests["errored"]), 0)
check("successes", len(requests["successful"]), REQUESTS)
for one in requests["successful"]:
    check("output tokens", one["output_metrics"]["text_tokens"], TOKENS)
    check("tokens streamed", one["info"]["timings"]["token_iterations"], TOKENS)
    check("is text", bool(one["output"]), True)
    body = json.loads(one["request_args"])["body"]
    check("prompt tokens", one["input_metrics"]["text_tokens"], prompt_tokens(body))
print("guidellm: ok")
