"""Every error elasticep raises.

    ElasticEPError
    ├── ConfigError            a setting or argument that cannot be used
    │   ├── GeometryError      sizes that do not fit together
    │   ├── SpecError          an exchange that makes no sense, or that we do not stand for
    │   ├── GroupMismatch      this engine and the group disagree on geometry, exchanges or layout
    │   └── CapExceeded        more tokens than the exchange's cap
    ├── TensorError            wrong dtype, shape, device or ids out of range
    ├── NativeError            the native library is missing or refused a call
    ├── MemoryShort            memory could not be reserved
    ├── DescriptorsShort       a process has no file descriptors left for this
    ├── DeviceFailed           a GPU, or this process's context on it, failed
    ├── AttachError            a rank could not be attached
    │   ├── DaemonUnavailable  no daemon behind the socket
    │   ├── UnknownGroup       the daemon serves no such group
    │   ├── UnknownRank        the daemon does not hold that rank
    │   └── SeatTaken          another engine holds that rank
    ├── Unavailable            controller or store cannot be reached within the deadline
    │   ├── NotLeader          this controller does not lead
    │   └── Busy               it serves as many as it may; try again
    ├── Fenced                 this rank was expelled; its work does not count
    ├── StepTimeout            a barrier or exchange did not end within its deadline
    ├── StepTorn               this step does not count; its `with` block takes this error in
    ├── UsageError             calls in an order that is not allowed
    ├── WeightsError           expert weights that cannot be used
    │   ├── CheckpointError    a checkpoint that is broken, or lacks what the group needs
    │   ├── ChecksumMismatch   bytes are not those that their label or source promised
    │   └── SlotInvalid        a slot does not hold the expert that the view says
    └── PlacementError         no placement satisfies the request
        └── ExpertsLost        no member holds these experts

Messages name the thing, the limit and the remedy.
"""

from collections.abc import Sequence


class ElasticEPError(Exception):
    """Root of all errors of this package. `reason` is a stable, machine-readable word."""

    reason = "INTERNAL"


class ConfigError(ElasticEPError):
    """A setting or an argument that cannot be used."""

    reason = "CONFIG_INVALID"


class GeometryError(ConfigError):
    """Sizes that do not fit together."""

    reason = "GEOMETRY_INVALID"


class SpecError(ConfigError):
    """An exchange that makes no sense, or a flag that we do not stand for."""

    reason = "SPEC_INVALID"


class GroupMismatch(ConfigError):
    """This engine and the group disagree on geometry, exchanges or memory layout."""

    reason = "GROUP_MISMATCH"


class CapExceeded(ConfigError):
    """A batch has more tokens than the exchange's cap."""

    reason = "CAP_EXCEEDED"


class TensorError(ElasticEPError):
    """A tensor of the wrong dtype, shape or device, or with ids out of range."""

    reason = "TENSOR_INVALID"


class NativeError(ElasticEPError):
    """The native library is missing, of another version, or refused a call."""

    reason = "NATIVE"


class MemoryShort(ElasticEPError):
    """Memory could not be reserved."""

    reason = "MEMORY_SHORT"


class DescriptorsShort(ElasticEPError):
    """A process may not open as many file descriptors as something takes."""

    reason = "DESCRIPTORS_SHORT"


class DeviceFailed(ElasticEPError):
    """A GPU, or this process's context on it, failed; every further call on it fails, too."""

    reason = "DEVICE_FAILED"


class AttachError(ElasticEPError):
    """An engine could not take its rank."""

    reason = "ATTACH_FAILED"


class DaemonUnavailable(AttachError):
    """No daemon answers behind the socket."""

    reason = "DAEMON_UNAVAILABLE"


class UnknownGroup(AttachError):
    """The daemon serves no such group."""

    reason = "GROUP_UNKNOWN"


class UnknownRank(AttachError):
    """The daemon does not hold that rank."""

    reason = "RANK_UNKNOWN"


class SeatTaken(AttachError):
    """Another engine holds that rank."""

    reason = "SEAT_TAKEN"


class Unavailable(ElasticEPError):
    """Controller or store cannot be reached within the deadline."""

    reason = "UNAVAILABLE"


class NotLeader(Unavailable):
    """This controller does not lead, or lost the lead while writing."""

    reason = "NOT_LEADER"


class Busy(Unavailable):
    """Whoever was asked serves as many as it may at a time; ask again."""

    reason = "BUSY"


class Fenced(ElasticEPError):
    """This rank was expelled; nothing it does counts until it attaches anew.

    Attributes:
        epoch: the first epoch without this rank (0 if not known).
        why: what the daemon or the peers said.
    """

    reason = "FENCED"

    def __init__(self, epoch: int, why: str) -> None:
        since = f" (epoch {epoch})" if epoch else ""
        super().__init__(
            f"this rank was expelled{since}: {why}; attach again to take a new incarnation"
        )
        self.epoch = epoch
        self.why = why


class StepTimeout(ElasticEPError):
    """A barrier or an exchange did not end within its deadline."""

    reason = "STEP_TIMEOUT"


class StepTorn(ElasticEPError):
    """The running step is torn: it does not count, and its remaining calls raise this at once.

    The `with session.step()` block takes it in and leaves `step.complete` False, so an engine that
    lets it pass sees nothing but an incomplete step.
    """

    reason = "STEP_TORN"


class UsageError(ElasticEPError):
    """Calls in an order that is not allowed."""

    reason = "USAGE"


class WeightsError(ElasticEPError):
    """Expert weights that cannot be used."""

    reason = "WEIGHTS_INVALID"


class CheckpointError(WeightsError):
    """A checkpoint that is broken, or lacks what the group needs."""

    reason = "CHECKPOINT_INVALID"


class ChecksumMismatch(WeightsError):
    """Bytes are not those that their label or their source promised."""

    reason = "CHECKSUM_MISMATCH"


class SlotInvalid(WeightsError):
    """A slot does not hold the expert that the view says, or its bytes are not whole yet."""

    reason = "SLOT_INVALID"


class PlacementError(ElasticEPError):
    """No placement satisfies the request."""

    reason = "PLACEMENT_IMPOSSIBLE"


class ExpertsLost(PlacementError):
    """No member holds these experts.

    Attributes:
        lost: (layer, logical expert) pairs without a live replica.
    """

    reason = "EXPERTS_LOST"

    def __init__(self, lost: Sequence[tuple[int, int]]) -> None:
        self.lost = tuple(lost)
        shown = ", ".join(f"layer {layer} expert {expert}" for layer, expert in self.lost[:8])
        more = f" and {len(self.lost) - 8} more" if len(self.lost) > 8 else ""
        super().__init__(
            f"{len(self.lost)} experts have no live replica ({shown}{more}); "
            "add ranks, restore them from a backup, or set the policy to 'serve'"
        )
