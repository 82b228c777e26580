# SPDX-License-Identifier: Apache-2.0
"""`tandem` as a person sees it, on a pseudo-terminal, and as a script does, on
pipes: serve, chat and what they print.

    python3 tests/cli/terminal_test.py build/release/bin/tandem
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.request

from terminal import Terminal

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from free_ports import free_port

TANDEM = ""
SOURCE = pathlib.Path(__file__).resolve().parents[2]
MODEL = str(SOURCE / "models" / "tales")


def tandem(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [TANDEM, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


class TerminalTest(unittest.TestCase):
    """One server for all, on a terminal of 40 columns."""

    @classmethod
    def setUpClass(cls):
        cls.grpc, cls.http, cls.admin = (free_port() for _ in range(3))
        words = [TANDEM, "serve", MODEL, "--grpc-port", str(cls.grpc)]
        words += ["--port", str(cls.http), "--admin-port", str(cls.admin)]
        cls.server = Terminal([*words, "--served-model-name", "tales"], columns=40)
        cls.server.expect(r"Tandem is ready")
        cls.server.expect(rf"status --admin 127.0.0.1:{cls.admin}\n")

    @classmethod
    def tearDownClass(cls):
        os.kill(cls.server.pid, signal.SIGINT)
        code = cls.server.wait()
        assert code == 130, (code, cls.server.text)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)
        self.router = ["--router", f"127.0.0.1:{self.grpc}"]

    def chat(self, *arguments: str, limit=12, **environment: str) -> Terminal:
        words = [TANDEM, "chat", *self.router, "--history", str(self.home / "history")]
        words += ["--temperature", "0", "--max-tokens", str(limit), *arguments]
        terminal = Terminal(words, **environment)
        self.addCleanup(terminal.close)
        terminal.expect(r"/help lists")
        return terminal

    def say(self, terminal: Terminal, keys: str):
        """Types at the next prompt: an earlier Ctrl-C is a signal, no key."""
        terminal.expect(">>> ")
        terminal.send(keys)

    def test_the_ready_block_s_curl_line_works(self):
        block = self.server.text[self.server.text.index("Tandem is ready") :]
        lines = block.replace("\\\n", " ")
        found = re.search(r"curl -N .*\}'", lines)
        self.assertIsNotNone(found, block)
        command = found.group(0).replace("curl", "curl -sS", 1)
        command = command.replace('"stream"', '"max_tokens": 4, "stream"')
        shell = subprocess.run(
            ["bash", "-c", command], check=False, capture_output=True, text=True
        )
        self.assertIn("data: [DONE]", shell.stdout, shell.stderr)

    def test_the_ready_block_tells_what_serves_and_how_it_started(self):
        block = self.server.text[self.server.text.index("Tandem is ready") :]
        total = float(re.search(r"ready \(([\d.]+) s\)", block).group(1))
        with open(f"{MODEL}/model.safetensors", "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        stored = {t["dtype"].lower() for n, t in header.items() if n[0] != "_"}
        weights = re.search(r"\n  weights +(.+)\n", block).group(1).strip()
        self.assertIn(weights, stored)
        self.assertRegex(block, r"device +cpu \(")
        phases = dict(re.findall(r"\n {12}(\w+) +([\d.]+) s", block))
        self.assertEqual(
            list(phases), ["device", "weights", "fingerprint", "kv_cache", "serving"]
        )
        self.assertLessEqual(sum(map(float, phases.values())), total)
        worker = re.search(r"startup +of (\S+)", block).group(1)
        state = json.loads(
            tandem("status", "--json", "--admin", f"127.0.0.1:{self.admin}").stdout
        )
        hello = next(
            each["hello"]
            for each in state["workers"]
            if each["hello"]["worker"]["worker_id"] == worker
        )
        url = f"http://{hello['http_endpoint']}/metrics"
        with urllib.request.urlopen(url) as answer:
            metrics = answer.read().decode()
        for phase, seconds in phases.items():
            series = rf'tandem_startup_seconds{{[^}}]*phase="{phase}"}} ([\d.e-]+)'
            told = float(re.search(series, metrics).group(1))
            self.assertAlmostEqual(told, float(seconds), delta=0.006)
        # The way that a request takes is the first of those told.
        ways = re.search(r"handoff +(.+)\n", block).group(1).strip().split(", else ")
        fields = {"prompt": "Once upon a time", "max_tokens": 2, "placement": "split"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/v1/completions",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            self.assertEqual(json.load(answer)["timings"]["way"], ways[0])

    def test_chat_answers_with_a_line_about_it(self):
        terminal = self.chat()
        self.say(terminal, "Hello\r")
        footer = terminal.expect(
            r"(\d+) prompt tokens \((\d+) cached\), first after (\d+) ms, "
            r"(\d+) tokens at [\d.]+/s"
        )
        self.assertEqual(footer.group(4), "12")
        self.assertIn("\x1b[2m", terminal.raw)
        self.say(terminal, "/stats\r")
        terminal.expect(r"answers 1, prompt tokens \d+ ")
        self.say(terminal, "/exit\r")
        self.assertEqual(terminal.wait(), 0)

    def test_chat_remembers_regenerates_forgets_saves_and_loads(self):
        terminal = self.chat("--system", "Be brief.")
        self.say(terminal, "Hello\r")
        first = int(terminal.expect(r"(\d+) prompt tokens").group(1))
        self.say(terminal, "And then?\r")
        second = int(terminal.expect(r"(\d+) prompt tokens").group(1))
        self.assertGreater(second, first)
        path = self.home / "talk.json"
        self.say(terminal, f"/save {path}\r")
        terminal.expect("4 messages")
        saved = json.loads(path.read_text())["messages"]
        roles = ["system", "user", "assistant", "user", "assistant"]
        self.assertEqual([message["role"] for message in saved], roles)
        self.assertEqual(saved[3]["content"], "And then?")
        self.say(terminal, "/regen\r")
        again = int(terminal.expect(r"(\d+) prompt tokens").group(1))
        self.assertEqual(again, second)
        self.say(terminal, "/clear\r")
        terminal.expect("forgotten")
        self.say(terminal, "Hello\r")
        self.assertEqual(int(terminal.expect(r"(\d+) prompt").group(1)), first)
        self.say(terminal, f"/load {path}\r")
        terminal.expect("4 messages")
        self.say(terminal, "/regen\r")
        self.assertEqual(int(terminal.expect(r"(\d+) prompt").group(1)), second)
        self.say(terminal, "/load /no/such/file\r")
        terminal.expect("error: .*cannot read")
        self.say(terminal, "\x04")
        self.assertEqual(terminal.wait(), 0)

    def test_set_takes_sampling_flags_and_refuses_others(self):
        terminal = self.chat()
        self.say(terminal, "/set max_tokens 3\r")
        terminal.expect("max-tokens 3")
        self.say(terminal, "Hello\r")
        terminal.expect(r"\b3 tokens at")
        self.say(terminal, "/set max_tokens\r")
        terminal.expect("default again")
        self.say(terminal, "/set temprature 1\r")
        terminal.expect("error: unknown flag .*did you mean --temperature")
        self.say(terminal, "/set temperature 9\r")
        terminal.expect("error: .*9.* is not a number from 0 to 2")
        self.say(terminal, "/set n 2\r")
        terminal.expect("error: a chat has one answer")
        self.say(terminal, "/set logprobs 1\r")
        terminal.expect("error: a chat shows text alone")
        self.say(terminal, "/nonsense\r")
        terminal.expect("error: there is no /nonsense")

    def test_ctrl_c_stops_the_answer_and_not_the_program(self):
        terminal = self.chat("--ignore-eos", limit=900)
        # The model is small: an answer may be over before the key is pressed.
        for _ in range(20):
            self.say(terminal, "/clear\r")
            terminal.expect("forgotten\n")
            self.say(terminal, "Tell me a story.\r")
            terminal.expect(r"Tell me a story\.\s+\S+ \S+ ")
            terminal.send("\x03")
            # Where it ends with the key, the terminal drops what it wrote last.
            end = terminal.expect(r"stopped|900 tokens at|\^C(?=>>> )")
            if end.group() == "stopped":
                break
        else:
            self.fail(terminal.text)
        # At the prompt it gives the line up.
        self.say(terminal, "half a line\x03")
        self.say(terminal, "/exit\r")
        self.assertEqual(terminal.wait(), 0)

    def test_lines_are_edited_remembered_and_may_be_several(self):
        terminal = self.chat()
        self.say(terminal, "/systemX\x7f Be brief\r")
        terminal.expect(r"\nBe brief\n")
        self.say(terminal, "\x1b[A\r")  # the line before, once more
        terminal.expect(r"\nBe brief\n")
        self.say(terminal, '"""one\r')
        terminal.expect(r"\.\.\. ")
        terminal.send('two"""\r')
        terminal.expect("prompt tokens")
        path = self.home / "talk.json"
        self.say(terminal, f"/save {path}\r")
        terminal.expect("2 messages")
        saved = json.loads(path.read_text())["messages"]
        self.assertEqual(saved[1]["content"], "one\ntwo")
        self.say(terminal, "/exit\r")
        self.assertEqual(terminal.wait(), 0)
        history = self.home / "history"
        self.assertEqual(history.stat().st_mode & 0o777, 0o600)
        self.assertIn("brief", history.read_text())

    def test_typed_lines_outlive_their_terminal(self):
        terminal = self.chat()
        self.say(terminal, "Hello\r")
        terminal.expect(r"prompt tokens")
        terminal.expect(">>> ")
        os.kill(terminal.pid, signal.SIGHUP)
        self.assertEqual(terminal.wait(), 128 + signal.SIGHUP)
        self.assertIn("Hello", (self.home / "history").read_text())

    def test_no_color_is_respected(self):
        terminal = self.chat(NO_COLOR="1")
        self.say(terminal, "Hello\r")
        terminal.expect("prompt tokens")
        self.assertNotRegex(terminal.raw, "\x1b\\[[0-9;]*m")

    def test_chat_on_a_pipe_is_answers_and_nothing_else(self):
        words = ["chat", *self.router, "--temperature", "0", "--max-tokens", "8"]
        result = tandem(*words, input="Hello\n/clear\nHello\n")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        self.assertNotIn("\x1b", result.stdout)
        once = tandem(*words, input="Hello\n").stdout
        self.assertEqual(result.stdout, once + "forgotten\n" + once)
        nobody = tandem("chat", "--router", "127.0.0.1:1", input="Hello\n")
        self.assertEqual(nobody.returncode, 1)
        self.assertIn("no router answers at 127.0.0.1:1", nobody.stderr)

    def test_ctrl_c_on_a_pipe_ends_the_program(self):
        words = [TANDEM, "chat", *self.router, "--ignore-eos", "--max-tokens", "900"]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # Shells have jobs in the background ignore it.
        taken = signal.signal(signal.SIGINT, signal.default_int_handler)
        chat = subprocess.Popen(words, **pipes)
        signal.signal(signal.SIGINT, taken)
        # The model is small: one answer may be over before the signal comes.
        chat.stdin.write(b"Hello\n/clear\n" * 20)
        chat.stdin.close()
        self.assertTrue(chat.stdout.read(1))
        chat.send_signal(signal.SIGINT)
        rest = chat.stdout.read()
        self.assertEqual(chat.wait(30), -signal.SIGINT)
        self.assertNotIn(b"stopped", rest)
        self.assertEqual(chat.stderr.read(), b"")
        chat.stdout.close()
        chat.stderr.close()

    def test_status_is_watched_until_q(self):
        words = [TANDEM, "status", "--admin", f"127.0.0.1:{self.admin}", "--watch"]
        terminal = Terminal([*words, "--interval", "50ms"], columns=60, rows=10)
        self.addCleanup(terminal.close)
        terminal.expect("model tales")
        terminal.expect("decode-0")
        page = terminal.raw.split("\x1b[H")[1]
        self.assertLessEqual(max(map(len, page.split("\x1b[K\r\n"))), 60)
        terminal.expect("model tales")  # drawn again
        terminal.resize(30, 5)
        for _ in range(100):  # of which some were drawn before
            terminal.expect("model tales")
            page = terminal.raw.split("\x1b[H")[-2]
            if max(map(len, page.split("\x1b[K\r\n"))) <= 30:
                break
        self.assertLessEqual(max(map(len, page.split("\x1b[K\r\n"))), 30)
        self.assertLessEqual(page.count("\r\n"), 4)
        terminal.send("q")
        self.assertEqual(terminal.wait(), 0)
        self.assertTrue(terminal.raw.rstrip().endswith("\x1b[?1049l"))
        both = tandem("status", "--watch", "--json")
        self.assertIn("--watch and --json", both.stderr)

    def test_status_on_a_pipe_is_plain(self):
        words = ["status", "--admin", f"127.0.0.1:{self.admin}"]
        result = tandem(*words)
        self.assertEqual(result.returncode, 0)
        self.assertNotIn("\x1b", result.stdout)
        command = [TANDEM, *words, "--watch", "--interval", "20ms"]
        watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        seen = 0
        while seen < 2:
            seen += watch.stdout.readline().startswith("model tales")
        watch.terminate()
        watch.stdout.close()
        watch.wait(10)

    def test_version_tells_what_this_is(self):
        info = json.loads(tandem("version", "--json").stdout)
        self.assertIn("cpu", info["backends"])
        self.assertGreater(info["cpus"], 0)
        text = tandem("version").stdout
        self.assertTrue(text.startswith(f"tandem {info['version']}\n"))
        self.assertRegex(info["commit"], "^([0-9a-f]{12}|unknown)$")

    def complete(self, line: str) -> list[str]:
        """What a real bash would offer at the end of the line."""
        words = line.split(" ")
        script = (
            f"source <('{TANDEM}' completion bash)\n"
            f"COMP_WORDS=({' '.join(word or chr(39) * 2 for word in words)})\n"
            f"COMP_CWORD={len(words) - 1}\n_tandem\n"
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        shell = subprocess.run(
            ["bash", "-c", script], check=True, capture_output=True, text=True
        )
        self.assertEqual(shell.stderr, "")
        return shell.stdout.split()

    def test_bash_completes_commands_flags_and_choices(self):
        self.assertIn("serve", self.complete("tandem "))
        self.assertEqual(self.complete("tandem comp"), ["completion"])
        self.assertEqual(self.complete("tandem serve --grpc"), ["--grpc-port"])
        self.assertIn("--no-json", self.complete("tandem status --no-"))
        self.assertEqual(self.complete("tandem serve --dtype b"), ["bf16"])
        self.assertEqual(self.complete("tandem lora un"), ["unload"])
        self.assertIn("--admin", self.complete("tandem lora unload --a"))
        self.assertIn("README.md", self.complete(f"tandem serve {SOURCE}/README")[0])
        # Every flag of every help is there.
        for command in ("serve", "chat", "plan", "generate", "bench"):
            text = tandem(command, "--help").stdout
            flags = set(
                re.findall(r"^  --(?:\[no-\])?([a-z0-9-]+)", text, re.MULTILINE)
            )
            offered = set(self.complete(f"tandem {command} --"))
            self.assertLessEqual({f"--{flag}" for flag in flags}, offered, command)

    def test_other_shells_get_scripts_too(self):
        fish = tandem("completion", "fish").stdout
        self.assertIn("__fish_seen_subcommand_from serve' -l dtype -x -a 'auto", fish)
        self.assertTrue(
            tandem("completion", "zsh").stdout.startswith("#compdef tandem")
        )
        wrong = tandem("completion", "csh")
        self.assertEqual(wrong.returncode, 2)
        self.assertIn("bash, zsh or fish", wrong.stderr)

    def doctor(self, *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
        """The exit code, and of each check its verdict and its text."""
        result = tandem("doctor", "--json", *arguments)
        checks = json.loads(result.stdout)["checks"]
        found = {each["check"]: (each["verdict"], each["text"]) for each in checks}
        return result.returncode, found

    def test_doctor_finds_nothing_wrong_where_nothing_is(self):
        grpc, http = free_port(), free_port()
        ports = ["--grpc-port", str(grpc), "--port", str(http)]
        code, found = self.doctor(MODEL, *ports)
        self.assertEqual(code, 0, found)
        for check in ("cpu", "config", "weights", "tokenizer", "chat", "memory"):
            self.assertEqual(found[check][0], "ok", found)
        self.assertEqual(found[f"port {grpc}"][0], "ok")
        text = tandem("doctor", *ports).stdout
        self.assertRegex(text, r"(?m)^ok    cpu ")
        self.assertNotIn("\x1b", text)

    def test_doctor_tells_what_stops_a_start(self):
        code, found = self.doctor("--grpc-port", str(self.grpc), "--port", "1")
        self.assertEqual(code, 1)
        self.assertEqual(found[f"port {self.grpc}"][0], "fail")
        self.assertIn("--grpc-port", found[f"port {self.grpc}"][1])
        broken = self.home / "broken"
        broken.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (broken / name).write_bytes((SOURCE / "models/tales" / name).read_bytes())
        (broken / "model.safetensors").write_bytes(b"\xff" * 64)
        code, found = self.doctor(str(broken))
        self.assertEqual(code, 1)
        self.assertEqual(found["config"][0], "ok")
        self.assertEqual(found["weights"][0], "fail")
        self.assertEqual(found["chat"][0], "warn")

    def test_doctor_looks_at_every_worker(self):
        code, found = self.doctor("--admin", f"127.0.0.1:{self.admin}")
        self.assertEqual(code, 0, found)
        for check in ("prefill-0", "decode-0", "fingerprint", "protocol"):
            self.assertEqual(found[check][0], "ok", found)
        code, found = self.doctor("--admin", "127.0.0.1:1")
        self.assertEqual((code, found["router"][0]), (1, "fail"))

    def test_doctor_reads_certificates(self):
        def make(name: str, days: int) -> list[str]:
            request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
            request += ["-subj", "/CN=x", "-days", str(days)]
            paths = [str(self.home / f"{name}.{part}") for part in ("pem", "key")]
            request += ["-out", paths[0], "-keyout", paths[1]]
            subprocess.run(request, check=True, capture_output=True)
            return paths

        good, soon = make("good", 100), make("soon", 3)
        for (cert, key), verdict, word in (
            (good, "ok", "valid until"),
            (soon, "warn", "renew"),
            ((good[0], soon[1]), "fail", "do not belong together"),
            (("/no/such", good[1]), "fail", "/no/such"),
        ):
            _, found = self.doctor("--tls-cert", cert, "--tls-key", key)
            self.assertEqual(found["tls"][0], verdict, found)
            self.assertIn(word, found["tls"][1])

    def test_doctor_reads_roles(self):
        def issue(name: str, *uris: str) -> list[str]:
            request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
            request += ["-subj", "/CN=x", "-days", "100", "-addext"]
            request += ["subjectAltName=" + ",".join(["DNS:localhost", *uris])]
            paths = [str(self.home / f"{name}.{part}") for part in ("pem", "key")]
            request += ["-out", paths[0], "-keyout", paths[1]]
            subprocess.run(request, check=True, capture_output=True)
            return paths

        role = "URI:spiffe://tandem/"
        for uris, verdict, words in (
            ((role + "prefill/p0",), "ok", ", as prefill/p0"),
            ((role + "router", role + "operator"), "ok", ", as router and operator"),
            (("URI:spiffe://mesh/x",), "fail", "names no role"),
            ((role + "gateway",), "fail", "none of router, prefill"),
        ):
            cert, key = issue("one", *uris)
            tls = ("--tls-cert", cert, "--tls-key", key)
            said = tandem("doctor", "--json", *tls, "--tls-ca", cert).stdout
            # Before the authority's line.
            line = next(c for c in json.loads(said)["checks"] if c["check"] == "tls")
            self.assertEqual(line["verdict"], verdict, said)
            self.assertIn(words, line["text"])
            # Where no client shows one, there is nobody to ask for a role.
            _, found = self.doctor(*tls)
            self.assertEqual(found["tls"][0], "ok", found)

    def test_chat_with_a_server_of_its_own(self):
        words = ["chat", MODEL, "--temperature", "0", "--max-tokens", "8"]
        own = tandem(*words, input="Hello\n")
        self.assertEqual(own.returncode, 0, own.stderr)
        words = ["chat", *self.router, "--temperature", "0", "--max-tokens", "8"]
        self.assertEqual(own.stdout, tandem(*words, input="Hello\n").stdout)
        # A signal leaves nothing behind.
        words = [TANDEM, "chat", MODEL, "--history", ""]
        terminal = Terminal(words, TMPDIR=str(self.home))
        self.addCleanup(terminal.close)
        terminal.expect(">>> ")
        os.kill(terminal.pid, signal.SIGTERM)
        self.assertEqual(terminal.wait(), 128 + signal.SIGTERM)
        self.assertEqual(list(self.home.iterdir()), [])
        both = tandem("chat", MODEL, *self.router, input="")
        self.assertIn("--router", both.stderr)
        self.assertNotEqual(both.returncode, 0)


if __name__ == "__main__":
    TANDEM = os.path.abspath(sys.argv.pop(1))
    unittest.main()
