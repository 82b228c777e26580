# SPDX-License-Identifier: Apache-2.0
"""A program on a pseudo-terminal, driven as a person would."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x07")


class Terminal:
    """`command` with a terminal of its own of `columns` by `rows`."""

    def __init__(self, command, columns=80, rows=24, **environment: str):
        self.raw = ""  # all that was written, with control sequences
        self._seen = 0  # of the plain text, by expect
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.environ.update({"TERM": "xterm", "LC_ALL": "C.UTF-8"} | environment)
            os.execvp(command[0], command)

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self.raw).replace("\r\n", "\n")

    def resize(self, columns: int, rows: int):
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)

    def send(self, keys: str):
        os.write(self._fd, keys.encode())

    def _read(self, seconds: float) -> bool:
        """False: the program has closed its terminal."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)

    def expect(self, pattern: str, seconds: float = 30) -> re.Match:
        """What comes next that matches; AssertionError with all of it else."""
        end = time.monotonic() + seconds
        while True:
            found = re.compile(pattern).search(self.text, self._seen)
            if found:
                self._seen = found.end()
                return found
            if time.monotonic() > end or not self._read(0.2):
                raise AssertionError(f"no {pattern!r} in:\n{self.text}\n{self.raw!r}")

    def wait(self, seconds: float = 30) -> int:
        """The exit code, or 128 + the signal."""
        end = time.monotonic() + seconds
        while self._read(0.05):
            if time.monotonic() > end:
                raise AssertionError(f"it does not end:\n{self.text}")
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        os.close(self._fd)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._fd)
            self.pid = 0
