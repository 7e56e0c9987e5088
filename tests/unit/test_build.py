"""The build's own promises: what loads, what stays out, what is up to date."""

import ast
import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest

import elasticep
from elasticep import native
from elasticep.cli.main import SUBCOMMANDS, cli
from elasticep.errors import ElasticEPError, NativeError
from elasticep.native import library

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def dynamic_section(name: str) -> str:
    path = str(native.LIBRARY_DIR / name)
    return subprocess.run(
        ["readelf", "-d", "-W", path], capture_output=True, text=True, check=True
    ).stdout


def test_core_library_has_the_version_of_the_package() -> None:
    assert native.core().ep_version() == elasticep.__version__.encode()


def test_core_library_needs_neither_torch_nor_python() -> None:
    dynamic = dynamic_section("libelasticep_core.so")
    assert "SONAME" in dynamic
    needed = [line for line in dynamic.splitlines() if "NEEDED" in line]
    assert [line for line in needed if "torch" in line or "c10" in line or "python" in line] == []


def test_core_library_exports_only_its_c_abi() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(native.LIBRARY_DIR / "libelasticep_core.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # "U" (unique) and "W"/"V" (weak) symbols are instantiations of the C++ library's templates.
    names = [line.split()[-1] for line in listing.splitlines() if line.split()[-2] in "TDBR"]
    assert "ep_version" in names
    assert [name for name in names if not name.startswith("ep_")] == []


def test_missing_library_is_a_typed_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    with pytest.raises(NativeError, match=r"libelasticep_core\.so does not exist; .*make build"):
        library.load_library(library.CORE_NAME)


def test_broken_library_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / library.CORE_NAME).write_bytes(b"not a library")
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    with pytest.raises(NativeError, match="cannot be loaded"):
        library.load_library(library.CORE_NAME)


def test_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__version__", "9.9.9")
    with pytest.raises(NativeError, match=r"the Python package is 9\.9\.9"):
        library.core.__wrapped__()


def test_library_symbols_stay_local() -> None:
    native.core()
    assert not hasattr(ctypes.CDLL(None), "ep_version")


def test_importing_the_package_imports_no_torch_and_no_grpc() -> None:
    code = (
        "import sys, elasticep, elasticep.native, elasticep.cli.main;"
        "elasticep.native.core(); elasticep.Fenced;"
        "print(sorted({'torch', 'grpc', 'etcd3', 'transformers'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_every_public_name_resolves_where_the_table_says() -> None:
    assert sorted(elasticep._EXPORTS) == sorted(set(elasticep.__all__) - {"__version__"})
    for name, module in elasticep._EXPORTS.items():
        assert getattr(elasticep, name) is getattr(importlib.import_module(module), name)


def test_type_checkers_see_the_same_public_names() -> None:
    tree = ast.parse(Path(elasticep.__file__).read_text())
    imports = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imports == elasticep._EXPORTS


def test_every_error_is_public() -> None:
    errors = importlib.import_module("elasticep.errors")
    names = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ElasticEPError)
    }
    assert names <= set(elasticep.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        elasticep.no_such_name  # noqa: B018


def test_operators_are_loaded_by_engines_alone() -> None:
    pytest.importorskip("torch")
    code = (
        "import torch, elasticep.native.operators; ops = torch.ops.elasticep;"
        "before = hasattr(ops, 'exchange_dispatch'); import elasticep.client.exchange;"
        "print(before, ops.exchange_dispatch.default._schema.is_mutable)"
    )
    assert run_python(code) == "False True"


def test_operators_use_only_the_stable_abi() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library.library_path(library.OPS_NAME))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [line.split()[-1].split("@")[0] for line in listing.splitlines()]
    # Mangled names in torch's or c10's namespaces would bind the binary to one release of torch.
    assert [name for name in names if "2at" in name or "3c10" in name or "5torch" in name] == []
    assert any(name.startswith(("aoti_torch_", "torch_")) for name in names)


def test_without_torch_all_but_the_operators_is_built(tmp_path: Path) -> None:
    def tool(name: str) -> str:
        beside = Path(sys.executable).parent / name
        found = shutil.which(name) or (str(beside) if beside.exists() else None)
        if found is None:
            pytest.skip(f"{name} is not installed")
        return found

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ninja, build = tool("ninja"), str(tmp_path / "build")
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare"))
    python = tmp_path / "bare" / "bin" / "python"
    where = ("-S", str(ROOT), "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}")
    said = run(tool("cmake"), *where, f"-DPython_EXECUTABLE={python}", "-DELASTICEP_CUDA=OFF")
    assert f"operators: skipped, {python} has no torch >= 2.11; engines cannot attach" in said
    targets = run(ninja, "-C", build, "-t", "targets", "all")
    assert "libelasticep_core.so" in targets
    assert "_ops" not in targets


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts/generate_protos.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_stubs_are_up_to_date() -> None:
    assert load_generator().differences() == []


def test_generated_stubs_import_under_their_python_package() -> None:
    code = (
        "from elasticep.proto import controller_pb2 as messages, controller_pb2_grpc as services;"
        "print(messages.CreateGroupRequest.__module__, services.ControllerServiceStub)"
    )
    assert run_python(code).startswith("elasticep.proto.controller_pb2 ")


def test_pinned_versions_satisfy_the_package() -> None:
    pinned = {
        line.split("==")[0]: line.split("==")[1].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        assert requirement.name in pinned, f"{requirement.name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(pinned[requirement.name])


def test_every_command_module_is_in_the_table() -> None:
    modules = {path.stem for path in (ROOT / "elasticep" / "cli").glob("[a-z]*.py")}
    commands = {name for name in modules - {"main"} if hasattr(load_command(name), "command")}
    assert commands <= set(SUBCOMMANDS)
    group = click.Context(cli)
    for name in cli.list_commands(group):
        assert cli.get_command(group, name) is not None


def load_command(name: str) -> ModuleType:
    return importlib.import_module(f"elasticep.cli.{name}")


def test_command_line_lists_its_commands_without_importing_them() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from elasticep.cli.main import cli;"
        "done = CliRunner().invoke(cli, ['--help']); assert done.exit_code == 0, done.output;"
        "print(sorted(m for m in sys.modules if m.startswith('elasticep.cli.')))"
    )
    assert run_python(code) == "['elasticep.cli.main']"
