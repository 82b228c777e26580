# SPDX-License-Identifier: Apache-2.0
"""Generates tandem/v1 from proto/ while the wheel is built."""

import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
# What clients speak, and what that imports.
PROTOS = ["tandem/v1/generation.proto", "tandem/v1/inference.proto"]

# Setuptools looks for the package before it is filled.
(HERE / "tandem/v1").mkdir(exist_ok=True)


class BuildPy(build_py):
    def run(self) -> None:
        import grpc_tools
        from grpc_tools import protoc

        proto = HERE / "../../proto"
        if not proto.is_dir():
            raise SystemExit("tandem-client is built within Tandem's source tree")
        well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
        arguments = ["protoc", f"-I{proto}", f"-I{well_known}",
                     f"--python_out={HERE}", f"--pyi_out={HERE}",
                     f"--grpc_python_out={HERE}", *PROTOS]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed")
        (HERE / "tandem/v1/__init__.py").touch()
        super().run()


setup(cmdclass={"build_py": BuildPy})
