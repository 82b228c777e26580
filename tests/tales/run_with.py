# SPDX-License-Identifier: Apache-2.0
"""Runs a script in the first Python that has the modules it needs: the one
running this, then the virtual environments of the build folder.

    run_with.py MODULE[,MODULE...] SCRIPT [ARGUMENT...]

Exit 77 (skipped, with a line that says so) where none has them, otherwise the
script's own.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SKIPPED = 77


def has(python: pathlib.Path, modules: list[str]) -> bool:
    code = "import " + ", ".join(modules)
    done = subprocess.run([python, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def main() -> None:
    modules = sys.argv[1].split(",")
    pythons = [pathlib.Path(sys.executable)]
    pythons += [ROOT / "build" / venv / "bin/python"
                for venv in ("venv", "oracle-venv")]
    for python in pythons:
        if python.exists() and has(python, modules):
            os.execv(python, [str(python), *sys.argv[2:]])
    print(f"SKIPPED: no Python here has {' and '.join(modules)}")
    raise SystemExit(SKIPPED)


if __name__ == "__main__":
    main()
