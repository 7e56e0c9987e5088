"""Generates elasticep/proto from protos/elasticep/v1 with grpcio-tools and mypy-protobuf.

    python scripts/generate_protos.py              # rewrite the generated files
    python scripts/generate_protos.py --out DIR    # write them elsewhere
    python scripts/generate_protos.py --check      # exit 1 when they are not up to date

The proto package is elasticep.v1, the Python package elasticep.proto: import lines and module names
in the generated code are rewritten, the descriptors are left as they are.
"""

import argparse
import importlib.metadata
import importlib.resources
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos"
TARGET = ROOT / "elasticep" / "proto"
PLUGINS = Path(sysconfig.get_path("scripts"))
# Newer generators write stubs that refuse the protobuf of existing engines.
TOOLS_VERSION = "1.75.1"


def rewrite(text: str) -> str:
    """Move the generated code from the package elasticep.v1 to elasticep.proto."""
    text = text.replace("from elasticep.v1 import ", "from elasticep.proto import ")
    return re.sub(r"(['\"])elasticep\.v1\.(\w+_pb2)\1", r"\1elasticep.proto.\2\1", text)


def generate(out: Path) -> list[str]:
    """Write all generated files to `out`; returns their names. Others like them are removed."""
    installed = importlib.metadata.version("grpcio-tools")
    if installed != TOOLS_VERSION:
        raise SystemExit(f"grpcio-tools {TOOLS_VERSION} is needed, {installed} is installed")
    protos = sorted((SOURCES / "elasticep" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        status = protoc.main(
            [
                "protoc",
                f"-I{SOURCES}",
                f"-I{importlib.resources.files('grpc_tools') / '_proto'}",
                f"--plugin=protoc-gen-mypy={PLUGINS / 'protoc-gen-mypy'}",
                f"--plugin=protoc-gen-mypy_grpc={PLUGINS / 'protoc-gen-mypy_grpc'}",
                f"--python_out={scratch}",
                f"--grpc_python_out={scratch}",
                f"--mypy_out=quiet:{scratch}",
                f"--mypy_grpc_out=quiet:{scratch}",
                *map(str, protos),
            ]
        )
        if status != 0:
            raise SystemExit(status)
        produced = {
            path.name: rewrite(path.read_text())
            for path in sorted(Path(scratch, "elasticep", "v1").iterdir())
        }
    # A file without services gets an empty service module.
    for name, text in list(produced.items()):
        if name.endswith("_pb2_grpc.py") and "_to_server(" not in text:
            del produced[name], produced[f"{name}i"]
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*_pb2*"):
        if stale.name not in produced:
            stale.unlink()
    for name, text in produced.items():
        (out / name).write_text(text)
    return list(produced)


def differences() -> list[str]:
    """Names of generated files that are missing, superfluous or out of date."""
    with tempfile.TemporaryDirectory() as scratch:
        names = set(generate(Path(scratch)))
        names |= {path.name for path in TARGET.glob("*_pb2*")}

        def text(folder: Path, name: str) -> str | None:
            path = folder / name
            return path.read_text() if path.is_file() else None

        return sorted(n for n in names if text(Path(scratch), n) != text(TARGET, n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        stale = differences()
        if stale:
            print(f"out of date, run `make proto`: {', '.join(stale)}", file=sys.stderr)
            sys.exit(1)
        return
    for name in generate(options.out):
        print(options.out / name)


if __name__ == "__main__":
    main()
