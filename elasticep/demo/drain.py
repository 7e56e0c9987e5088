"""The demo's drain: asked for as an operator does."""

import subprocess
import sys
from collections.abc import Sequence

from elasticep.errors import Unavailable


class Drain:
    """One drain at a time, by the command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def under_way(self) -> bool:
        """Whether the command runs."""
        return self._process is not None

    def ask(self, controller: str, group: str, ranks: Sequence[int]) -> str:
        """Ask for it; returns the command for the timeline."""
        named = ",".join(str(rank) for rank in ranks)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "elasticep.cli.main", "drain", group, named,
             "--controllers", controller, "--reason", "the demo"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        return f"elasticep drain {group} {named}"

    def look(self) -> None:
        """Take notice of its end.

        Raises:
            Unavailable: it failed.
        """
        process = self._process
        if process is None or process.poll() is None:
            return
        self._process = None
        said = process.communicate()[0].decode().strip()
        if process.returncode:
            raise Unavailable(f"the drain failed: {said}")

    def end(self) -> None:
        """Nothing of it is left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
