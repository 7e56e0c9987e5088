"""Folders of tests that were killed are swept by the next; those in use are not."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elasticep.errors import ConfigError
from elasticep.testing.folders import make_folder, remove_folder

CODE = """
from elasticep.testing.folders import make_folder
folder = make_folder("eep-sweep-")
(folder / "file").write_text("x")
print(folder, flush=True)
input()
"""


def test_what_a_kill_leaves_is_swept_and_what_is_in_use_stays() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner.stdin, owner.stdout:
        left = Path(owner.stdout.readline().strip())
        first = make_folder("eep-sweep-")
        assert (left / "file").exists(), "its owner lives"
        owner.kill()
        owner.wait(60)
    second = make_folder("eep-sweep-")
    assert not left.exists()
    assert first.exists(), "it is ours"
    for folder in (first, second):
        remove_folder(folder)
        assert not folder.exists()
        assert not list(folder.parent.glob(f"{folder.name}*"))


def test_a_folder_whose_sockets_would_have_too_long_paths_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    with pytest.raises(ConfigError, match=r"x{60}, has a path of more than 60 bytes.*TMPDIR"):
        make_folder("eep-")
