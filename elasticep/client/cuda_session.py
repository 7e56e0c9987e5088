"""A rank on a GPU: steps are kernels on the engine's stream, and the host asks for them afterwards.

Entering a step puts its barrier on the current stream, leaving it puts its end there; neither waits
for the GPU. What the barrier agreed on and whether the step counts is waited for when it is asked
for: `step.epoch`, `step.complete`. A whole step can be captured into a CUDA graph once and replayed
across failures and views (`CudaSession.replay`).
"""

import contextlib
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from elasticep.client.cuda_handle import CudaHandle
from elasticep.client.cuda_reasons import Reasons
from elasticep.client.cuda_weights import DeviceWeights
from elasticep.client.handle import SessionHandle
from elasticep.client.session import Session
from elasticep.client.step import Passed, Step
from elasticep.client.view import View
from elasticep.errors import (
    ElasticEPError,
    ExpertsLost,
    StepTimeout,
    StepTorn,
    UsageError,
)
from elasticep.group import GroupConfig
from elasticep.native import abi
from elasticep.native.cuda import StepResult, StepStatus
from elasticep.native.cuda_session import Wait
from elasticep.native.cuda_structs import Copied
from elasticep.native.tensors import over

if TYPE_CHECKING:
    from torch.cuda import CUDAGraph

DOOMED_PAUSE_MS: Final = 2
"""Before the next barrier while a member of the view is dead; a newly staged view ends it."""


class CudaStep(Step):
    """A step on a stream. Its facts are waited for when they are asked for, and must be before the
    next step begins.

    Attributes:
        captured: it went into a CUDA graph: it has no facts, each replay has.
    """

    def __init__(
        self, session: "CudaSession", tokens: int, timeout_ms: int, prompt: bool = False
    ) -> None:
        super().__init__(session, tokens, timeout_ms, prompt)
        self.captured = False
        self._cuda = session
        self._place = 0  # counted from 1: which barrier, and which end, of the session it is
        self._stream = 0
        self._ended = False
        self._known: Passed | None = None
        self._settled = False
        self._runs = True  # the barrier let it run
        self._explained = False  # `_why` says all there is
        self._masks: list[torch.Tensor] = []

    def _passed(self) -> Passed:
        if self._known is None:
            if not self._place and not self.captured:
                return self._facts
            self._known = self._cuda._facts_of(self)
        return self._known

    def _work(self) -> Passed:
        passed = self._passed()
        if not self._runs:
            raise self._cuda._torn_here()
        return passed

    @property
    def work(self) -> int:
        """Agreed completion: the work of this step. Raises `StepTorn` if none runs."""
        return self._work().work

    @property
    def settled(self) -> int:
        """Agreed completion: the last work that is complete on all ranks. As for `work`."""
        return self._work().settled

    @property
    def complete(self) -> bool:
        """Whether the step counts; after the block, and it waits for the end of the step.

        Raises:
            Fenced: this rank was expelled.
            StepTimeout: the barrier did not end in time. A new step goes on waiting at it.
            ExpertsLost: a token needed an expert that no member holds, and the policy is `refuse`.
            CapExceeded, TensorError, UsageError: an expert got more rows than its block has room
                for, an id was none, or ranks disagree; a repeat would end in the same way.
            DeviceFailed: the device failed in or before this step.
        """
        if self._ended and not self._settled:
            self._complete = self._cuda._settle(self)
            self._settled = True
        return self._complete

    @property
    def why(self) -> str:
        """Why the step does not count, in words, also where `complete` raises; "" if it does. After
        the block; waits for the end of the step, unless an error had left the block.

        Raises:
            DeviceFailed: the device failed in or before this step.
            UsageError: a later step has begun, and nobody had asked before.
        """
        if self._ended and not self._why and not self._explained:
            try:
                _ = self.complete
            except ElasticEPError:
                if not self._explained:
                    raise
        return self._why

    @property
    def token_ok(self) -> torch.Tensor:
        """Bool `[tokens]` on the GPU: False where a lost expert was needed.

        Raises:
            UsageError: the exchanges of this step had different numbers of tokens.
        """
        sizes = sorted({len(mask) for mask in self._masks})
        if len(sizes) > 1:
            raise UsageError(
                f"exchanges of this step brought {sizes} tokens, so one mask does not fit; use "
                "token_ok of what each dispatch returned"
            )
        if not self._masks:
            return torch.ones(self._tokens, dtype=torch.bool, device=self._cuda.device)
        return torch.stack(self._masks).amax(0) == 0

    def _note_lost(self, lost: Any) -> None:
        self._masks.append(lost)


class CudaSession(Session):
    """`Session` for a group with `device = "cuda"`; `elasticep.attach` makes one.

    Attributes:
        device: the GPU that holds this rank's memory.
        slot_table: int32 `[layers, slots]` on it: the expert in each of this rank's slots in the
            running view, -1 = empty. The tensor stays; a barrier that adopts a view changes it.
    """

    def __init__(
        self,
        handle: CudaHandle,
        config: GroupConfig,
        *,
        rank: int,
        incarnation: int,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            cast(SessionHandle, handle),
            config,
            rank=rank,
            incarnation=incarnation,
            release=release,
        )
        self._cuda = handle
        self.device = handle.device
        geometry = config.geometry
        shape = (geometry.layers, geometry.slots_per_rank)
        self.slot_table = over(handle.slot_experts(), shape, torch.int32, handle.device)
        arena = config.arena_layout()
        self._on_device = None if arena is None else DeviceWeights(handle, arena, rank)
        self._reasons = Reasons(config, rank, incarnation)
        self._placed = 0  # steps put on streams, replays included
        self._latest: CudaStep | None = None
        self._epoch = 0  # of the last step that the host asked about
        self._doomed = False
        self._judged = 0  # epoch that `_lost` is about
        self._lost: list[tuple[int, int]] = []

    # ---- steps

    def _new_step(self, tokens: int, timeout_ms: int, prompt: bool) -> Step:
        return CudaStep(self, tokens, timeout_ms, prompt)

    def _begin(self, step: Step) -> None:
        assert isinstance(step, CudaStep)
        self._check_usable()
        self._check_none_open()
        for exchange in self._kinds:
            exchange._operators.forget()
        step.captured = torch.cuda.is_current_stream_capturing()
        if not step.captured:
            self._recount()
            self._arrive(step._timeout_ms)
        unsure = self._cuda.unsure
        self._cuda.begin(step._announced, step._timeout_ms)
        if step.captured:
            self._cuda.unsure = unsure
        else:
            self._place(step)
        self._step = step

    def _arrive(self, timeout_ms: int) -> None:
        """Wait on the host where a barrier could only say that there is nothing to run."""
        if not self._epoch:
            self._cuda.enter(0, timeout_ms)
        elif self._doomed:
            with contextlib.suppress(StepTimeout):  # then the next barrier says the same
                self._cuda.enter(self._epoch, DOOMED_PAUSE_MS)
        self._doomed = False

    def _place(self, step: CudaStep) -> None:
        self._placed += 1
        step._place, step._stream = self._placed, self._cuda.stream
        self._latest = step
        self._cuda.unsure = False

    def _recount(self) -> None:
        """Whoever was interrupted between a launch and its note does not know which step is which:
        a later one would be told what became of an earlier one."""
        if self._cuda.unsure:
            self._latest = None
            self._placed = self._cuda.recount()
            self._cuda.unsure = False

    def _give_up(self) -> None:
        self._cuda.unsure = True  # whether its end is on the stream
        super()._give_up()

    def _end(self, step: Step, error: BaseException | None) -> bool:
        assert isinstance(step, CudaStep)
        if step.captured and error is not None:
            self._step = None  # the capture fails with it: nothing was run
            return False
        step._ended = not step.captured
        step._settled = step.captured
        taken = super()._end(step, error)
        if error is None:
            step._why = ""  # whether it counts is not known here
        return taken

    def replay(
        self, graph: "CUDAGraph", captured: CudaStep | None = None, *, timeout: float | None = None
    ) -> CudaStep:
        """Launch a captured step once, on the current stream.

        Args:
            graph: holds exactly one step of this session, from `step()` to its end.
            captured: the step that it holds, if the replay's `token_ok` is wanted.
            timeout: seconds to wait for a first view; None: the group's `step_timeout_ms`.

        Returns:
            The step that runs; `complete` waits for it.

        Raises:
            Fenced: this rank was expelled.
            StepTimeout: no view came in time.
            UsageError: a step is open, or the session is detached or another process's.
        """
        self._check_usable()
        if self._step is not None:
            raise UsageError("replay inside a step; leave its `with` block first")
        fenced = self._cuda.fenced()
        if fenced is not None:
            raise fenced
        self._recount()
        self._arrive(0 if timeout is None else max(1, round(timeout * 1000)))
        step = CudaStep(self, 0 if captured is None else captured._tokens, 0)
        if captured is not None:
            step._masks = captured._masks
        step._begun = step._ended = True
        self._cuda.unsure = True
        graph.replay()
        self._place(step)
        return step

    def run_graph(
        self,
        graph: "CUDAGraph",
        captured: CudaStep | None = None,
        *,
        on_torn: Callable[[Step], None] | None = None,
    ) -> CudaStep:
        """`replay` until a step is complete, as `run` does; that step.

        Raises:
            ExpertsLost, Fenced, StepTimeout: as for `run`.
        """
        while True:
            step = self.replay(graph, captured)
            if step.complete:
                return step
            if on_torn is not None:
                on_torn(step)

    # ---- weights

    def weights(self, layer: int) -> Any:
        """The expert weights of `layer`, on this rank's GPU.

        In a group with `weights`: a mapping from each tensor's name to a tensor `[S, *shape]`, at
        one address and the same objects for the whole life of the session, also before the first
        step and in a capture. Which expert a slot holds is what `slot_table` says while kernels
        run. In an eager step it is also checked that the slots hold what the step's view names,
        for which the step's barrier is waited for. They are for reading only; what lies in an
        empty slot is undefined. Else: what the engine's callback gave, after the barrier.

        Raises:
            UsageError: the engine keeps its own weights and there was no step yet, or no callback.
            SlotInvalid: a slot does not hold what the view of this step says.
        """
        if self._on_device is None:
            return super().weights(layer)
        self._check_usable()
        self._check_layer(layer)
        step = self._step
        if isinstance(step, CudaStep) and not step.captured:
            step._passed()
            if step._runs:
                self._on_device.require(layer, self.slots(layer))
        return self._on_device.get(layer)

    @property
    def weights_copied(self) -> Copied:
        """What came from the daemon's arena to the GPU so far: `slots`, `bytes`, and in how many
        nanoseconds, `ns`."""
        self._check_usable()
        return self._cuda.weights_copied()

    # ---- what the GPU says

    def _facts_of(self, step: CudaStep) -> Passed:
        if step.captured:
            raise UsageError(
                "this step was captured and has not run; session.replay(graph) gives the steps "
                "that run"
            )
        return self._read(step, self._wait(step, Wait.BEGUN))

    def _wait(self, step: CudaStep, what: Wait) -> StepResult:
        if step is not self._latest or self._cuda.unsure:
            raise UsageError(
                "a later step has begun; ask what a barrier agreed on, and whether a step is "
                "complete, before the next one"
            )
        return self._cuda.wait(what, step._place, step._stream)

    def _read(self, step: CudaStep, result: StepResult) -> Passed:
        members = MappingProxyType(result.members)
        prompt = any(told & abi.TOKENS_PROMPT for told in result.tokens.values())
        self._epoch = result.epoch
        self._doomed = result.status is StepStatus.DOOMED
        step._runs = result.status is StepStatus.RUN
        return Passed(result.step, result.epoch, prompt, result.work, result.settled, members)

    def _settle(self, step: CudaStep) -> bool:
        result = self._wait(step, Wait.ENDED)
        step._known = self._read(step, result)
        error = self._error_of(step, result)
        if not step._why:  # else what the engine, or a call, had raised
            if error is not None:
                step._why = f"{type(error).__name__}: {error}"
            elif not result.complete:
                step._why = self._reasons.incomplete(result)
        step._explained = True
        if error is not None:
            raise error
        return result.complete

    def _error_of(self, step: CudaStep, result: StepResult) -> ElasticEPError | None:
        if result.status is StepStatus.EXPELLED:
            return self._cuda.expelled(result.epoch)
        if result.status is StepStatus.TIMEOUT:
            return self._reasons.barrier(result)
        if not result.complete:
            experts = self.config.geometry.experts
            fenced = self._cuda.fenced()
            return fenced or self._reasons.hopeless(result, lambda: self.view.lost(experts))
        if result.epoch != self._judged:
            self._judged, self._lost = result.epoch, self.view.lost(self.config.geometry.experts)
        refused = self._lost and step._masks and not self._cuda.serves_lost()
        if refused and not bool(step.token_ok.all()):
            return ExpertsLost(self._lost)
        return None

    def _torn_here(self) -> StepTorn:
        """For a call that was waited for and found its step torn."""
        return StepTorn(self._reasons.incomplete(self._cuda.context.result()))

    @property
    def view(self) -> View:
        """The view of the running or the last step; waits for its barrier.

        Raises:
            UsageError: there was no step yet, or none has run in a view.
        """
        if self._latest is not None and not self._latest._settled:
            self._latest._passed()
        if self._epoch and (self._view is None or self._view.epoch != self._epoch):
            self._view = self._read_epoch(self._epoch)
        return super().view

    def _read_epoch(self, epoch: int) -> View:
        geometry = self.config.geometry
        placement = self._cuda.slots(
            epoch, (geometry.layers, geometry.max_ranks, geometry.slots_per_rank)
        )
        placement.flags.writeable = False
        result = self._cuda.context.result()
        return View(epoch, result.digest, MappingProxyType(result.members), placement)
