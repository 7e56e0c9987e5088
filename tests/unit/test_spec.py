"""Exchange specs: presets, refusals, round trips, and the flags of serving engines."""

import dataclasses
import json
from itertools import product
from typing import Any

import pytest

from elasticep import spec as spec_module
from elasticep.errors import ConfigError, SpecError
from elasticep.flags import from_sglang, from_vllm
from elasticep.spec import (
    AUTO,
    COMBINE_DTYPES,
    PRESET_NAMES,
    Copies,
    ExchangeSpec,
    Layout,
    Reduce,
    WireDtype,
)

SWITCHES = {
    "ALLGATHER": ("all", False, "arrival"),
    "NORMAL": ("per_rank", True, "arrival"),
    "LOW_LATENCY": ("per_expert", False, "masked"),
    "EXPAND": ("per_rank", False, "masked"),
    "EXPAND_SYNC": ("per_rank", True, "contiguous"),
    "ROUTED": ("per_rank", False, "routed"),
}
# (copies, layout) -> may the CPU wait; what is missing is refused
SENSIBLE = {
    ("all", "arrival"): (False,),
    ("per_rank", "arrival"): (False, True),
    ("per_rank", "contiguous"): (False, True),
    ("per_rank", "masked"): (False,),
    ("per_rank", "routed"): (False,),
    ("per_expert", "contiguous"): (False, True),
    ("per_expert", "masked"): (False,),
}
ROUTED = {"copies": "per_rank", "cpu_sync": False, "layout": "routed"}
MASKED = {"copies": "per_rank", "cpu_sync": False, "layout": "masked"}


def switches(spec: ExchangeSpec) -> tuple[str, bool, str]:
    return spec.copies.value, spec.cpu_sync, spec.layout.value


class TestPresets:
    @pytest.mark.parametrize("name", SWITCHES)
    def test_switches(self, name: str) -> None:
        assert switches(ExchangeSpec.preset(name)) == SWITCHES[name]
        assert ExchangeSpec.preset(name.lower()) == getattr(spec_module, name)

    def test_fields_can_be_changed(self) -> None:
        spec = ExchangeSpec.preset("ROUTED", max_tokens=256, dispatch_dtype="mxfp8", num_sms=20)
        assert (spec.max_tokens, spec.dispatch_dtype, spec.num_sms) == (256, WireDtype.MXFP8, 20)
        assert spec.combine_dtype is WireDtype.BF16

    def test_only_low_latency_returns_a_row_per_expert(self) -> None:
        for name in SWITCHES:
            expected = Reduce.PER_EXPERT if name == "LOW_LATENCY" else Reduce.PER_RANK
            assert ExchangeSpec.preset(name).reduce is expected

    def test_auto_is_two_exchanges(self) -> None:
        assert switches(AUTO.resolve(prompt=True)) == SWITCHES["NORMAL"]
        assert switches(AUTO.resolve(prompt=False)) == SWITCHES["LOW_LATENCY"]
        assert AUTO.parts() == (AUTO.resolve(prompt=False), AUTO.resolve(prompt=True))
        assert AUTO.resolve(prompt=False).prefill is None

    def test_auto_takes_its_parts_apart(self) -> None:
        spec = ExchangeSpec.preset(
            "AUTO", decode="EXPAND", max_tokens=64, prefill_tokens=8192, dispatch_dtype="fp8"
        )
        decode, prefill = spec.parts()
        assert switches(decode) == SWITCHES["EXPAND"]
        assert (decode.max_tokens, prefill.max_tokens) == (64, 8192)
        assert decode.dispatch_dtype is prefill.dispatch_dtype is WireDtype.FP8

    def test_auto_has_room_for_decode_rows_in_prompt_steps(self) -> None:
        spec = ExchangeSpec.preset("AUTO", max_tokens=6000)
        assert spec.resolve(prompt=True).max_tokens == 6000

    def test_others_resolve_to_themselves(self) -> None:
        spec = ExchangeSpec.preset("ROUTED")
        assert spec.resolve(prompt=True) is spec.resolve(prompt=False) is spec
        assert spec.parts() == (spec,)

    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            ("FASTEST", {}, r"no preset 'FASTEST'; use one of ALLGATHER, .*AUTO"),
            ("ROUTED", {"max_token": 1}, "no setting 'max_token'; did you mean 'max_tokens'"),
            ("ROUTED", {"prefill_tokens": 9}, "no setting 'prefill_tokens'"),
            ("AUTO", {"decode": "ROUTED"}, "decode is 'ROUTED'"),
            ("AUTO", {"prefill": AUTO.prefill, "prefill_tokens": 1}, "keep one of them"),
        ],
    )
    def test_refusals(self, name: str, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(SpecError, match=message):
            ExchangeSpec.preset(name, **changes)


class TestRefusals:
    @pytest.mark.parametrize(
        ("copies", "layout", "cpu_sync"), list(product(Copies, Layout, (False, True)))
    )
    def test_every_combination_of_the_three_switches(
        self, copies: Copies, layout: Layout, cpu_sync: bool
    ) -> None:
        if cpu_sync in SENSIBLE.get((copies.value, layout.value), ()):
            made = ExchangeSpec(copies=copies, cpu_sync=cpu_sync, layout=layout)
            assert switches(made) == (copies.value, cpu_sync, layout.value)
        else:
            with pytest.raises(SpecError, match=r"\b(use|set)\b"):
                ExchangeSpec(copies=copies, cpu_sync=cpu_sync, layout=layout)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({**MASKED, "cpu_sync": True}, "waits for a count that nobody uses"),
            ({"copies": "all", "cpu_sync": True, "layout": "arrival"}, "barrier already tells"),
            ({**MASKED, "copies": "all"}, "stay in the order of their sources"),
            ({**ROUTED, "copies": "per_expert"}, "send a row twice"),
            ({**ROUTED, "combine_dtype": "mxfp8"}, "for dispatch only"),
            ({**ROUTED, "combine_dtype": "nvfp4"}, "for dispatch only"),
            ({**ROUTED, "masked_room": 64}, "masked_room=64 has no meaning"),
            ({**ROUTED, "replicated_input": True}, "use copies='all'"),
            (
                {
                    "copies": "all",
                    "cpu_sync": False,
                    "layout": "arrival",
                    "replicated_input": True,
                    "dispatch_dtype": "fp8",
                },
                "nothing to quantise",
            ),
        ],
    )
    def test_reasons(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(SpecError, match=message):
            ExchangeSpec(**changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"copies": "some"}, "copies is 'some'; use one of all, per_rank, per_expert"),
            ({"layout": None}, "layout is None"),
            ({"dispatch_dtype": "int8"}, "dispatch_dtype is 'int8'"),
            ({"reduce": "tree"}, "reduce is 'tree'"),
            ({"cpu_sync": 0}, "cpu_sync is 0"),
            ({"max_tokens": 0}, r"max_tokens is 0; .* 1 to 65536"),
            ({"max_tokens": 65537}, "max_tokens is 65537"),
            ({"max_tokens": True}, "max_tokens is True"),
            ({"channels": 3}, r"channels is 3; .* 1 to 2"),
            ({"num_sms": 0}, "num_sms is 0"),
            ({**MASKED, "masked_room": -1}, "masked_room is -1"),
            ({"prefill": {}}, "prefill is {}"),
        ],
    )
    def test_values(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(SpecError, match=message):
            ExchangeSpec(**{**ROUTED, **changes})

    def test_prefill_parts(self) -> None:
        small = ExchangeSpec.preset("NORMAL", max_tokens=64)
        with pytest.raises(SpecError, match=r"prefill.max_tokens=64 is below max_tokens=128"):
            ExchangeSpec.preset("ROUTED", prefill=small)
        with pytest.raises(SpecError, match="itself a prefill part"):
            ExchangeSpec.preset("ROUTED", prefill=AUTO)
        replicated = ExchangeSpec.preset("ALLGATHER", replicated_input=True)
        with pytest.raises(SpecError, match="set both alike"):
            ExchangeSpec.preset("ROUTED", prefill=replicated)

    def test_a_fixed_order_of_sums_goes_with_every_format(self) -> None:
        for dtype in COMBINE_DTYPES:
            spec = ExchangeSpec.preset("ROUTED", reduce="per_expert", combine_dtype=dtype)
            assert spec.reduce is Reduce.PER_EXPERT

    def test_specs_cannot_be_changed(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            AUTO.max_tokens = 1  # type: ignore[misc]


class TestPlainForm:
    @pytest.mark.parametrize("name", PRESET_NAMES)
    def test_round_trip(self, name: str) -> None:
        spec = ExchangeSpec.preset(name, channels=2, num_sms=8)
        plain = spec.to_dict()
        assert ExchangeSpec.from_dict(plain) == spec
        assert ExchangeSpec.from_dict(json.loads(spec.to_json())) == spec
        assert type(plain["layout"]) is str
        assert set(plain) == {f.name for f in dataclasses.fields(ExchangeSpec)}

    def test_canonical(self) -> None:
        one = ExchangeSpec.from_dict({**ROUTED, "max_tokens": 64, "channels": 2})
        two = ExchangeSpec.from_dict({"channels": 2, "max_tokens": 64, **ROUTED})
        assert one == two
        assert hash(one) == hash(two)
        assert one.to_json() == two.to_json()
        assert one.to_json() != ExchangeSpec.preset("ROUTED", max_tokens=65).to_json()

    def test_presets_by_name(self) -> None:
        spec = ExchangeSpec.from_dict({"preset": "routed", "max_tokens": 64})
        assert spec == ExchangeSpec.preset("ROUTED", max_tokens=64)
        nested = ExchangeSpec.from_dict({"preset": "EXPAND", "prefill": {"preset": "EXPAND_SYNC"}})
        assert switches(nested.resolve(prompt=True)) == SWITCHES["EXPAND_SYNC"]

    @pytest.mark.parametrize(
        ("plain", "message"),
        [
            ({**ROUTED, "caps": 1}, "no setting 'caps'"),
            ({"layout": "routed"}, "lacks copies, cpu_sync; add them, or name a preset"),
            ({"preset": 3}, "no preset 3"),
            ({"preset": "ROUTED", "layouts": "masked"}, "did you mean 'layout'"),
            ({**ROUTED, "prefill": {"preset": "NORMAL", "cap": 1}}, "no setting 'cap'"),
        ],
    )
    def test_unknown_keys_are_refused(self, plain: dict[str, Any], message: str) -> None:
        with pytest.raises(SpecError, match=message):
            ExchangeSpec.from_dict(plain)


class TestSGLang:
    @pytest.mark.parametrize(
        ("backend", "mode", "preset"),
        [
            ("none", None, "ALLGATHER"),
            ("deepep", "normal", "NORMAL"),
            ("deepep", "low_latency", "LOW_LATENCY"),
            ("flashinfer", None, "ROUTED"),
        ],
    )
    def test_values(self, backend: str, mode: str | None, preset: str) -> None:
        assert switches(ExchangeSpec.from_sglang(backend, mode)) == SWITCHES[preset]

    @pytest.mark.parametrize("mode", [None, "auto"])
    def test_deepep_auto(self, mode: str | None) -> None:
        spec = ExchangeSpec.from_sglang("deepep", mode=mode)
        assert spec == ExchangeSpec.preset("AUTO", dispatch_dtype="fp8")

    @pytest.mark.parametrize("mode", [None, "direct", "hybrid"])
    def test_deepep_v2_decodes_without_and_prefills_with_the_wait(self, mode: str | None) -> None:
        spec = from_sglang("deepep_v2", mode, dispatch_dtype="fp8", num_sms=24)
        decode, prefill = spec.parts()
        assert switches(decode) == SWITCHES["EXPAND"]
        assert switches(prefill) == SWITCHES["EXPAND_SYNC"]
        assert decode.dispatch_dtype is prefill.dispatch_dtype is WireDtype.FP8
        assert decode.num_sms == prefill.num_sms == 24

    @pytest.mark.parametrize(
        ("backend", "mode", "variable", "default"),
        [
            ("deepep", "low_latency", "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", 128),
            ("deepep", "auto", "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", 128),
            ("deepep_v2", None, "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", 128),
            ("flashinfer", None, "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK", 4096),
        ],
    )
    def test_cap_variables(
        self, backend: str, mode: str | None, variable: str, default: int
    ) -> None:
        assert from_sglang(backend, mode).max_tokens == default
        assert from_sglang(backend, mode, env={}).max_tokens == default
        assert from_sglang(backend, mode, env={variable: "1000"}).max_tokens == 1000
        assert from_sglang(backend, mode, env={variable: "7"}, max_tokens=9).max_tokens == 9
        with pytest.raises(SpecError, match=rf"{variable} is 'many'"):
            from_sglang(backend, mode, env={variable: "many"})
        with pytest.raises(SpecError, match="max_tokens is 0"):
            from_sglang(backend, mode, env={variable: "0"})

    def test_the_environment_is_not_read_unasked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "7")
        assert from_sglang("flashinfer").max_tokens == 4096

    def test_prompt_chunks_set_the_prompt_caps(self) -> None:
        assert from_sglang("flashinfer", prefill_chunk=8192).max_tokens == 8192
        assert from_sglang("flashinfer", prefill_chunk=2048).max_tokens == 4096
        assert from_sglang("none", prefill_chunk=8192).max_tokens == 8192
        assert from_sglang("deepep", "normal", prefill_chunk=2048).max_tokens == 2048
        for backend in ("deepep", "deepep_v2"):
            decode, prefill = from_sglang(backend, prefill_chunk=2048).parts()
            assert (decode.max_tokens, prefill.max_tokens) == (128, 2048)
            decode, prefill = from_sglang(backend, prefill_chunk=64, max_tokens=256).parts()
            assert (decode.max_tokens, prefill.max_tokens) == (256, 256)

    def test_deepep_sends_fp8_unless_told_otherwise(self) -> None:
        assert from_sglang("deepep").dispatch_dtype is WireDtype.FP8
        assert from_sglang("deepep", dispatch_dtype="bf16").dispatch_dtype is WireDtype.BF16
        assert from_sglang("flashinfer").dispatch_dtype is WireDtype.BF16

    @pytest.mark.parametrize(
        "backend",
        [
            "megamoe",
            "flashinfer_megamoe",
            "ascend_fuseep",
            "ascend_tp",
            "mooncake",
            "nixl",
            "pplx",
            "mori",
        ],
    )
    def test_what_we_do_not_stand_for(self, backend: str) -> None:
        with pytest.raises(SpecError) as caught:
            from_sglang(backend)
        sentence = str(caught.value)
        assert sentence.startswith(f"--moe-a2a-backend {backend} ")
        assert "use" in sentence
        assert "\n" not in sentence

    def test_unknown_values_and_modes(self) -> None:
        with pytest.raises(SpecError, match="no value 'deep'; use one of none, deepep"):
            from_sglang("deep")
        with pytest.raises(SpecError, match="deepep has no mode 'fast'; use auto, normal"):
            from_sglang("deepep", "fast")
        with pytest.raises(SpecError, match="flashinfer has no mode 'auto'; use none at all"):
            from_sglang("flashinfer", "auto")


class TestVllm:
    @pytest.mark.parametrize(
        ("backend", "preset", "cap"),
        [
            ("allgather_reducescatter", "ALLGATHER", 4096),
            ("naive", "ALLGATHER", 4096),
            ("deepep_high_throughput", "NORMAL", 4096),
            ("deepep_low_latency", "LOW_LATENCY", 256),
            ("flashinfer_all2allv", "ROUTED", 4096),
            ("flashinfer_nvlink_one_sided", "ROUTED", 4096),
            ("flashinfer_nvlink_two_sided", "ROUTED", 4096),
        ],
    )
    def test_values(self, backend: str, preset: str, cap: int) -> None:
        spec = ExchangeSpec.from_vllm(backend)
        assert switches(spec) == SWITCHES[preset]
        assert spec.max_tokens == cap
        assert spec.prefill is None

    def test_deepep_v2(self) -> None:
        decode, prefill = from_vllm("deepep_v2", prefill_chunk=8192).parts()
        assert switches(decode) == SWITCHES["EXPAND"]
        assert switches(prefill) == SWITCHES["EXPAND_SYNC"]
        assert prefill.max_tokens == 8192

    def test_cap_of_low_latency(self) -> None:
        env = {"VLLM_MOE_DP_CHUNK_SIZE": "512"}
        assert from_vllm("deepep_low_latency", env=env).max_tokens == 512
        assert from_vllm("deepep_high_throughput", env=env, prefill_chunk=64).max_tokens == 64

    @pytest.mark.parametrize(
        "backend",
        ["pplx", "mori", "mori_high_throughput", "mori_low_latency", "nixl_ep", "moonep"],
    )
    def test_what_we_do_not_stand_for(self, backend: str) -> None:
        with pytest.raises(ConfigError, match=rf"^--all2all-backend {backend} .*use"):
            from_vllm(backend)

    def test_unknown(self) -> None:
        with pytest.raises(SpecError, match="no value 'gather'"):
            from_vllm("gather")


@pytest.mark.parametrize(
    ("preset", "wire", "scales", "reason"),
    [
        ("EXPAND", "mxfp8", "columns", "is for fp8 rows"),
        ("EXPAND", "nvfp4", "packed", "is for fp8 and mxfp8 rows"),
        ("ROUTED", "fp8", "columns", "rows by expert"),
        ("EXPAND", "bf16", "packed", "dispatch_dtype='bf16'"),
    ],
)
def test_scale_layouts_that_nothing_reads_are_refused(
    preset: str, wire: str, scales: str, reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        ExchangeSpec.preset(preset, dispatch_dtype=wire, scale_layout=scales)


def test_scale_layouts_that_kernels_read() -> None:
    for wire, scales in (("fp8", "columns"), ("fp8", "packed"), ("mxfp8", "packed")):
        spec = ExchangeSpec.preset("EXPAND_SYNC", dispatch_dtype=wire, scale_layout=scales)
        assert ExchangeSpec.from_dict(spec.to_dict()) == spec
