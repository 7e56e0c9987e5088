"""Series of metrics with a label `group`, which go when the group does."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_BUCKET: Final = "le"  # of a histogram's samples, besides its own labels


def drop_groups(
    metrics: Iterable[Counter | Gauge | Histogram], gone: Callable[[str], bool]
) -> None:
    """Show nothing of some groups any more.

    Args:
        metrics: those that have a label `group`; others are left alone.
        gone: whether a group is one of them, by its name.
    """
    for metric in metrics:
        labels = [sample.labels for family in metric.collect() for sample in family.samples]
        for each in labels:
            if gone(each.get("group", "")) and "group" in each:
                with suppress(KeyError):  # a histogram or a counter has several samples of each
                    metric.remove(*(value for name, value in each.items() if name != _BUCKET))
