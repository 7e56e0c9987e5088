"""A rank in an engine's hands: steps, exchanges, the view.

A `Session` belongs to the process and thread of control that attached. Rules for engines, kept by
`Session.run`: nothing computed in an incomplete step is released, and what it wrote into a KV cache
is overwritten by the repeat. `docs/client.md` has them all.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticep.client.arguments import whole
from elasticep.client.handle import SessionHandle
from elasticep.client.step import LONGEST_S, Passed, Step, give_up_after
from elasticep.client.step_owner import StepOwner
from elasticep.client.view import EMPTY, View, read_view
from elasticep.client.weights import LoadWeights, SlotWeights
from elasticep.client.works import Held, settled_works
from elasticep.errors import (
    CapExceeded,
    ExpertsLost,
    PlacementError,
    SpecError,
    UsageError,
)
from elasticep.group import Completion, GroupConfig
from elasticep.native import abi
from elasticep.native.convert import exchange_numbers
from elasticep.spec import ExchangeSpec

if TYPE_CHECKING:
    import torch

    from elasticep.client.arena import OpenArena
    from elasticep.client.auto import AnyExchange

__all__ = ["Session", "Step"]

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


class Session(StepOwner):
    """A rank of a group, held by this process. `elasticep.attach` makes one.

    Attributes:
        config: the group's config.
        rank: this seat.
        incarnation: how often the seat had been taken when this session took it.
    """

    def __init__(
        self,
        handle: SessionHandle,
        config: GroupConfig,
        *,
        rank: int,
        incarnation: int,
        release: Callable[[], None] = lambda: None,
        open_arena: "OpenArena | None" = None,
    ) -> None:
        super().__init__(handle)
        self.config = config
        self.rank = rank
        self.incarnation = incarnation
        self._release = release
        self._pid = os.getpid()
        self._closed = False
        self._view: View | None = None
        self._weights = SlotWeights(config, open_arena)
        self._exchanges: dict[str, AnyExchange] = {}
        self._held = Held()

    def __repr__(self) -> str:
        return f"<rank {self.rank} of group {self.config.name!r}, incarnation {self.incarnation}>"

    # ---- steps

    def step(self, tokens: int = 0, *, prompt: bool = False, timeout: float | None = None) -> Step:
        """The next step: all members enter together, on one view.

        Args:
            tokens: how many tokens this rank will bring, told to the others at the barrier.
            prompt: whether there are prompt tokens among them; told too. What all agreed on is
                `Step.prompt`: a rank that has just joined may find its own word not counted.
            timeout: seconds to wait at the barrier; None: the group's `step_timeout_ms`.

        Entering it raises:
            StepTimeout: the barrier did not end in time. Enter a new step to go on waiting at it.
            Fenced: this rank was expelled.
            UsageError: a step is open already, which is torn by this; or the session is detached
                or another process's.

        Raises:
            CapExceeded: more tokens than the group's largest exchange takes.
            UsageError: `tokens` is no whole number, or `timeout` not positive.
        """
        cap = max(part.max_tokens for _, spec in self.config.exchanges for part in spec.parts())
        if not 0 <= whole("tokens", tokens) <= cap:
            raise CapExceeded(
                f"a step with {tokens} tokens: the largest exchange of group {self.config.name!r} "
                f"takes 0 to {cap} per rank; split the batch, or create the group with a larger cap"
            )
        if timeout is not None and not timeout > 0:
            raise UsageError(f"timeout is {timeout!r} seconds; it must be positive, or None")
        limit_ms = 0 if timeout is None else max(1, round(min(timeout, LONGEST_S) * 1000))
        return self._new_step(tokens, limit_ms, prompt)

    def _new_step(self, tokens: int, timeout_ms: int, prompt: bool) -> Step:
        return Step(self, tokens, timeout_ms, prompt)

    def run(
        self,
        forward: Callable[[Step, _Batch], _Result],
        batch: _Batch,
        *,
        tokens: int = 0,
        prompt: bool = False,
        on_torn: Callable[[Step], None] | None = None,
    ) -> _Result:
        """Run `forward(step, batch)` in steps until one is complete; the next view is waited for
        at the barrier in between.

        Args:
            forward: one forward pass. It may be called again with the same batch, so it must not
                release anything, and must overwrite what an earlier call wrote.
            batch: handed to `forward`.
            tokens: how many tokens this rank brings.
            prompt: whether there are prompt tokens among them.
            on_torn: called with each step that has to be repeated, right after it.

        Returns:
            What `forward` returned in the complete step.

        Raises:
            ExpertsLost: an expert has no live replica and the policy is `refuse`.
            Fenced: this rank was expelled.
            StepTimeout: no barrier was passed within the group's `step_timeout_ms`.
        """
        while True:
            step = self.step(tokens, prompt=prompt)
            result: list[_Result] = []
            with step:
                result.append(forward(step, batch))
            if step.complete:
                return result[0]
            if on_torn is not None:
                on_torn(step)

    def works(
        self,
        forward: Callable[[Step, _Batch], _Result],
        batch_of: Callable[[int], _Batch | None],
        *,
        tokens: Callable[[int], int] = lambda work: 0,
        prompt: Callable[[int], bool] = lambda work: False,
        undo: Callable[[int], None] = lambda work: None,
    ) -> Iterator[tuple[int, _Result]]:
        """Run numbered works in lockstep with coupled ranks; yield each result once it is settled.

        For groups with `completion = "agreed"`, whose ranks' inputs depend on one another: all
        ranks run the same work in a step, and when one of them could not complete it, all run it
        again. A result comes out one step after it was computed, when the barrier has shown that
        every rank has it. After a loop that an error or a `break` ended another call goes on: it
        first gives out what that one still held.

        Args:
            forward: one forward pass; it may run again for the same work.
            batch_of: the batch of a work (1, 2, ...; a joiner starts later), None after the last.
                All ranks must agree on which is the last.
            tokens: how many tokens this rank brings to a work. Asked before the barrier, which
                decides the work: of the one that comes next if all goes well, and of the one that
                may have to be repeated; the larger number is announced.
            prompt: whether there are prompt tokens among them (preset `AUTO`); asked likewise.
            undo: called before a work that was complete here is run again, because it was not
                complete elsewhere. At most one work is ever undone.

        Yields:
            (work, what `forward` returned), in order, each once.

        Raises:
            UsageError: the group's completion is `local`.
            Fenced, StepTimeout: as for `step`.
        """
        if self.config.completion is not Completion.AGREED:
            raise UsageError(
                f"group {self.config.name!r} has completion = 'local'; use run, or create the "
                "group with completion = 'agreed'"
            )
        return settled_works(self, self._held, forward, batch_of, tokens, prompt, undo)

    def _begin(self, step: Step) -> None:
        self._check_usable()
        self._check_none_open()
        info = self._handle.step_begin(step._announced, step._timeout_ms)
        if self._view is None or self._view.epoch != info.epoch:
            self._view = read_view(self._handle, self.config.geometry, info)
            if "slot_table" in self.__dict__:  # somebody has asked for it
                self._fill(self.slot_table)
        prompt = any(told & abi.TOKENS_PROMPT for told in info.tokens)
        step._facts = Passed(
            info.step, info.epoch, prompt, info.work, info.settled, self._view.members
        )
        self._step = step

    def _experts_lost(self, error: PlacementError) -> PlacementError:
        lost = self.view.lost(self.config.geometry.experts)
        return ExpertsLost(lost) if lost else error

    # ---- exchanges

    def exchange(self, wanted: str | ExchangeSpec) -> "AnyExchange":
        """One of the group's exchanges, checked now and not at the first large batch.

        Args:
            wanted: its name, or the spec that the group's config gives it.

        Raises:
            SpecError: the group has no such exchange; the message lists those it has.
        """
        from elasticep.client.auto import make_exchange
        from elasticep.client.exchange import Exchange

        self._check_usable()
        specs = dict(self.config.exchanges)
        name = wanted if isinstance(wanted, str) else _name_of(wanted, specs)
        if name not in specs:
            known = ", ".join(repr(known) for known in specs)
            raise SpecError(
                f"group {self.config.name!r} has no exchange {wanted!r}; it has {known}. A group's "
                "exchanges are fixed when it is created"
            )
        if name not in self._exchanges:
            numbers = exchange_numbers(self.config)[name]
            made = make_exchange(self, name, specs[name], numbers)
            self._exchanges[name] = made
            self._kinds += (made,) if isinstance(made, Exchange) else (made.decode, made.prefill)
        return self._exchanges[name]

    # ---- view, weights, load

    @property
    def view(self) -> View:
        """The view of the running or the last step.

        Raises:
            UsageError: there was no step yet.
        """
        if self._view is None:
            raise UsageError("no step has begun, so this rank has no view yet; enter a step first")
        return self._view

    @cached_property
    def device(self) -> "torch.device":
        """Where this rank's memory is, and with it the tensors of exchanges and weights."""
        import torch

        return torch.device("cpu")

    @cached_property
    def slot_table(self) -> "torch.Tensor":
        """Int32 `[layers, slots]` on `device`: the expert in each of this rank's slots in the
        running view, -1 = empty. The tensor stays; a step that adopts a view changes it.
        """
        import torch

        geometry = self.config.geometry
        table = torch.full((geometry.layers, geometry.slots_per_rank), EMPTY, dtype=torch.int32)
        if self._view is not None:
            self._fill(table)
        return table

    def _fill(self, table: "torch.Tensor") -> None:
        table.numpy()[:] = self.view.placement[:, self.rank]

    def slots(self, layer: int) -> tuple[int, ...]:
        """Logical expert in each local slot of `layer` in the present view, -1 = empty."""
        self._check_layer(layer)
        return self.view.slots(layer, self.rank)

    def register_weights(self, load: LoadWeights) -> None:
        """Say where this engine keeps its expert weights, in a group without `weights`.

        Args:
            load: `load(layer, slots)` returns what `weights(layer)` shall give while `slots` are
                the experts in this rank's slots; it is called again when a view changes them.

        Raises:
            UsageError: the group's daemons keep the weights.
        """
        self._weights.register(load)

    def weights(self, layer: int) -> Any:
        """The expert weights of `layer` for the slots of the present view.

        In a group with `weights`: a mapping from each tensor's name to a tensor `[S, *shape]` over
        the arena of this rank, which the daemon fills; expert by slot as `slots(layer)` says,
        undefined where a slot is empty. They are for reading only, and for this step: a later view
        may put other experts into the slots. Else: what the engine's callback gave.

        Raises:
            UsageError: there was no step yet, or the engine keeps its own weights and registered no
                callback.
            SlotInvalid: a slot does not hold what the view says. Nothing is handed out.
            Unavailable: the daemon did not hand the arena over.
        """
        self._check_usable()
        return self._weights.get(layer, self.slots(layer))

    def load(self) -> NDArray[np.uint64]:
        """Tokens that this rank sent to each expert in complete steps, uint64 [layers, experts]."""
        self._check_usable()
        return self._handle.loads((self.config.geometry.layers, self.config.geometry.experts))

    @contextmanager
    def _warm(self) -> Iterator[None]:
        self._handle.warmup(True)
        try:
            yield
        finally:
            self._handle.warmup(False)

    def warmup(self) -> AbstractContextManager[None]:
        """`with session.warmup():` suspends hang detection for this rank (JIT, graph capture)."""
        self._check_usable()
        return self._warm()

    def status(self) -> abi.Status:
        """What this rank's header says.

        Returns:
            A record with, among others, `rank`, `incarnation`, `runner_pid` and `engine_pid`
            (0: none), `fenced` (the latest incarnation that was expelled), `epoch`, `step`,
            `complete_steps`, `torn_steps`, `warmup` (1: hang detection is suspended).

        Raises:
            UsageError: the session is detached, or another process's.
        """
        self._check_usable()
        return self._handle.status()

    # ---- end

    def detach(self) -> None:
        """Give the rank back. Tensors that an exchange returned must not be used any more; those of
        `weights` are other experts' before long, and on a GPU their memory is gone, too.

        Calling it again does nothing.

        Raises:
            UsageError: a step is open, or the session belongs to another process.
        """
        if self._closed:
            return
        self._check_usable()
        if self._step is not None:
            raise UsageError("detach inside a step; leave its `with` block first")
        self._closed = True
        try:
            for exchange in self._kinds:
                exchange._operators.close()
            self._kinds.clear()
            self._exchanges.clear()
            self._weights.close()
            self._release()
        finally:  # also after a signal's handler: who has the seat would have it for good
            self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child on its way out has nothing to give back
        if self._step is not None:
            give_up_after(error, self._give_up)  # its block has not ended it, and will not
        self.detach()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this session belongs to process {self._pid} and was inherited by a fork into "
                f"{os.getpid()}; attach after the fork, with a rank for each process"
            )
        if self._closed:
            raise UsageError("this session is detached; call elasticep.attach again")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= whole("layer", layer) < self.config.geometry.layers:
            raise UsageError(
                f"layer {layer} is outside 0..{self.config.geometry.layers - 1} of group "
                f"{self.config.name!r}"
            )


def _name_of(spec: ExchangeSpec, specs: dict[str, ExchangeSpec]) -> str:
    return next((name for name, known in specs.items() if known == spec), "")
