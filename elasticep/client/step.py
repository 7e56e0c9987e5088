"""One pass through the step barrier and what it found out. `Session.step` makes them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from elasticep.errors import ElasticEPError, UsageError
from elasticep.native import abi

if TYPE_CHECKING:
    import torch

    from elasticep.client.session import Session


LONGEST_S: Final = 4e6
"""No wait is longer, in seconds: its milliseconds fit into 32 bits."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What all members agreed on at a barrier; the attributes of `Step` of the same names."""

    number: int = 0
    epoch: int = 0
    prompt: bool = False
    work: int = 0
    settled: int = 0
    members: MappingProxyType[int, int] = field(default_factory=lambda: MappingProxyType({}))


_NOT_YET: Final = Passed()


class Step:
    """One forward pass of all members, opened by the step barrier. Use it with `with`, once.

    Attributes:
        number: of the barrier; the same on all members, and of no meaning after a repeat.
        epoch: of the view that the step runs in, 0 before the barrier.
        prompt: whether any rank brings prompt tokens, so that all prefill (preset `AUTO`).
        work: agreed completion: the number of the work that all ranks run in this step.
        settled: agreed completion: the last work that is complete on all ranks.
        members: rank -> incarnation in that view.
        complete: after the block: whether the step counts. False: repeat it.
        why: after the block: why it does not, in words; "" if it does.
    """

    def __init__(
        self, session: "Session", tokens: int, timeout_ms: int, prompt: bool = False
    ) -> None:
        self._facts = _NOT_YET
        self._complete = False
        self._why = ""
        self._session = session
        self._tokens = tokens
        self._announced = tokens | (abi.TOKENS_PROMPT if prompt else 0)
        self._timeout_ms = timeout_ms
        self._begun = False
        self._open_exchanges: set[tuple[int, int]] = set()
        self._lost: dict[int, NDArray[np.uint8]] = {}

    def _passed(self) -> Passed:
        return self._facts

    @property
    def number(self) -> int:
        """Number of the barrier, the same on all members."""
        return self._passed().number

    @property
    def epoch(self) -> int:
        """Epoch of the view, 0 before the barrier."""
        return self._passed().epoch

    @property
    def prompt(self) -> bool:
        """Whether any rank brings prompt tokens."""
        return self._passed().prompt

    @property
    def work(self) -> int:
        """Agreed completion: the work of this step."""
        return self._passed().work

    @property
    def settled(self) -> int:
        """Agreed completion: the last work that is complete on all ranks."""
        return self._passed().settled

    @property
    def members(self) -> MappingProxyType[int, int]:
        """Rank -> incarnation in the view."""
        return self._passed().members

    @property
    def complete(self) -> bool:
        """After the block: whether the step counts."""
        return self._complete

    @property
    def why(self) -> str:
        """After the block: why the step does not count."""
        return self._why

    @property
    def token_ok(self) -> "torch.Tensor":
        """Bool `[tokens]` on the CPU: False where a lost expert was needed (policy `serve` only).

        Raises:
            UsageError: the exchanges of this step had different numbers of tokens; use
                `Received.token_ok` of each.
        """
        import torch

        if len(self._lost) > 1:
            raise UsageError(
                f"exchanges of this step brought {sorted(self._lost)} tokens, so one mask does not "
                "fit; use token_ok of what each dispatch returned"
            )
        for lost in self._lost.values():
            return torch.from_numpy(lost == 0)
        return torch.ones(self._tokens, dtype=torch.bool)

    def __enter__(self) -> Self:
        if self._begun:
            raise UsageError("this step was entered before; call session.step() for each step")
        self._begun = True
        try:
            self._session._begin(self)
        except ElasticEPError:
            raise
        except BaseException as error:
            # A signal's, perhaps when the barrier was passed already: no block would end the step.
            give_up_after(error, self._session._give_up)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._session._end(self, error)

    def _note_lost(self, lost: Any) -> None:
        held = self._lost.get(len(lost))
        if held is None:
            self._lost[len(lost)] = lost.copy()
        else:
            np.maximum(held, lost, out=held)

    def _note_whole(self, tokens: int) -> None:
        """An exchange of so many tokens that needed no lost expert."""
        if tokens and tokens not in self._lost:
            self._lost[tokens] = np.zeros(tokens, np.uint8)


def give_up_after(error: BaseException | None, give_up: Callable[[], None]) -> None:
    """Give a step up after an error, which is the one to report."""
    try:
        give_up()
    except ElasticEPError as second:
        if error is not None:
            error.add_note(f"the step could not be given up in order: {second}")
