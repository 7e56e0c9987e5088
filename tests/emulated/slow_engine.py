"""`tests.gpu.weights_engine` on an emulated GPU whose bus is as slow as a file says.

The file has "free", "hold", or the milliseconds from one copy to the next. What is in force is
written beside it, with the suffix ".now".
"""

import threading
from pathlib import Path
from typing import Any

from elasticep.testing import emulated_cuda
from tests.gpu.weights_engine import Engine, main

SLOW_RANK = 0
_LOOK_S = 0.02
_PAUSE_S = 0.05


def obey(bus: Path) -> None:
    """Forever."""
    now, tick = "", threading.Event()
    while True:
        if (wanted := bus.read_text()) != now and wanted:
            now = wanted
            emulated_cuda.hold_copies(now != "free")
            bus.with_suffix(".now").write_text(now)
        paced = now.isdigit() and emulated_cuda.held_copies() > 0
        if paced:
            emulated_cuda.let_copies(1)
        tick.wait(int(now) / 1000 if paced else _LOOK_S)


class SlowEngine(Engine):
    """The bus of one rank is slow; steps are few, because nothing here hangs on them."""

    def between(self) -> None:
        threading.Event().wait(_PAUSE_S)

    def attach(self, *, bus: str, rank: int, **others: Any) -> dict[str, float]:
        attached = super().attach(rank=rank, **others)
        if rank == SLOW_RANK:
            threading.Thread(target=obey, args=(Path(bus),), daemon=True).start()
        return attached


if __name__ == "__main__":
    main(SlowEngine())
