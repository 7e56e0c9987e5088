"""Every figure that follows from a formula, written out; and what a geometry refuses."""

import math
import subprocess
import sys

import pytest

from elasticep.errors import CapExceeded, GeometryError
from elasticep.geometry import (
    CONTIGUOUS_ALIGNMENT,
    DEEPEP_LOW_LATENCY_CAP,
    GroupGeometry,
    buffers,
    check_cap,
    decode_rows,
    rows_of_room,
    sm_count,
    source_rows,
)
from elasticep.models import KNOWN_MODELS, ModelShape
from elasticep.spec import Copies, ExchangeSpec, Layout, Reduce
from elasticep.traffic import (
    copies_per_token,
    experts_read,
    kernel_rows,
    padded_run_mean,
    ranks_needed,
    remote_share,
    round_trip_compression,
    round_trip_payload_bytes,
    traffic,
)
from elasticep.wire import RowFormat, WireDtype

FLASH = KNOWN_MODELS["deepseek-v4.1-flash"]
V3 = KNOWN_MODELS["deepseek-v3"]
MIB = 2**20


def geometry_of(shape: ModelShape, ranks: int, slots: int | None = None) -> GroupGeometry:
    return GroupGeometry(
        layers=shape.moe_layers,
        experts=shape.experts,
        topk=shape.topk,
        hidden=shape.hidden,
        slots_per_rank=slots or -(-shape.experts // ranks),
        max_ranks=ranks,
    )


FLASH_8 = geometry_of(FLASH, 8)


class TestModels:
    def test_shapes(self) -> None:
        assert (FLASH.hidden, FLASH.experts, FLASH.topk, FLASH.moe_layers) == (5120, 384, 6, 40)
        assert (FLASH.matrices, FLASH.intermediate) == (3, 2304)
        assert (V3.hidden, V3.experts, V3.topk, V3.moe_layers) == (7168, 256, 8, 58)

    def test_expert_parameters(self) -> None:
        params = FLASH.matrices * FLASH.hidden * FLASH.intermediate
        assert params / 1e6 == pytest.approx(35.4, abs=0.05)

    def test_expert_bytes_in_fp4_with_scales(self) -> None:
        assert FLASH.expert_bytes / 1e6 == pytest.approx(18.8, abs=0.05)
        assert FLASH.expert_bytes == 3 * 5120 * 2304 * 17 // 32

    @pytest.mark.parametrize(("ranks", "gigabytes"), [(8, 36.1), (64, 4.5)])
    def test_expert_weights_read_per_step(self, ranks: int, gigabytes: float) -> None:
        assert FLASH.weight_bytes_per_step(ranks, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)

    def test_few_tokens_read_few_experts(self) -> None:
        assert experts_read(384, 6, 8, 0) == 0
        assert experts_read(384, 6, 1, 1) == pytest.approx(6)
        assert experts_read(384, 6, 8, 64) == pytest.approx(48, rel=1e-3)


class TestCopies:
    @pytest.mark.parametrize(
        ("shape", "ranks", "copies"),
        [
            (FLASH, 4, 3.297),
            (FLASH, 8, 4.43),
            (FLASH, 16, 5.166),
            (FLASH, 32, 5.584),
            (FLASH, 64, 5.807),
            (V3, 2, 1.993),
            (V3, 4, 3.614),
            (V3, 8, 5.295),
            (V3, 64, 7.676),
        ],
    )
    def test_one_per_rank_that_needs_the_token(
        self, shape: ModelShape, ranks: int, copies: float
    ) -> None:
        sizes = {"experts": shape.experts, "topk": shape.topk, "ranks": ranks}
        assert copies_per_token(Copies.PER_RANK, **sizes) == pytest.approx(copies, abs=5e-4)
        assert copies_per_token(Copies.ALL, **sizes) == ranks
        assert copies_per_token(Copies.PER_EXPERT, **sizes) == shape.topk

    def test_equal_shares_are_the_closed_formula(self) -> None:
        by_hand = 8 * (1 - math.comb(384 - 48, 6) / math.comb(384, 6))
        assert ranks_needed(384, 6, 8) == pytest.approx(by_hand, rel=1e-12)

    def test_unequal_shares_lie_between_the_neighbours(self) -> None:
        assert 384 % 7
        assert ranks_needed(384, 6, 6) < ranks_needed(384, 6, 7) < ranks_needed(384, 6, 8)

    def test_unequal_shares_by_counting(self) -> None:
        # 5 experts on 2 ranks (3 and 2), pairs of them: 10 pairs, 3 within the first, 1 within
        # the second, 6 across.
        assert ranks_needed(5, 2, 2) == pytest.approx((3 + 1 + 2 * 6) / 10)

    @pytest.mark.parametrize(("experts", "topk", "ranks", "copies"), [(8, 2, 1, 1), (4, 4, 6, 4)])
    def test_extremes(self, experts: int, topk: int, ranks: int, copies: int) -> None:
        assert ranks_needed(experts, topk, ranks) == copies

    def test_remote_share(self) -> None:
        assert remote_share(1) == 0
        assert remote_share(8) == 7 / 8


class TestBytes:
    @pytest.mark.parametrize(
        ("tokens", "preset", "mib", "within"),
        [
            (4096, "ALLGATHER", 320.0, 0.05),
            (4096, "LOW_LATENCY", 240.0, 0.05),
            (4096, "ROUTED", 177.2, 0.05),
            (64, "ALLGATHER", 5.0, 0.005),
            (64, "LOW_LATENCY", 3.75, 0.005),
            (64, "ROUTED", 2.77, 0.005),
        ],
    )
    def test_delivered_by_dispatch(
        self, tokens: int, preset: str, mib: float, within: float
    ) -> None:
        moved = traffic(ExchangeSpec.preset(preset, max_tokens=4096), FLASH_8, 8, tokens)
        assert moved.out_bytes / MIB == pytest.approx(mib, abs=within)
        assert moved.out_remote_bytes == pytest.approx(moved.out_bytes * 7 / 8)

    @pytest.mark.parametrize(
        ("dtype", "size"),
        [
            (WireDtype.FP32, 20480),
            (WireDtype.FP16, 10240),
            (WireDtype.BF16, 10240),
            (WireDtype.FP8, 5280),
            (WireDtype.MXFP8, 5280),
            (WireDtype.NVFP4, 2880),
        ],
    )
    def test_row_bytes(self, dtype: WireDtype, size: int) -> None:
        assert dtype.row_bytes(5120) == size

    def test_rows_that_do_not_fill_their_last_block(self) -> None:
        assert RowFormat(8, block=128, scale_bytes=4).row_bytes(130) == 130 + 2 * 4
        assert RowFormat(4).payload_bytes(3) == 2

    def test_four_bits_out_and_eight_back(self) -> None:
        four = RowFormat(4, block=32, scale_bytes=1)
        assert round_trip_compression(5120, four, WireDtype.FP8.row_format) == 2.56
        assert round_trip_compression(5120, RowFormat(16), RowFormat(16)) == 1

    def test_round_trip_of_a_token_to_six_ranks(self) -> None:
        formats = (WireDtype.FP8.row_format, WireDtype.BF16.row_format)
        assert round_trip_payload_bytes(5120, *formats, copies=6) == 92160

    def test_what_comes_back(self) -> None:
        copies = ranks_needed(384, 6, 8)
        spec = ExchangeSpec.preset("ALLGATHER")
        assert traffic(spec, FLASH_8, 8, 64).back_rows == pytest.approx(64 * copies)
        spec = ExchangeSpec.preset("ROUTED", reduce="per_expert", combine_dtype="fp8")
        moved = traffic(spec, FLASH_8, 8, 64)
        assert moved.back_rows == 64 * 6
        assert moved.back_bytes == 64 * 6 * 5280
        assert moved.back_remote_bytes == 64 * 6 * 5280 * 7 / 8

    def test_replicated_input_sends_nothing(self) -> None:
        spec = ExchangeSpec.preset("ALLGATHER", replicated_input=True)
        moved = traffic(spec, FLASH_8, 8, 64)
        assert moved.out_bytes == 0
        assert moved.back_rows > 0


class TestRoom:
    def test_low_latency_layout(self) -> None:
        spec = ExchangeSpec.preset("LOW_LATENCY", max_tokens=128)
        assert FLASH_8.slots_per_rank == 48
        assert rows_of_room(spec, FLASH_8, 8) == 49152
        assert traffic(spec, FLASH_8, 8, 64).out_rows == 384
        assert kernel_rows(spec, FLASH_8, 8, 64) == 384

    def test_routed_layout(self) -> None:
        spec = ExchangeSpec.preset("ROUTED", max_tokens=4096)
        assert rows_of_room(spec, FLASH_8, 8) == 32768
        assert kernel_rows(spec, FLASH_8, 8, 64) == 32768

    def test_masked_room_is_what_is_asked_for(self) -> None:
        spec = ExchangeSpec.preset("EXPAND", masked_room=200)
        assert rows_of_room(spec, FLASH_8, 8) == 48 * 200

    def test_arrival_hands_over_what_came(self) -> None:
        spec = ExchangeSpec.preset("NORMAL", max_tokens=64)
        assert kernel_rows(spec, FLASH_8, 8, 64) == pytest.approx(64 * 4.43, rel=1e-3)
        everything = ExchangeSpec.preset("ALLGATHER", max_tokens=64)
        assert kernel_rows(everything, FLASH_8, 8, 64) == 512

    @pytest.mark.parametrize(
        ("slots", "topk", "cap", "room"),
        # on 2 ranks: 2 * cap * min(topk, slots) pairs + 127 per slot, rounded up to 128
        [(1, 2, 5, 256), (4, 2, 64, 768), (48, 6, 128, 7680)],
    )
    def test_contiguous_room_is_the_worst_case(
        self, slots: int, topk: int, cap: int, room: int
    ) -> None:
        assert CONTIGUOUS_ALIGNMENT == 128
        geometry = GroupGeometry(1, 2 * slots, topk, 8, slots, 2)
        assert rows_of_room(ExchangeSpec.preset("EXPAND_SYNC", max_tokens=cap), geometry, 2) == room

    def test_padded_runs(self) -> None:
        assert padded_run_mean(0, 0.5) == 0
        assert padded_run_mean(1, 0.25) == pytest.approx(32)  # one row in four runs of 128
        assert padded_run_mean(300, 1) == 384
        by_hand = sum(math.comb(200, n) * 0.5**200 * -(-n // 128) * 128 for n in range(201))
        assert padded_run_mean(200, 0.5) == pytest.approx(by_hand, rel=1e-9)
        # far from the origin padding is half a run on average
        assert padded_run_mean(8_000_000, 0.5) == pytest.approx(4_000_064, abs=1)

    def test_contiguous_hands_over_padded_runs(self) -> None:
        spec = ExchangeSpec.preset("EXPAND_SYNC", max_tokens=4096)
        rows = kernel_rows(spec, FLASH_8, 8, 4096)
        assert 24576 < rows < 24576 + 48 * 127
        assert kernel_rows(spec, FLASH_8, 8, 64) == pytest.approx(48 * 128, rel=1e-3)


class TestBuffers:
    def test_routed(self) -> None:
        spec = ExchangeSpec.preset("ROUTED", max_tokens=128)
        got = buffers(spec, FLASH_8)
        assert got.received == 1024 * (10240 + 2 * 8 * 6)
        assert got.expanded == 0
        assert got.outputs == 1024 * 10240
        assert got.total == sum((got.received, got.expanded, got.outputs, got.flags, got.staging))

    def test_layouts_by_expert_hold_rows_twice_and_sums(self) -> None:
        got = buffers(ExchangeSpec.preset("EXPAND", max_tokens=128), FLASH_8)
        assert got.expanded == 49152 * 10240 + 1024 * 6 * 4
        assert got.outputs == (49152 + 1024) * 10240
        per_expert = buffers(
            ExchangeSpec.preset("EXPAND", max_tokens=128, reduce="per_expert"), FLASH_8
        )
        assert per_expert.outputs == 49152 * 10240

    def test_one_copy_per_expert_needs_a_place_for_each(self) -> None:
        spec = ExchangeSpec.preset("LOW_LATENCY", max_tokens=128)
        assert source_rows(spec, FLASH_8) == 128 * 6
        assert buffers(spec, FLASH_8).received == 8 * 128 * 6 * (10240 + 2 * 8 * 6)

    def test_channels_parts_and_seats_add_up(self) -> None:
        one = ExchangeSpec.preset("ROUTED")
        two = ExchangeSpec.preset("ROUTED", channels=2)
        assert buffers(two, FLASH_8).total == 2 * buffers(one, FLASH_8).total
        auto = ExchangeSpec.preset("AUTO")
        parts = [buffers(part, FLASH_8).total for part in auto.parts()]
        assert buffers(auto, FLASH_8).total == sum(parts)
        assert buffers(one, FLASH_8, 4).received * 2 == buffers(one, FLASH_8).received

    def test_service_launch_stages_rows(self) -> None:
        spec = ExchangeSpec.preset("ROUTED", max_tokens=128)
        extra = buffers(spec, FLASH_8, service=True).total - buffers(spec, FLASH_8).total
        assert extra == 2 * 128 * 5120 * 4


class TestCaps:
    def test_a_cap_counts_rows(self) -> None:
        assert decode_rows(64, 4) == 256
        spec = ExchangeSpec.preset("ROUTED", max_tokens=255)
        with pytest.raises(CapExceeded, match=r"256 rows .* cap of 255.*draft tokens"):
            check_cap(spec, decode_rows(64, 4))
        check_cap(spec, 255)

    def test_traffic_and_rows_refuse_what_is_over_the_cap(self) -> None:
        spec = ExchangeSpec.preset("ROUTED", max_tokens=8)
        with pytest.raises(CapExceeded):
            traffic(spec, FLASH_8, 8, 9)
        with pytest.raises(CapExceeded):
            kernel_rows(spec, FLASH_8, 8, 9)

    def test_defaults_and_limits_of_others(self) -> None:
        assert ExchangeSpec.from_sglang("deepep", "low_latency").max_tokens == 128
        assert DEEPEP_LOW_LATENCY_CAP == 1024
        beyond = ExchangeSpec.preset("LOW_LATENCY", max_tokens=DEEPEP_LOW_LATENCY_CAP + 1)
        FLASH_8.check_exchange(beyond)
        assert beyond.max_tokens == 1025


class TestSmCount:
    def test_default_rates(self) -> None:
        assert sm_count() == 8

    @pytest.mark.parametrize(
        ("sms", "measured"), [(1, 45.8), (2, 91), (4, 180), (8, 345), (132, 358)]
    )
    def test_the_model_behind_it_against_the_measured_rates(
        self, sms: int, measured: float
    ) -> None:
        model = min(sms * 45.8, 358)
        assert model == pytest.approx(measured, rel=0.04)
        assert sm_count(link_gb_s=model) <= sms

    def test_override_and_device(self) -> None:
        assert sm_count(num_sms=20) == 20
        assert sm_count(num_sms=20, available=132) == 20
        assert sm_count(available=4) == 4
        with pytest.raises(GeometryError, match=r"num_sms is 200 .* 132 SMs"):
            sm_count(num_sms=200, available=132)

    def test_local_stores_do_not_fill_the_link(self) -> None:
        assert sm_count(remote=0.5) == 16

    @pytest.mark.parametrize(
        "rates", [{"link_gb_s": 0}, {"sm_gb_s": -1.0}, {"remote": 0}, {"link_gb_s": math.nan}]
    )
    def test_rates_must_be_rates(self, rates: dict[str, float]) -> None:
        with pytest.raises(GeometryError, match="rates must be above 0"):
            sm_count(**rates)  # type: ignore[arg-type]


class TestGeometry:
    GOOD = {  # noqa: RUF012
        "layers": 2,
        "experts": 16,
        "topk": 4,
        "hidden": 64,
        "slots_per_rank": 4,
        "max_ranks": 4,
    }

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layers": 0}, r"layers is 0; .* 1 to 4096"),
            ({"experts": True}, "experts is True"),
            ({"hidden": 64.0}, "hidden is 64.0"),
            ({"topk": 33}, r"topk is 33; .* 1 to 32"),
            ({"max_ranks": 129}, r"max_ranks is 129; .* 1 to 128"),
            ({"topk": 17, "experts": 16}, "topk is 17 but there are only 16 experts"),
            ({"hidden": 60}, r"hidden is 60, .*multiple of 8.*pad rows to 64"),
            ({"experts": 17}, r"17 experts do not fit into 16 slots .* at least 5"),
        ],
    )
    def test_refusals_name_number_limit_and_remedy(
        self, change: dict[str, int], message: str
    ) -> None:
        with pytest.raises(GeometryError, match=message):
            GroupGeometry(**{**self.GOOD, **change})

    def test_world_sizes_that_divide_nothing(self) -> None:
        for ranks in (1, 2, 3, 5, 7):
            geometry_of(FLASH, ranks).check_exchange(ExchangeSpec.preset("EXPAND"))
            assert ranks * geometry_of(FLASH, ranks).slots_per_rank >= 384

    def test_redundant_experts_have_room(self) -> None:
        # 384 + 64 experts' slots: 6 + 7 per rank on 64 ranks
        geometry = geometry_of(FLASH, 64, slots=13)
        for preset in ("EXPAND", "LOW_LATENCY", "ROUTED"):
            geometry.check_exchange(ExchangeSpec.preset(preset, max_tokens=1024))
        assert rows_of_room(ExchangeSpec.preset("EXPAND"), geometry, 64) == 13 * 64 * 128

    @pytest.mark.parametrize(
        ("hidden", "spec", "message"),
        [
            (5000, {"dispatch_dtype": "fp8"}, "multiple of 128.*dispatch_dtype='fp8'"),
            (5000, {"combine_dtype": "fp8"}, "multiple of 128.*combine_dtype='fp8'"),
            (5000, {"dispatch_dtype": "mxfp8"}, "multiple of 32.*dispatch_dtype='mxfp8'"),
            (5000, {"dispatch_dtype": "nvfp4"}, "multiple of 16.*dispatch_dtype='nvfp4'"),
        ],
    )
    def test_blocks_must_divide_the_row(
        self, hidden: int, spec: dict[str, str], message: str
    ) -> None:
        geometry = GroupGeometry(**{**self.GOOD, "hidden": hidden})
        with pytest.raises(GeometryError, match=message):
            geometry.check_exchange(ExchangeSpec.preset("ROUTED", **spec))
        geometry.check_exchange(ExchangeSpec.preset("ROUTED"))

    def test_room_that_no_row_could_fill(self) -> None:
        geometry = GroupGeometry(**self.GOOD)
        geometry.check_exchange(ExchangeSpec.preset("EXPAND", max_tokens=8, masked_room=32))
        with pytest.raises(GeometryError, match=r"masked_room is 33 .* more than 32"):
            geometry.check_exchange(ExchangeSpec.preset("EXPAND", max_tokens=8, masked_room=33))

    def test_rows_beyond_32_bits_are_refused_before_anything_is_reserved(self) -> None:
        geometry = GroupGeometry(1, 4096, 8, 64, 4096, 128)
        spec = ExchangeSpec(
            copies=Copies.PER_RANK,
            cpu_sync=False,
            layout=Layout.MASKED,
            reduce=Reduce.PER_RANK,
            max_tokens=65_536,
        )
        with pytest.raises(GeometryError, match=r"34359738368 rows.*lower max_tokens"):
            geometry.check_exchange(spec)

    def test_prefill_parts_are_checked(self) -> None:
        geometry = GroupGeometry(**self.GOOD)
        prefill = ExchangeSpec.preset("NORMAL", dispatch_dtype="fp8")
        spec = ExchangeSpec.preset("AUTO", prefill=prefill)
        with pytest.raises(GeometryError, match="multiple of 128"):
            geometry.check_exchange(spec)


def test_arithmetic_needs_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, elasticep.geometry, elasticep.traffic, elasticep.flags, elasticep.models;"
        "print([m for m in ('torch', 'grpc', 'numpy', 'google.protobuf') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
