"""What an exchange is: how rows travel, in which format, and how they arrive.

Three questions describe any dispatch: how many copies of a token are sent (`Copies`), whether the
CPU waits for a row count (`ExchangeSpec.cpu_sync`), and in what order the rows arrive (`Layout`).
The presets are the answers that serving engines know by name; `elasticep.flags` maps the flags of
those engines onto them. Sizes that follow from a spec are computed in `elasticep.geometry`.

This module imports neither torch nor grpc.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, Self

from elasticep.config import refuse_unknown
from elasticep.errors import ConfigError, SpecError
from elasticep.wire import COMBINE_DTYPES, RowFormat, WireDtype

__all__ = [
    "ALLGATHER",
    "AUTO",
    "COMBINE_DTYPES",
    "EXPAND",
    "EXPAND_SYNC",
    "LOW_LATENCY",
    "NORMAL",
    "PRESET_NAMES",
    "ROUTED",
    "Copies",
    "ExchangeSpec",
    "Layout",
    "Reduce",
    "RowFormat",
    "ScaleLayout",
    "WireDtype",
]

MAX_TOKENS: Final = 65_536
"""Largest cap of an exchange, in rows per rank: a token index fits into 16 bits."""

MAX_CHANNELS: Final = 2
"""Two channels let the two halves of a batch be in flight at once."""

DEFAULT_DECODE_TOKENS: Final = 128
"""Default cap of the decode presets, in rows per rank (what SGLang uses as well)."""

DEFAULT_PREFILL_TOKENS: Final = 4096
"""Default cap of the presets meant for prompt batches, in rows per rank."""


class Copies(StrEnum):
    """How many copies of a token are sent."""

    ALL = "all"
    """One to every rank."""
    PER_RANK = "per_rank"
    """One to each rank that holds at least one of the token's experts."""
    PER_EXPERT = "per_expert"
    """One for each of the token's experts, also when two of them share a rank."""


class Layout(StrEnum):
    """In what order the rows are handed to the expert kernel."""

    ARRIVAL = "arrival"
    """By source rank and token, without gaps, each row with its expert ids and weights."""
    CONTIGUOUS = "contiguous"
    """One row per (token, expert), grouped by expert, every group padded to 128 rows."""
    MASKED = "masked"
    """One row per (token, expert) in a block of fixed size per expert, with a count per block."""
    ROUTED = "routed"
    """A block of `max_tokens` rows per source rank, each row with its expert ids and weights;
    rows that did not arrive carry invalid ids."""


class Reduce(StrEnum):
    """Where the weighted sum over a token's experts is taken."""

    PER_RANK = "per_rank"
    """Experts of one rank are summed there; one row per rank travels back."""
    PER_EXPERT = "per_expert"
    """One row per expert travels back and is summed at home in top-k order. The result has the
    same bits whichever replica computed a row, so tokens do not change across a failover."""


class ScaleLayout(StrEnum):
    """How the scales of quantised rows are handed to the expert kernel."""

    ROWS = "rows"
    """As on the wire: the scales of a row next to each other."""
    COLUMNS = "columns"
    """fp8: fp32, column-major, each column on a 16-byte boundary (DeepGEMM's fp32 layout)."""
    PACKED = "packed"
    """fp8, mxfp8: four UE8M0 bytes in an int32, column-major, each column on a 16-byte boundary.
    Scales of fp8 rows are then rounded up to powers of two when the rows are quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpec:
    """One way of exchanging rows, checked when it is made.

    Enum fields also take their values as strings. Raises `SpecError` for values out of range and
    for combinations that make no sense, with the reason and the remedy.

    Attributes:
        copies: copies sent per token.
        cpu_sync: dispatch waits on the host until the exact row count is known. A step with such
            an exchange cannot be part of a CUDA graph.
        layout: order in which the expert kernel gets the rows.
        dispatch_dtype: wire format on the way out.
        combine_dtype: wire format on the way back; sums are taken in fp32 whatever it is.
        reduce: where the sum over a token's experts is taken. `per_expert` stays independent of
            the placement with `combine_dtype="fp8"` too, since a row is quantised by itself; only
            fp32, fp16 and bf16 also equal the sum of unquantised rows.
        max_tokens: the cap: the most rows a rank may bring to one exchange. A decode step has
            requests x draft tokens of them.
        channels: independent sets of buffers; 2 allow two-batch overlap.
        masked_room: rows of each expert's block in the masked layout; None means the worst case,
            max_ranks x max_tokens. Less saves memory, but more rows than that for one expert in
            one step are an error.
        scale_layout: how the expert kernel gets the scales of quantised rows.
        num_sms: SMs that the kernels may take on a GPU; None means the formula,
            `elasticep.geometry.sm_count`.
        replicated_input: every rank holds every token already (tensor-parallel attention):
            nothing is sent, every rank gets the sum over all ranks.
        prefill: the spec for steps in which any rank has prompt tokens. A spec with one stands
            for two exchanges, of which the step barrier picks one; see `resolve`.
    """

    copies: Copies
    cpu_sync: bool
    layout: Layout
    dispatch_dtype: WireDtype = WireDtype.BF16
    combine_dtype: WireDtype = WireDtype.BF16
    reduce: Reduce = Reduce.PER_RANK
    max_tokens: int = DEFAULT_DECODE_TOKENS
    channels: int = 1
    masked_room: int | None = None
    scale_layout: ScaleLayout = ScaleLayout.ROWS
    num_sms: int | None = None
    replicated_input: bool = False
    prefill: Self | None = None

    def __post_init__(self) -> None:
        """Turn plain values into enums and refuse what cannot work."""
        for name, kind in _ENUM_FIELDS.items():
            object.__setattr__(self, name, _choice(kind, name, getattr(self, name)))
        for name in ("cpu_sync", "replicated_input"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} is {getattr(self, name)!r}; use true or false")
        _check_range("max_tokens", self.max_tokens, MAX_TOKENS)
        _check_range("channels", self.channels, MAX_CHANNELS)
        if self.masked_room is not None:
            _check_range("masked_room", self.masked_room, 2**31 - 1)
        if self.num_sms is not None:
            _check_range("num_sms", self.num_sms, 1024)
        if not isinstance(self.prefill, ExchangeSpec | None):
            raise SpecError(f"prefill is {self.prefill!r}; give an exchange, or leave it out")
        reason = next(self._refusals(), None)
        if reason is not None:
            raise SpecError(reason)

    def _refusals(self) -> Iterator[str]:
        """For each thing in this spec that makes no sense, the sentence that says why."""
        everywhere = self.copies is Copies.ALL
        layout = f"layout={self.layout.value!r}"
        if self.cpu_sync and everywhere:
            yield (
                "cpu_sync with copies='all' waits for nothing: the step barrier already tells "
                "every rank how many rows each rank brings; set cpu_sync to false"
            )
        if self.cpu_sync and self.layout in (Layout.MASKED, Layout.ROUTED):
            yield (
                f"cpu_sync with {layout} waits for a count that nobody uses: this layout has a "
                "fixed size; set cpu_sync to false, or use layout='contiguous' or 'arrival'"
            )
        if everywhere and self.layout is not Layout.ARRIVAL:
            yield (
                f"copies='all' with {layout}: with every row on every rank the rows stay in the "
                "order of their sources and the expert kernel skips those without an expert here; "
                "use layout='arrival', or copies='per_rank'"
            )
        if self.copies is Copies.PER_EXPERT and not self.by_expert:
            yield (
                f"copies='per_expert' with {layout} would send a row twice to a rank that then "
                "handles it in arrival order; use copies='per_rank', or layout='masked'"
            )
        if self.combine_dtype not in COMBINE_DTYPES:
            yield (
                f"combine_dtype={self.combine_dtype.value!r} is a format for dispatch only: what "
                "travels back is added to other rows; use one of "
                + ", ".join(dtype.value for dtype in COMBINE_DTYPES)
            )
        if self.masked_room is not None and self.layout is not Layout.MASKED:
            yield (
                f"masked_room={self.masked_room} has no meaning with {layout}; leave it out, or "
                "use layout='masked'"
            )
        yield from self._scale_refusals()
        if self.replicated_input and not everywhere:
            yield (
                f"replicated_input with copies={self.copies.value!r}: every rank has every token "
                "already, so nothing is sent to anyone; use copies='all'"
            )
        if self.replicated_input and self.dispatch_dtype.quantised:
            yield (
                f"replicated_input with dispatch_dtype={self.dispatch_dtype.value!r}: nothing is "
                "sent, so there is nothing to quantise; use bf16, fp16 or fp32"
            )
        if self.prefill is not None:
            yield from self._prefill_refusals(self.prefill)

    def _scale_refusals(self) -> Iterator[str]:
        if self.scale_layout is ScaleLayout.ROWS:
            return
        name, wire = f"scale_layout={self.scale_layout.value!r}", self.dispatch_dtype
        formats = {
            ScaleLayout.COLUMNS: (WireDtype.FP8,),
            ScaleLayout.PACKED: (WireDtype.FP8, WireDtype.MXFP8),
        }[self.scale_layout]
        if wire not in formats:
            yield (
                f"{name} with dispatch_dtype={wire.value!r}: that layout is for "
                + " and ".join(dtype.value for dtype in formats)
                + " rows; leave it out"
            )
        if not self.by_expert:
            yield (
                f"{name} with layout={self.layout.value!r}: it is what grouped matrix products "
                "read, which want rows by expert; use layout='contiguous' or 'masked', or leave "
                "it out"
            )

    def _prefill_refusals(self, part: Self) -> Iterator[str]:
        if part.prefill is not None:
            yield "the prefill part of an exchange has itself a prefill part; leave that out"
        if part.max_tokens < self.max_tokens:
            yield (
                f"prefill.max_tokens={part.max_tokens} is below max_tokens={self.max_tokens}: a "
                "step with prompt tokens on one rank is a decode step on others; raise it"
            )
        if part.replicated_input != self.replicated_input:
            yield (
                "replicated_input differs between an exchange and its prefill part; it says where "
                "the tokens are, so set both alike"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A preset by name (any case), with fields changed.

        Names: ALLGATHER, NORMAL, LOW_LATENCY, EXPAND, EXPAND_SYNC, ROUTED and AUTO. The cap is
        128 rows per rank unless `max_tokens` says otherwise, for NORMAL and EXPAND_SYNC 4096.
        AUTO also takes `decode` (LOW_LATENCY, the default, or EXPAND) and `prefill_tokens`, the
        cap of its prefill part, which is NORMAL (4096, or `max_tokens` if larger). Formats,
        `reduce`, `channels` and `num_sms` apply to both parts.
        """
        key = name.upper() if isinstance(name, str) else name
        if key == "AUTO":
            return cls._auto(changes)
        if not isinstance(key, str) or key not in _PRESETS:
            known = ", ".join(PRESET_NAMES)
            raise SpecError(f"there is no preset {name!r}; use one of {known}")
        _refuse_unknown(changes)
        return cls(**{**_PRESETS[key], **changes})

    @classmethod
    def _auto(cls, changes: Mapping[str, Any]) -> Self:
        given = dict(changes)
        decode = given.pop("decode", "LOW_LATENCY")
        if decode not in ("LOW_LATENCY", "EXPAND"):
            raise SpecError(f"decode is {decode!r}; AUTO decodes with LOW_LATENCY or EXPAND")
        tokens = given.get("max_tokens")
        enough = max(tokens if isinstance(tokens, int) else 0, DEFAULT_PREFILL_TOKENS)
        cap = given.pop("prefill_tokens", enough)
        if given.get("prefill") is None:
            shared = {name: given[name] for name in _SHARED_FIELDS if name in given}
            given["prefill"] = cls.preset("NORMAL", max_tokens=cap, **shared)
        elif "prefill_tokens" in changes:
            raise SpecError("prefill and prefill_tokens are both given; keep one of them")
        return cls.preset(decode, **given)

    @classmethod
    def from_sglang(cls, backend: str, mode: str | None = None, **settings: Any) -> "ExchangeSpec":
        """What a value of SGLang's `--moe-a2a-backend` stands for; see `elasticep.flags`."""
        from elasticep import flags  # which is built on this module

        return flags.from_sglang(backend, mode, **settings)

    @classmethod
    def from_vllm(cls, backend: str, **settings: Any) -> "ExchangeSpec":
        """What a value of vLLM's `--all2all-backend` stands for; see `elasticep.flags`."""
        from elasticep import flags  # which is built on this module

        return flags.from_vllm(backend, **settings)

    @property
    def by_expert(self) -> bool:
        """Whether the expert kernel gets one row per (token, expert)."""
        return self.layout in (Layout.CONTIGUOUS, Layout.MASKED)

    def resolve(self, *, prompt: bool) -> Self:
        """The spec of one step. `prompt`: any rank of the step has prompt tokens.

        Every rank must pass the same value, so it has to come from the step barrier.
        """
        if self.prefill is None:
            return self
        return self.prefill if prompt else self.parts()[0]

    def parts(self) -> tuple[Self, ...]:
        """The exchanges that this spec stands for: itself, or its decode and prefill parts."""
        if self.prefill is None:
            return (self,)
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return (type(self)(**{**plain, "prefill": None}), self.prefill)

    def to_dict(self) -> dict[str, Any]:
        """Every field as a plain value; `from_dict` gives the same spec back."""
        plain: dict[str, Any] = {}
        for name in _FIELD_NAMES:
            value = getattr(self, name)
            if isinstance(value, ExchangeSpec):
                plain[name] = value.to_dict()
            else:
                plain[name] = value.value if isinstance(value, StrEnum) else value
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote, or a preset with changes: `{"preset": "ROUTED", ...}`.

        Raises `SpecError` for unknown keys, missing switches and values that cannot be used.
        """
        given = dict(plain)
        if isinstance(given.get("prefill"), Mapping):
            given["prefill"] = cls.from_dict(given["prefill"])
        preset = given.pop("preset", None)
        if preset is not None:
            return cls.preset(preset, **given)
        _refuse_unknown(given)
        missing = [name for name in ("copies", "cpu_sync", "layout") if name not in given]
        if missing:
            raise SpecError(
                f"an exchange lacks {', '.join(missing)}; add them, or name a preset "
                f"({', '.join(PRESET_NAMES)})"
            )
        return cls(**given)

    def to_json(self) -> str:
        """`to_dict` as canonical JSON: sorted keys, no spaces. Equal specs give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))


_FIELD_NAMES: Final = tuple(f.name for f in fields(ExchangeSpec))
_SHARED_FIELDS: Final = ("dispatch_dtype", "combine_dtype", "reduce", "channels", "num_sms")
_ENUM_FIELDS: Final[Mapping[str, type[StrEnum]]] = {
    "copies": Copies,
    "layout": Layout,
    "dispatch_dtype": WireDtype,
    "combine_dtype": WireDtype,
    "reduce": Reduce,
    "scale_layout": ScaleLayout,
}

_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ALLGATHER": {"copies": Copies.ALL, "cpu_sync": False, "layout": Layout.ARRIVAL},
    "NORMAL": {
        "copies": Copies.PER_RANK,
        "cpu_sync": True,
        "layout": Layout.ARRIVAL,
        "max_tokens": DEFAULT_PREFILL_TOKENS,
    },
    "LOW_LATENCY": {
        "copies": Copies.PER_EXPERT,
        "cpu_sync": False,
        "layout": Layout.MASKED,
        "reduce": Reduce.PER_EXPERT,
    },
    "EXPAND": {"copies": Copies.PER_RANK, "cpu_sync": False, "layout": Layout.MASKED},
    "EXPAND_SYNC": {
        "copies": Copies.PER_RANK,
        "cpu_sync": True,
        "layout": Layout.CONTIGUOUS,
        "max_tokens": DEFAULT_PREFILL_TOKENS,
    },
    "ROUTED": {"copies": Copies.PER_RANK, "cpu_sync": False, "layout": Layout.ROUTED},
}

PRESET_NAMES: Final = (*_PRESETS, "AUTO")
"""Names that `ExchangeSpec.preset` knows."""


def _choice(kind: type[StrEnum], name: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise SpecError(f"{name} is {value!r}; use one of {known}") from None


def _check_range(name: str, value: object, limit: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise SpecError(f"{name} is {value!r}; it must be a whole number from 1 to {limit}")


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    try:
        refuse_unknown("an exchange", given, _FIELD_NAMES)
    except ConfigError as error:
        raise SpecError(str(error)) from None


ALLGATHER: Final = ExchangeSpec.preset("ALLGATHER")
NORMAL: Final = ExchangeSpec.preset("NORMAL")
LOW_LATENCY: Final = ExchangeSpec.preset("LOW_LATENCY")
EXPAND: Final = ExchangeSpec.preset("EXPAND")
EXPAND_SYNC: Final = ExchangeSpec.preset("EXPAND_SYNC")
ROUTED: Final = ExchangeSpec.preset("ROUTED")
AUTO: Final = ExchangeSpec.preset("AUTO")
