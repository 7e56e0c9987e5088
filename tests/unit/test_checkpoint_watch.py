"""What a daemon says of the path of a checkpoint before anything is loaded from it."""

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import elasticep.runtime.weights.look as look
from elasticep.config import DaemonConfig, GroupSeats
from elasticep.errors import ConfigError
from elasticep.runtime.logs import open_log
from elasticep.runtime.weights.look import CheckpointWatch, Found, look_at


def folder(root: Path, *names: str) -> str:
    root.mkdir()
    for name in names:
        (root / name).write_bytes(b"{}")
    return str(root)


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors.index.json", "a.safetensors", "b.safetensors"),
        ("model.safetensors",),
        ("other.safetensors", "config.json"),
    ],
)
def test_a_folder_with_something_to_read_is_fine(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert look_at(folder(tmp_path / "m", *names)) == Found()
    assert look_at(str(tmp_path / "m" / names[0])) == Found()


def test_what_may_be_mounted_later_is_no_mistake(tmp_path: Path) -> None:
    for path in (str(tmp_path / "none" / "deep"), folder(tmp_path / "empty")):
        found = look_at(path)
        assert path in found.problem
        assert "mount the checkpoint there" in found.problem
        assert not found.wrong


def test_what_can_be_no_checkpoint_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with socket.socket(socket.AF_UNIX) as other:
        monkeypatch.chdir(tmp_path)
        other.bind("sock")
    cases = {
        str(text): "is no .safetensors file",
        str(text / "below"): "Not a directory",
        folder(tmp_path / "pickles", "pytorch_model.bin"): "only pickles",
        folder(tmp_path / "code", "README.md"): "no safetensors file: nothing to read",
        folder(tmp_path / "parts", "a.safetensors", "b.safetensors"): "fetch the index",
        str(tmp_path / "sock"): "neither a folder nor a file",
    }
    for path, said in cases.items():
        found = look_at(path)
        assert found.wrong, path
        assert path in found.problem
        assert said in found.problem

    def closed(self: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", closed)
    found = look_at(str(tmp_path / "code"))
    assert found.wrong
    assert f"user {os.geteuid()}" in found.problem
    assert str(tmp_path / "code") in found.problem

    def stale(self: Path) -> Iterator[Path]:
        raise OSError(116, "Stale file handle", str(self))

    monkeypatch.setattr(Path, "iterdir", stale)
    assert look_at(str(tmp_path / "code")) == Found(
        f"{tmp_path / 'code'} cannot be read: Stale file handle"
    )


def watch(*checkpoint: str) -> CheckpointWatch:
    config = DaemonConfig(
        node="n", seats=(GroupSeats("g", (0,)), GroupSeats("h", (1,))), checkpoint=checkpoint
    )
    return CheckpointWatch(config, open_log("json", "info", node="n"))


def test_a_mistake_keeps_a_daemon_from_its_first_start_only(tmp_path: Path) -> None:
    wrong = folder(tmp_path / "m", "README.md")
    with pytest.raises(ConfigError, match=f"checkpoint of group g, h: {wrong} has no model"):
        asyncio.run(watch(wrong).start(refuse=True))
    watched = watch(f"h={wrong}", str(tmp_path / "none"))
    asyncio.run(watched.start(refuse=False))
    told = {group: (path, bool(problem)) for group, path, problem in watched.told()}
    assert told == {"g": (str(tmp_path / "none"), True), "h": (wrong, True)}


def test_a_checkpoint_that_is_mounted_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "AGAIN_S", 0.001)
    path = tmp_path / "m"
    watched = watch(f"g={path}")
    asyncio.run(watched.start(refuse=True))
    assert watched.told()[0][2]

    async def mount() -> None:
        looking = asyncio.create_task(watched.run())
        folder(tmp_path / "made", "model.safetensors")
        shutil.move(tmp_path / "made", path)
        async with asyncio.timeout(60):
            await looking

    asyncio.run(mount())
    assert watched.told() == [("g", str(path), "")]


def test_a_file_system_that_does_not_answer_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def stuck(path: str) -> Found:
        answers.wait(60)
        return Found()

    monkeypatch.setattr(look, "look_at", stuck)
    monkeypatch.setattr(look, "_LOOK_S", 0.05)
    watched = watch("/m")
    asyncio.run(watched.start(refuse=True))
    answers.set()
    assert "has not answered" in watched.told()[0][2]


def test_a_checkpoint_of_a_group_without_seats_here_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(watch(f"decode={tmp_path}").start(refuse=True))
    said: Any = capsys.readouterr().err
    assert "checkpoint.unused" in said
    assert "decode" in said
