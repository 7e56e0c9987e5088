"""The ctypes mirror against the header file: names, numbers, order, types, arguments."""

import ctypes
import enum
import re
from pathlib import Path

import pytest

from elasticep import errors
from elasticep.errors import ConfigError, NativeError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch, LostExperts
from elasticep.native import abi, convert
from elasticep.spec import ExchangeSpec

HEADER = (Path(__file__).resolve().parents[2] / "csrc/elasticep.h").read_text()
CODE = re.sub(r"^#.*$", "", re.sub(r"/\*.*?\*/", " ", HEADER, flags=re.S), flags=re.M)

STRUCTS = {
    "ep_exchange_config": abi.ExchangeConfig,
    "ep_geometry": abi.Geometry,
    "ep_timeouts": abi.Timeouts,
    "ep_layout_info": abi.LayoutInfo,
    "ep_view": abi.View,
    "ep_status": abi.Status,
    "ep_event": abi.Event,
    "ep_message": abi.Message,
    "ep_step_info": abi.StepInfo,
    "ep_received": abi.Received,
    "ep_rows": abi.Rows,
}
SCALARS = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "ep_exchange_config": abi.ExchangeConfig,
}
ENUMS: dict[str, type[enum.IntEnum]] = {
    "ep_error": abi.Error,
    "ep_copies": abi.Copies,
    "ep_row_layout": abi.RowLayout,
    "ep_dtype": abi.Dtype,
    "ep_reduce": abi.Reduce,
    "ep_launch": abi.Launch,
    "ep_scale_layout": abi.ScaleLayout,
    "ep_event_kind": abi.EventKind,
    "ep_holder": abi.Holder,
    "ep_message_type": abi.MessageType,
    "ep_takes": abi.Takes,
    "ep_role": abi.Role,
}


LENGTHS = {
    "EP_MAX_RANKS": abi.MAX_RANKS,
    "EP_MAX_EXCHANGES": abi.MAX_EXCHANGES,
    "EP_BANKS": abi.BANKS,
    "EP_TEXT": abi.TEXT_BYTES,
}


def constants(body: str) -> dict[str, int]:
    return {n: int(v, 0) for n, v in re.findall(r"(\w+)\s*=\s*(-?\w+)", body)}


def fields_of(name: str) -> list[tuple[str, str, int]]:
    """(field, C type, array length or 0), pointers as type 'pointer', in the header's order."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", CODE, re.S)
    assert body is not None, name
    found = []
    for declaration in body.group(1).split(";"):
        if not declaration.strip():
            continue
        kind, names = re.fullmatch(r"\s*(?:const\s+)?(\w+)\s*(.*)", declaration, re.S).groups()  # type: ignore[union-attr]
        for item in names.split(","):
            star, field, size = re.fullmatch(r"\s*(\*?)\s*(\w+)(?:\[(\w+)\])?\s*", item).groups()  # type: ignore[union-attr]
            length = 0 if size is None else LENGTHS.get(size) or int(size, 0)
            found.append((field, "pointer" if star else kind, length))
    return found


@pytest.mark.parametrize("name", STRUCTS)
def test_structures_have_the_fields_of_the_header(name: str) -> None:
    mirror = list(STRUCTS[name]._fields_)
    assert [f[0] for f in fields_of(name)] == [f[0] for f in mirror]
    for (field, kind, length), (_, mirrored) in zip(fields_of(name), mirror, strict=True):
        if length:
            assert (mirrored._type_, mirrored._length_) == (SCALARS[kind], length), field
        elif kind in ("pointer", "void"):
            assert ctypes.sizeof(mirrored) == 8, field
        else:
            assert mirrored is SCALARS[kind], field


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_numbers_of_the_header(name: str) -> None:
    body = re.search(rf"enum {name} \{{(.*?)\}};", CODE, re.S)
    assert body is not None
    theirs = constants(body.group(1))
    prefix = max((p for p in ("EP_", "EP_COPIES_", "EP_LAYOUT_", "EP_REDUCE_", "EP_LAUNCH_",
                              "EP_EVENT_", "EP_HOLDER_", "EP_MSG_", "EP_ROLE_", "EP_SCALES_",
                              "EP_TAKES_")
                  if all(n.startswith(p) for n in theirs)), key=len)  # fmt: skip
    assert {n.removeprefix(prefix): v for n, v in theirs.items()} == {
        member.name: member.value for member in ENUMS[name]
    }


def test_constants_are_those_of_the_header() -> None:
    theirs = constants(" ".join(re.findall(r"enum \{(.*?)\};", CODE, re.S)))
    ours = {
        "EP_ABI_VERSION": abi.ABI_VERSION,
        "EP_MAX_RANKS": abi.MAX_RANKS,
        "EP_MAX_TOPK": abi.MAX_TOPK,
        "EP_MAX_EXCHANGES": abi.MAX_EXCHANGES,
        "EP_MAX_CHANNELS": abi.MAX_CHANNELS,
        "EP_BANKS": abi.BANKS,
        "EP_TEXT": abi.TEXT_BYTES,
        "EP_MSG_MAGIC": abi.MESSAGE_MAGIC,
        "EP_TOKENS_PROMPT": abi.TOKENS_PROMPT,
    }
    assert {name: theirs.get(name) for name in ours} == ours


def test_every_function_of_the_header_has_a_prototype_of_its_shape() -> None:
    declared = re.findall(r"EP_API\s+(.*?)\b(ep_\w+)\((.*?)\);", CODE, re.S)
    assert {name for _, name, _ in declared} == set(abi.PROTOTYPES)
    for result, name, arguments in declared:
        mirrored_result, mirrored = abi.PROTOTYPES[name]
        plain = [] if arguments.strip() == "void" else arguments.split(",")
        assert len(plain) == len(mirrored), name
        for text, kind in zip(plain, mirrored, strict=True):
            c_type = text.rsplit(None, 1)[0]
            if "*" not in text:
                expected = {"int": ctypes.c_int, **SCALARS}[c_type.strip()]
                assert kind is expected, f"{name}: {text}"
            else:
                assert ctypes.sizeof(kind) == 8, f"{name}: {text}"
        if "*" in result:
            assert ctypes.sizeof(mirrored_result) == 8, name
        elif result.strip() == "void":
            assert mirrored_result is None, name
        else:
            assert mirrored_result is {"int": ctypes.c_int, **SCALARS}[result.strip()], name


class FakeFunction:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __call__(self, *_: object) -> int:
        return self.value


class FakeLibrary:
    """What `bind` needs of a library, with sizes that can be wrong."""

    def __init__(self, version: int = abi.ABI_VERSION, wrong: str = "", missing: str = "") -> None:
        for name in abi.PROTOTYPES:
            if name != missing:
                setattr(self, name, FakeFunction())
        self.ep_abi_version = FakeFunction(version)
        self.wrong = wrong
        owner = self

        class Sizes(FakeFunction):
            def __call__(self, *arguments: object) -> int:
                (name,) = arguments
                assert isinstance(name, bytes)
                size = ctypes.sizeof(STRUCTS["ep_" + name.decode()])
                return size + (name.decode() == owner.wrong)

        self.ep_struct_size = Sizes()


def test_bind_refuses_another_library() -> None:
    assert abi.bind(FakeLibrary()) is not None  # type: ignore[arg-type]
    with pytest.raises(NativeError, match=r"no function ep_step_end; .*make build"):
        abi.bind(FakeLibrary(missing="ep_step_end"))  # type: ignore[arg-type]
    with pytest.raises(NativeError, match=r"ABI 7, this package 1"):
        abi.bind(FakeLibrary(version=7))  # type: ignore[arg-type]
    with pytest.raises(NativeError, match=r"struct ep_message has 305 bytes .* 304"):
        abi.bind(FakeLibrary(wrong="message"))  # type: ignore[arg-type]


def test_codes_become_typed_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "error_text", lambda code: f"sentence {code}")
    expected = {
        abi.Error.EINVAL: errors.ConfigError,
        abi.Error.EMISMATCH: errors.GroupMismatch,
        abi.Error.EUSAGE: errors.UsageError,
        abi.Error.EFENCED: errors.Fenced,
        abi.Error.ETIMEOUT: errors.StepTimeout,
        abi.Error.EGONE: errors.DaemonUnavailable,
        abi.Error.ECAP: errors.CapExceeded,
        abi.Error.ESHORT: errors.MemoryShort,
        -13: errors.NativeError,
    }
    for code, kind in expected.items():
        with pytest.raises(kind, match=f"sentence {int(code)}"):
            abi.check(code, "doing it")
    assert abi.check(3, "") == 3
    assert abi.code_text(-13) == "Permission denied"
    assert abi.code_text(abi.Error.ECAP) == "ECAP"


ROUTED = ExchangeSpec.preset("ROUTED")


def config(**changes: object) -> GroupConfig:
    plain: dict[str, object] = {
        "name": "g",
        "geometry": GroupGeometry(
            layers=2, experts=8, topk=2, hidden=32, slots_per_rank=4, max_ranks=4
        ),
        "exchanges": (
            ("decode", ExchangeSpec.preset("ROUTED", max_tokens=16, dispatch_dtype="fp32")),
            ("any", ExchangeSpec.preset("AUTO", max_tokens=8, prefill_tokens=64)),
        ),
        "initial_ranks": 4,
        "launch": Launch.INLINE,
        "lost_experts": LostExperts.SERVE,
        **changes,
    }
    return GroupConfig(**plain)  # type: ignore[arg-type]


def test_geometry_of_a_group() -> None:
    struct = convert.geometry_struct(config())
    assert (struct.layers, struct.experts, struct.topk, struct.hidden) == (2, 8, 2, 32)
    assert (struct.slots, struct.max_ranks, struct.launch, struct.serve_lost) == (4, 4, 2, 1)
    assert struct.exchanges == 3
    routed, masked, normal = struct.exchange[0], struct.exchange[1], struct.exchange[2]
    assert (routed.copies, routed.layout, routed.dispatch_dtype) == (2, 3, 0)
    assert (routed.combine_dtype, routed.max_tokens, routed.channels) == (2, 16, 1)
    assert (masked.copies, masked.layout, masked.reduce, masked.max_tokens) == (1, 2, 1, 8)
    assert (normal.copies, normal.cpu_sync, normal.max_tokens) == (2, 1, 64)
    assert convert.exchange_numbers(config()) == {"decode": (0,), "any": (1, 2)}


def test_every_spec_value_has_a_native_number() -> None:
    from elasticep import spec

    for theirs, ours in (
        (spec.Copies, abi.Copies),
        (spec.Layout, abi.RowLayout),
        (spec.WireDtype, abi.Dtype),
        (spec.Reduce, abi.Reduce),
        (spec.ScaleLayout, abi.ScaleLayout),
        (Launch, abi.Launch),
    ):
        assert {member.name for member in theirs} == {member.name for member in ours}


def test_a_group_that_is_valid_fits_the_native_core() -> None:
    big = {"layers": 1, "experts": 128, "hidden": 32, "slots_per_rank": 1}
    most = {"topk": abi.MAX_TOPK, "max_ranks": abi.MAX_RANKS}
    fits = config(
        geometry=GroupGeometry(**big, **most),
        initial_ranks=128,
        exchanges=tuple((f"x{i}", ROUTED) for i in range(abi.MAX_EXCHANGES)),
    )
    assert convert.geometry_struct(fits).exchanges == abi.MAX_EXCHANGES
    for name, value in most.items():
        with pytest.raises(ConfigError, match=name):
            GroupGeometry(**big, **{**most, name: value + 1})
    with pytest.raises(ConfigError, match="exchanges"):
        config(exchanges=tuple((f"x{i}", ROUTED) for i in range(abi.MAX_EXCHANGES + 1)))


def test_replicated_input_and_scale_layouts_reach_the_native_core() -> None:
    exchanges = (
        ("all", ExchangeSpec.preset("ALLGATHER", replicated_input=True)),
        ("packed", ExchangeSpec.preset("EXPAND", dispatch_dtype="mxfp8", scale_layout="packed")),
    )
    struct = convert.geometry_struct(config(exchanges=exchanges))
    assert [struct.exchange[i].replicated for i in range(2)] == [1, 0]
    assert [struct.exchange[i].scale_layout for i in range(2)] == [0, abi.ScaleLayout.PACKED]


def test_timeouts_become_nanoseconds() -> None:
    struct = convert.timeouts_struct(config().timeouts)
    assert struct.suspect_after_ns == 500_000_000
    assert struct.step_timeout_ns == 30_000_000_000


def test_view_tables_are_checked() -> None:
    geometry = convert.geometry_struct(config())
    table = bytes(2 * 4 * 4 * 4)
    tables = convert.ViewTables(
        geometry,
        epoch=3,
        previous_epoch=2,
        members={0: 1, 3: 7},
        slot_expert=b"\xff" * len(table),
        slot_weight=table,
        digest=9,
    )
    view = tables.struct
    assert (view.epoch, view.previous_epoch, view.digest) == (3, 2, 9)
    assert list(view.incarnation)[:5] == [1, 0, 0, 7, 0]
    assert ctypes.string_at(view.slot_expert, len(table)) == b"\xff" * len(table)
    for changes, match in (
        ({"slot_weight": table[:-4]}, "slot_weight has 124 bytes; .* needs 128"),
        ({"members": {4: 1}}, "member rank 4"),
        ({"members": {0: 0}}, "incarnation 0"),
    ):
        arguments: dict[str, object] = {
            "epoch": 3,
            "previous_epoch": 2,
            "members": {0: 1},
            "slot_expert": table,
            "slot_weight": table,
            **changes,
        }
        with pytest.raises(ConfigError, match=match):
            convert.ViewTables(geometry, **arguments)  # type: ignore[arg-type]


def test_the_status_of_a_rank_can_be_read_when_it_is_printed() -> None:
    shown = repr(abi.Status(rank=3, engine_pid=41, complete_steps=5))
    assert shown.startswith("Status(rank=3, incarnation=0, runner_pid=0, engine_pid=41,")
    assert "complete_steps=5" in shown
