# SPDX-License-Identifier: Apache-2.0
"""`tandem pull` against a hub in this process (hub_server.py): what lands in
the cache, what is asked for, and what is said when it fails.

    python3 tests/cli/hub_test.py build/release/bin/tandem
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from hub_server import COMMIT, Hub, Repository

TANDEM = ""
SOURCE = pathlib.Path(__file__).resolve().parents[2]
WEIGHTS = bytes(range(256)) * 8000  # 2 MB
MODEL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "quantize_config.json": b'{"bits": 4}',
    "hf_quant_config.json": b'{"quantization": {"quant_algo": "FP8"}}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    # None of these is needed.
    "pytorch_model.bin": b"pickle",
    "consolidated.00.pth": b"pickle",
    "README.md": b"# A model",
    "onnx/model.safetensors": b"other",
    "model.gguf": b"other",
}
NEEDED = {
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}


class HubTest(unittest.TestCase):
    def setUp(self):
        self.hub = Hub()
        self.addCleanup(self.hub.close)
        self.hub.repositories["org/tiny"] = Repository(dict(MODEL))
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)
        self.cache = self.home / "hub"

    def pull(self, *arguments: str, command="pull", **environment: str):
        env = {name: value for name, value in os.environ.items() if "HF_" not in name}
        env |= {"HF_HOME": str(self.home), "HF_ENDPOINT": self.hub.endpoint}
        env |= environment
        return subprocess.run(
            [TANDEM, command, *arguments],
            check=False,
            env=env,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def assert_pulled(self, result) -> pathlib.Path:
        self.assertEqual(result.returncode, 0, result.stderr)
        return pathlib.Path(result.stdout.strip())

    def assert_fails(self, result, *words: str):
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        last = result.stderr.strip().splitlines()[-1]
        for word in words:
            self.assertIn(word, last)

    def test_cache_has_the_layout_of_huggingface_hub(self):
        snapshot = self.assert_pulled(self.pull("org/tiny"))
        root = self.cache / "models--org--tiny"
        self.assertEqual(snapshot, root / "snapshots" / COMMIT)
        self.assertEqual((root / "refs" / "main").read_text(), COMMIT)
        self.assertEqual({path.name for path in snapshot.iterdir()}, NEEDED)
        for path in snapshot.iterdir():
            self.assertEqual(path.read_bytes(), MODEL[path.name])
            target = pathlib.Path(os.readlink(path))
            self.assertEqual(target.parts[:3], ("..", "..", "blobs"))
        # Weak marks and quotes are no part of a name.
        for blob in (root / "blobs").iterdir():
            self.assertRegex(blob.name, "^([0-9a-f]{40}|[0-9a-f]{64})$")
        self.assertFalse(self.hub.leaked)

    def test_plans_and_explanations_fetch_the_configuration_alone(self):
        config = (SOURCE / "models/tales/config.json").read_bytes()
        self.hub.repositories["org/tiny"] = Repository({**MODEL, "config.json": config})
        for words in (
            ["plan", "org/tiny", "--memory", "8GiB"],
            ["explain", "org/tiny", "--no-machine"],
        ):
            result = self.pull(*words[1:], command=words[0])
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("org/tiny", result.stdout)
        (snapshot,) = (self.cache / "models--org--tiny/snapshots").iterdir()
        self.assertEqual(
            {path.name for path in snapshot.iterdir()},
            {"config.json", "quantize_config.json", "hf_quant_config.json"},
        )

    def test_weights_under_a_name_of_their_own(self):
        name = "gptq_model-4bit-128g.safetensors"
        model = {**MODEL, name: WEIGHTS, "adapter_model.safetensors": b"lora"}
        model["consolidated.safetensors"] = b"of Mistral's own format"
        del model["model.safetensors"]
        self.hub.repositories["org/tiny"] = Repository(dict(model))
        snapshot = self.assert_pulled(self.pull("org/tiny"))
        self.assertEqual(
            {path.name for path in snapshot.iterdir()},
            NEEDED - {"model.safetensors"} | {name},
        )
        offline = self.pull("org/tiny", HF_HUB_OFFLINE="1")
        self.assertEqual(self.assert_pulled(offline), snapshot)
        # Which of two is the model cannot be known.
        self.hub.repositories["org/two"] = Repository({**model, "b.safetensors": WEIGHTS})
        self.assert_fails(self.pull("org/two"), "org/two", "model.safetensors")

    def test_what_is_there_is_not_fetched_again(self):
        self.assert_pulled(self.pull("org/tiny"))
        self.hub.requests.clear()
        self.assert_pulled(self.pull("org/tiny"))
        self.assertEqual(self.hub.requests, ["GET /api/models/org/tiny/revision/main"])

    def test_offline_and_unreachable_use_the_cache(self):
        snapshot = self.assert_pulled(self.pull("org/tiny"))
        self.hub.requests.clear()
        offline = self.pull("org/tiny", HF_HUB_OFFLINE="1")
        self.assertEqual(self.assert_pulled(offline), snapshot)
        self.assertEqual(self.hub.requests, [])
        gone = self.pull("org/tiny", HF_ENDPOINT="http://127.0.0.1:1")
        self.assertEqual(self.assert_pulled(gone), snapshot)
        self.assertIn("using the cache", gone.stderr)

        (snapshot / "model.safetensors").unlink()
        missing = self.pull("org/tiny", HF_HUB_OFFLINE="1")
        self.assert_fails(missing, "HF_HUB_OFFLINE is set", "model.safetensors")
        never = self.pull("org/other", HF_HUB_OFFLINE="true")
        self.assert_fails(never, "org/other", "directory")

    def test_a_cut_connection_goes_on_where_it_ended(self):
        self.hub.cut_after = 700_000
        result = self.pull("org/tiny")
        snapshot = self.assert_pulled(result)
        self.assertEqual((snapshot / "model.safetensors").read_bytes(), WEIGHTS)
        ranges = [line for line in self.hub.requests if "bytes=" in line]
        self.assertTrue(ranges)
        begin = int(ranges[0].split("bytes=")[1].rstrip("-"))
        self.assertGreater(begin, 0)
        self.assertLessEqual(begin, 700_000)

    def test_an_earlier_run_s_part_is_used(self):
        blobs = self.cache / "models--org--tiny" / "blobs"
        blobs.mkdir(parents=True)
        name = hashlib.sha256(WEIGHTS).hexdigest()
        (blobs / f"{name}.incomplete").write_bytes(WEIGHTS[:1_000_000])
        self.assert_pulled(self.pull("org/tiny"))
        self.assertIn(
            "GET /cdn/org/tiny/model.safetensors bytes=1000000-", self.hub.requests
        )
        self.assertEqual((blobs / name).read_bytes(), WEIGHTS)

    def test_a_server_without_ranges_begins_again(self):
        self.hub.cut_after = 700_000
        self.hub.ranges = False
        snapshot = self.assert_pulled(self.pull("org/tiny"))
        self.assertEqual((snapshot / "model.safetensors").read_bytes(), WEIGHTS)

    def test_wrong_bytes_are_found_and_not_kept(self):
        self.hub.corrupt = True
        self.assert_fails(self.pull("org/tiny"), "SHA-256", "run again")
        root = self.cache / "models--org--tiny"
        self.assertFalse((root / "snapshots" / COMMIT / "model.safetensors").exists())
        self.assert_pulled(self.pull("org/tiny"))

    def test_a_busy_hub_is_asked_again(self):
        self.hub.unavailable = 2
        self.assert_pulled(self.pull("org/tiny"))

    def test_tokens_open_gated_models(self):
        self.hub.repositories["org/gated"] = Repository(dict(MODEL), gated=True)
        self.assert_fails(self.pull("org/gated"), "gated", "HF_TOKEN", "org/gated")
        wrong = self.pull("org/gated", HF_TOKEN="hf_bad")
        self.assert_fails(wrong, "may not read it")
        self.assertNotIn("hf_bad", wrong.stderr)
        self.assert_pulled(self.pull("org/gated", HF_TOKEN="hf_good\n"))
        self.assertFalse(self.hub.leaked)
        (self.home / "token").write_text("hf_good\n")
        (self.cache / "models--org--gated" / "refs" / "main").unlink()
        self.assert_pulled(self.pull("org/gated"))

    def test_errors_say_what_to_do(self):
        self.assert_fails(self.pull("org/nothing"), "org/nothing", "check the name")
        self.assert_fails(self.pull("org/tiny", "--revision", "v9"), "--revision")
        self.assert_fails(self.pull("./nothing/here"), "no such directory")
        unreachable = self.pull("org/tiny", HF_ENDPOINT="http://127.0.0.1:1")
        self.assert_fails(unreachable, "no answer", "not in")
        self.hub.repositories["org/pickle"] = Repository(
            {"config.json": b"{}", "pytorch_model.bin": b"x"}
        )
        self.assert_fails(self.pull("org/pickle"), "safetensors, not .bin")
        self.hub.repositories["org/data"] = Repository({"README.md": b""})
        self.assert_fails(self.pull("org/data"), "config.json")

    def test_a_disk_that_is_too_small_is_told_before_the_download(self):
        self.hub.repositories["org/tiny"].size = 1 << 60
        self.assert_fails(self.pull("org/tiny"), "are free", "HF_HOME")
        self.assertFalse([line for line in self.hub.requests if "/cdn/" in line])

    def test_shards_are_those_of_the_index(self):
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        files = {name: MODEL[name] for name in ("config.json", "tokenizer.json")}
        files |= {
            "model.safetensors.index.json": json.dumps(index).encode(),
            "model-1.safetensors": b"one",
            "model-2.safetensors": b"two",
            "consolidated.safetensors": b"both again",
        }
        self.hub.repositories["org/shards"] = Repository(files)
        snapshot = self.assert_pulled(self.pull("org/shards"))
        self.assertTrue((snapshot / "model-2.safetensors").is_file())
        self.assertFalse((snapshot / "consolidated.safetensors").exists())
        self.assert_pulled(self.pull("org/shards", HF_HUB_OFFLINE="1"))

    def test_named_templates_come_too(self):
        folder = "additional_chat_templates"
        self.hub.repositories["org/tiny"].files |= {
            f"{folder}/tool_use.jinja": b"{{ tools }}",
            f"{folder}/../escaped.jinja": b"x",
            f"{folder}/a/b.jinja": b"x",
            f"{folder}/README.md": b"x",
        }
        snapshot = self.assert_pulled(self.pull("org/tiny"))
        (path,) = (snapshot / folder).iterdir()
        self.assertEqual(path.name, "tool_use.jinja")
        self.assertEqual(path.read_bytes(), b"{{ tools }}")
        target = pathlib.Path(os.readlink(path))
        self.assertEqual(target.parts[:4], ("..", "..", "..", "blobs"))
        self.assertEqual(list(self.home.rglob("*escaped*")), [])

    def test_names_lead_out_of_no_folder(self):
        self.hub.repositories["org/tiny"].etag = "../../../escaped"
        self.assert_fails(self.pull("org/tiny"), "ETag")
        index = {"weight_map": {"a": "../../escaped.safetensors"}}
        self.hub.repositories["org/shards"] = Repository(
            {
                "config.json": b"{}",
                "model.safetensors.index.json": json.dumps(index).encode(),
                "../../escaped.safetensors": b"x",
            }
        )
        self.assert_fails(self.pull("org/shards"), "weight_map")
        self.assert_fails(self.pull("org/tiny", "--revision", "../x"), "--revision")
        self.assertEqual(list(self.home.rglob("*escaped*")), [])

    def test_a_renamed_model_is_found(self):
        self.hub.renamed["old/tiny"] = "org/tiny"
        snapshot = self.assert_pulled(self.pull("old/tiny"))
        self.assertTrue((snapshot / "model.safetensors").is_file())

    def test_two_at_once_fetch_once(self):
        self.hub.delay = 0.8
        env = os.environ | {"HF_HOME": str(self.home), "HF_ENDPOINT": self.hub.endpoint}
        both = [
            subprocess.Popen(
                [TANDEM, "pull", "org/tiny"], env=env, stdout=subprocess.DEVNULL
            )
            for _ in range(2)
        ]
        self.assertEqual([process.wait(60) for process in both], [0, 0])
        large = [line for line in self.hub.requests if "/cdn/" in line]
        self.assertEqual(len(large), 1)

    def test_https_wants_a_certificate_that_is_trusted(self):
        pem = self.home / "server.pem"
        names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
        request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
        request += ["-days", "1", "-subj", "/CN=hub", "-addext", names]
        request += ["-keyout", str(self.home / "key"), "-out", str(pem)]
        subprocess.run(request, check=True, capture_output=True)
        pem.write_text(pem.read_text() + (self.home / "key").read_text())
        self.hub = Hub(certificate=str(pem))
        self.addCleanup(self.hub.close)
        self.hub.repositories["org/tiny"] = Repository(dict(MODEL))
        self.assert_fails(self.pull("org/tiny"), "certificate verify failed")
        self.assert_pulled(self.pull("org/tiny", SSL_CERT_FILE=str(pem)))

    def test_cache_can_be_elsewhere(self):
        other = self.home / "other"
        snapshot = self.assert_pulled(self.pull("org/tiny", HF_HUB_CACHE=str(other)))
        self.assertTrue(snapshot.is_relative_to(other))


if __name__ == "__main__":
    TANDEM = os.path.abspath(sys.argv.pop(1))
    unittest.main()
