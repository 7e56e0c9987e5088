"""Expert weights in step with the slots of the view: the daemon's, or the engine's own."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elasticep.errors import UsageError
from elasticep.group import GroupConfig

if TYPE_CHECKING:
    from elasticep.client.arena import ArenaWeights, OpenArena

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


class SlotWeights:
    """What `Session.weights` gives: tensors over the rank's arena in a group with `weights`, else
    what the engine's callback gave.

    Args:
        config: of the group.
        open_arena: gives a descriptor of the arena; called once, when weights are first asked for.
    """

    def __init__(self, config: GroupConfig, open_arena: "OpenArena | None") -> None:
        self._config = config
        self._open_arena = open_arena
        self._arena: ArenaWeights | None = None
        self._own = EngineWeights()

    def register(self, load: LoadWeights) -> None:
        """See `Session.register_weights`."""
        if self._config.weights is not None:
            raise UsageError(
                f"the daemons of group {self._config.name!r} keep its expert weights; take them "
                "from session.weights(layer), or create the group without [weights]"
            )
        self._own.register(load)

    def get(self, layer: int, slots: tuple[int, ...]) -> Any:
        """See `Session.weights`; `slots` is the expert in each slot of the view, -1 = empty."""
        if self._config.weights is None:
            return self._own.get(layer, slots)
        if self._arena is None:
            self._arena = self._mapped()
        return self._arena.get(layer, slots)

    def close(self) -> None:
        """Forget the arena."""
        if self._arena is not None:
            self._arena.close()

    def _mapped(self) -> "ArenaWeights":
        from elasticep.client.arena import ArenaWeights

        layout = self._config.arena_layout()
        if self._open_arena is None or layout is None:
            raise UsageError("this session has no way to its arena; take one by attach")
        return ArenaWeights(layout, self._open_arena)
