"""Views in a daemon's state file."""

import base64
import json
import zlib

import numpy as np
import pytest

from elasticep.runtime.weights import views
from elasticep.runtime.weights.views import ViewTable

SHAPE = (2, 3, 4)


def table(most: int) -> ViewTable:
    slots = np.random.default_rng(1).integers(-1, most, SHAPE).astype(np.int32)
    slots[0, 0, 0], slots[1, 2, 3] = most, -1
    return ViewTable(9, 8, {0: (1, "a"), 2: (4, "b")}, slots)


@pytest.mark.parametrize("most", [7, 32_767, 32_768, 65_535])
def test_a_view_comes_back_whole_and_is_not_compressed_in_the_loop(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> bytes:
        raise AssertionError("it takes milliseconds for a large group")

    monkeypatch.setattr(views.zlib, "compress", never)
    first = table(most)
    again = ViewTable.from_kept(json.loads(json.dumps(first.kept)), SHAPE)
    assert (again.epoch, again.previous_epoch, again.members) == (9, 8, first.members)
    assert again.slots.dtype == np.int32
    assert np.array_equal(again.slots, first.slots)


def test_what_an_earlier_daemon_wrote_can_be_read() -> None:
    first = table(7)
    kept = dict(first.kept)
    del kept["width"]
    packed = zlib.compress(first.slots.astype("<i4").tobytes(), 1)
    kept["slots"] = base64.b64encode(packed).decode()
    assert np.array_equal(ViewTable.from_kept(kept, SHAPE).slots, first.slots)


@pytest.mark.parametrize("broken", [{"width": 3}, {"width": 4}, {"width": "2"}, {"slots": "AAA="}])
def test_what_is_no_view_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a view that cannot be used"):
        ViewTable.from_kept({**table(7).kept, **broken}, SHAPE)
