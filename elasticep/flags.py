"""What the flags of serving engines mean here.

`--moe-a2a-backend` of SGLang and `--all2all-backend` of vLLM name a way to exchange rows, and each
engine has variables that set its cap. `from_sglang` and `from_vllm` turn them into an
`ExchangeSpec`. Values that stand for something elasticep does not do are refused, each with the
reason and the nearest thing that it does.

A cap counts rows per rank: a decode step brings requests x draft tokens. Engines give one cap to
decode steps and prompt batches; here each part of an exchange has its own.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from elasticep.errors import SpecError
from elasticep.spec import (
    DEFAULT_DECODE_TOKENS,
    DEFAULT_PREFILL_TOKENS,
    ExchangeSpec,
    WireDtype,
)

_T = TypeVar("_T")

SGLANG_FLAG: Final = "--moe-a2a-backend"
SGLANG_DEEPEP_CAP: Final = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
SGLANG_DEEPEP_V2_CAP: Final = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
SGLANG_FLASHINFER_CAP: Final = "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK"

VLLM_FLAG: Final = "--all2all-backend"
VLLM_LOW_LATENCY_CAP: Final = "VLLM_MOE_DP_CHUNK_SIZE"
VLLM_DEFAULT_LOW_LATENCY_TOKENS: Final = 256

_FUSED = (
    "fuses the exchange with the expert computation in one kernel, which leaves nothing that could "
    "be repeated when a rank dies; use flashinfer (ROUTED) or deepep_v2 (EXPAND)"
)
_ASCEND = "is for Ascend NPUs, for which elasticep has no kernels; there is nothing to use instead"
_OWN_FAULTS = (
    "brings its own way of masking dead ranks, which would contradict the group's view; its rows "
    "arrive as in deepep with mode low_latency (LOW_LATENCY), use that"
)
_PPLX = (
    "wraps kernels that their authors have given up; its rows arrive as in deepep with mode "
    "low_latency (LOW_LATENCY), use that"
)
_MORI = "is for AMD GPUs, for which elasticep has no kernels; on NVIDIA GPUs use deepep"
_MOONEP = (
    "copies expert weights to other ranks in every step, while here the placement changes only "
    "with a view; use flashinfer (ROUTED), and let the controller rebalance"
)

_SGLANG_REFUSED: Final[Mapping[str, str]] = {
    "megamoe": _FUSED,
    "flashinfer_megamoe": _FUSED,
    "ascend_fuseep": _ASCEND,
    "ascend_tp": _ASCEND,
    "mooncake": _OWN_FAULTS,
    "nixl": _OWN_FAULTS,
    "pplx": _PPLX,
    "mori": _MORI,
}
_SGLANG_MODES: Final[Mapping[str, tuple[str | None, ...]]] = {
    "none": (None,),
    "deepep": (None, "auto", "normal", "low_latency"),
    "deepep_v2": (None, "direct", "hybrid"),
    "flashinfer": (None,),
}

_VLLM_REFUSED: Final[Mapping[str, str]] = {
    "pplx": _PPLX,
    "mori": _MORI,
    "mori_high_throughput": _MORI,
    "mori_low_latency": _MORI,
    "nixl_ep": _OWN_FAULTS,
    "moonep": _MOONEP,
}
_VLLM_PRESETS: Final[Mapping[str, str]] = {
    "allgather_reducescatter": "ALLGATHER",
    "naive": "ALLGATHER",
    "deepep_high_throughput": "NORMAL",
    "deepep_low_latency": "LOW_LATENCY",
    "deepep_v2": "EXPAND",
    "flashinfer_all2allv": "ROUTED",
    "flashinfer_nvlink_one_sided": "ROUTED",
    "flashinfer_nvlink_two_sided": "ROUTED",
}


def from_sglang(
    backend: str,
    mode: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    prefill_chunk: int | None = None,
    **changes: Any,
) -> ExchangeSpec:
    """The exchange that a value of SGLang's `--moe-a2a-backend` stands for.

    Args:
        backend: none, deepep, deepep_v2 or flashinfer.
        mode: of deepep, the value of `--deepep-mode` (auto, normal or low_latency); of deepep_v2,
            that of `--deepep-v2-mode` (direct or hybrid), which changes nothing here: how rows
            cross between domains follows from where the ranks are.
        env: variables to read the cap from, usually `os.environ`; none are read by default.
        prefill_chunk: the most prompt rows a rank brings to a step (`--chunked-prefill-size` per
            rank); 4096 when not given.
        changes: fields to set otherwise, such as `max_tokens`, `num_sms` (SGLang's
            `--deepep-config`) or `dispatch_dtype` (`--flashinfer-a2a-dispatch-type`).

    deepep sends fp8 rows unless `dispatch_dtype` says otherwise, as DeepEP does. Raises
    `SpecError` for other values, with the reason.
    """
    modes = _known(SGLANG_FLAG, backend, _SGLANG_MODES, _SGLANG_REFUSED)
    if mode not in modes:
        known = ", ".join(name for name in modes if name) or "none at all"
        raise SpecError(f"{SGLANG_FLAG} {backend} has no mode {mode!r}; use {known}")
    variables = {} if env is None else env
    prompt = DEFAULT_PREFILL_TOKENS if prefill_chunk is None else prefill_chunk
    if backend == "deepep":
        cap = _cap(variables, SGLANG_DEEPEP_CAP, DEFAULT_DECODE_TOKENS)
        given = {"dispatch_dtype": WireDtype.FP8, **changes}
        if mode == "normal":
            return _preset("NORMAL", prompt, given)
        if mode == "low_latency":
            return _preset("LOW_LATENCY", cap, given)
        decode_cap = changes.get("max_tokens", cap)
        return _preset("AUTO", cap, {"prefill_tokens": max(prompt, decode_cap), **given})
    if backend == "deepep_v2":
        return _expand(
            _cap(variables, SGLANG_DEEPEP_V2_CAP, DEFAULT_DECODE_TOKENS), prompt, changes
        )
    both = max(prompt, DEFAULT_PREFILL_TOKENS)
    if backend == "flashinfer":
        return _preset("ROUTED", _cap(variables, SGLANG_FLASHINFER_CAP, both), changes)
    return _preset("ALLGATHER", both, changes)


def from_vllm(
    backend: str,
    *,
    env: Mapping[str, str] | None = None,
    prefill_chunk: int | None = None,
    **changes: Any,
) -> ExchangeSpec:
    """The exchange that a value of vLLM's `--all2all-backend` stands for.

    Args:
        backend: allgather_reducescatter, naive, deepep_high_throughput, deepep_low_latency,
            deepep_v2, flashinfer_all2allv or its newer names flashinfer_nvlink_one_sided and
            flashinfer_nvlink_two_sided.
        env: variables to read the cap of deepep_low_latency from (`VLLM_MOE_DP_CHUNK_SIZE`,
            256 when not set), usually `os.environ`; none are read by default.
        prefill_chunk: the most rows a rank brings to a step (`--max-num-batched-tokens`); 4096
            when not given.
        changes: fields to set otherwise.

    Raises `SpecError` for other values, with the reason.
    """
    preset = _known(VLLM_FLAG, backend, _VLLM_PRESETS, _VLLM_REFUSED)
    prompt = DEFAULT_PREFILL_TOKENS if prefill_chunk is None else prefill_chunk
    if preset == "LOW_LATENCY":
        variables = {} if env is None else env
        cap = _cap(variables, VLLM_LOW_LATENCY_CAP, VLLM_DEFAULT_LOW_LATENCY_TOKENS)
        return _preset(preset, cap, changes)
    if preset == "EXPAND":
        return _expand(DEFAULT_DECODE_TOKENS, prompt, changes)
    return _preset(preset, prompt, changes)


def _known(flag: str, value: str, known: Mapping[str, _T], refused: Mapping[str, str]) -> _T:
    if value in refused:
        raise SpecError(f"{flag} {value} {refused[value]}")
    if value not in known:
        raise SpecError(f"{flag} has no value {value!r}; use one of {', '.join(known)}")
    return known[value]


def _cap(env: Mapping[str, str], variable: str, default: int) -> int:
    text = env.get(variable)
    if text is None:
        return default
    if not text.strip().isascii() or not text.strip().isdigit():
        raise SpecError(f"{variable} is {text!r}; it must be a whole number of rows per rank")
    return int(text)


def _preset(name: str, cap: int, changes: Mapping[str, Any]) -> ExchangeSpec:
    return ExchangeSpec.preset(name, **{"max_tokens": cap, **changes})


def _expand(cap: int, prompt: int, changes: Mapping[str, Any]) -> ExchangeSpec:
    """DeepEP v2: one way to send, by the count on the GPU for decode, on the host for prompts."""
    decode = _preset("EXPAND", cap, changes)
    shared = {
        name: getattr(decode, name)
        for name in ("dispatch_dtype", "combine_dtype", "reduce", "channels", "num_sms")
    }
    prefill = _preset("EXPAND_SYNC", max(prompt, decode.max_tokens), shared)
    return _preset("EXPAND", cap, {"prefill": prefill, **changes})
