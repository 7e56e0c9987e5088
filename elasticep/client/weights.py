"""Expert weights that the engine keeps itself, in step with the slots of the view."""

from collections.abc import Callable
from typing import Any

from elasticep.errors import UsageError

LoadWeights = Callable[[int, tuple[int, ...]], Any]
"""`load(layer, slots)` gives the weights of one layer in whatever form the engine's kernel takes.
`slots` is the logical expert in each local slot, -1 where a slot is empty."""


class EngineWeights:
    """Calls the engine back when, and only when, the slots of a layer changed."""

    def __init__(self) -> None:
        self._load: LoadWeights | None = None
        self._held: dict[int, tuple[tuple[int, ...], Any]] = {}

    def register(self, load: LoadWeights) -> None:
        """Take the engine's callback; what an earlier one gave is forgotten."""
        self._load = load
        self._held.clear()

    def get(self, layer: int, slots: tuple[int, ...]) -> Any:
        """The weights of `layer` for these slots.

        Raises:
            UsageError: no callback is registered.
        """
        held = self._held.get(layer)
        if held is not None and held[0] == slots:
            return held[1]
        if self._load is None:
            raise UsageError(
                "this engine keeps its own weights but told nobody how to get them; call "
                "session.register_weights(load) first, or use session.slots(layer)"
            )
        weights = self._load(layer, slots)
        self._held[layer] = (slots, weights)
        return weights
