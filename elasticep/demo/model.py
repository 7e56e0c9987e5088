"""The demo's model: a small seeded Qwen3-MoE over bytes, decoded one token per batch row and step.

A step feeds exactly one token to each of a fixed number of rows, prompt tokens too, with a static
KV cache that is written at each row's own position. So a repeated step overwrites what its torn
first try wrote, and a request that moves to another rank is replayed token by token.
"""

import inspect
import zlib
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, logging

from elasticep.demo.settings import ModelSizes
from elasticep.engines.transformers import make_rowwise
from elasticep.errors import ConfigError

VOCABULARY: Final = 256  # bytes
# Wide enough that the answers differ from request to request.
_INITIALIZER_RANGE: Final = 0.12
# Sharp attention: the next token hangs on the whole history, so one wrong token changes all later
# ones. (With 1.0 a random model soon repeats itself, and equal tokens would prove little.)
_QUERY_SCALE: Final = 3.0

_SKEW: Final = 4.0  # larger logits are more often among the highest


def prepare() -> None:
    """One thread for products, and no notes from transformers on the terminal."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # which would start a thread, too


def build_model(sizes: ModelSizes, seed: int) -> Any:
    """The model in fp32, the same for the same seed, its linear layers computed row by row."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        moe_intermediate_size=sizes.hidden // 2,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.hidden // sizes.heads,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.topk,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        initializer_range=_INITIALIZER_RANGE,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(_QUERY_SCALE)
    make_rowwise(model)
    return model


def skew_router(model: Any, sizes: ModelSizes) -> None:
    """Let the first experts of every layer be chosen more often than the others."""
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[: sizes.experts // 4] *= _SKEW


def save_model(model: Any, folder: Path) -> None:
    """Write a checkpoint as Hugging Face has them, for the daemons to take experts from.

    Raises:
        ConfigError: it cannot be written to `folder`.
    """
    try:
        model.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the demo's model cannot be written to {folder} ({error}); make room there, or let "
            "TMPDIR name another folder"
        ) from None


class RowCache:
    """Keys and values `[rows, kv_heads, length, head_dim]` per layer, written at `positions`.

    It has the one method of a transformers cache that attention calls.
    """

    def __init__(self, sizes: ModelSizes, rows: int, length: int) -> None:
        shape = (rows, sizes.kv_heads, length, sizes.hidden // sizes.heads)
        self._keys = [torch.zeros(shape) for _ in range(sizes.layers)]
        self._values = [torch.zeros(shape) for _ in range(sizes.layers)]
        self._rows = torch.arange(rows)
        self.positions = torch.zeros(rows, dtype=torch.long)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one position per row; returns everything."""
        self._keys[layer][self._rows, :, self.positions] = keys[:, :, 0]
        self._values[layer][self._rows, :, self.positions] = values[:, :, 0]
        return self._keys[layer], self._values[layer]


class Decoder:
    """One token per row and call, over a static cache.

    Args:
        model: of `build_model`, its MoE blocks replaced or not.
        sizes: its sizes.
        rows: batch rows.
        length: the longest request, prompt and answer, in tokens.
    """

    def __init__(self, model: Any, sizes: ModelSizes, rows: int, length: int) -> None:
        self._model = model
        self._cache = RowCache(sizes, rows, length)
        self._steps = torch.arange(length)
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def step(self, tokens: list[int], positions: list[int]) -> torch.Tensor:
        """Feed one token per row at its position: logits `[rows, VOCABULARY]` for what follows."""
        at = torch.tensor(positions)
        self._cache.positions = at
        mask = torch.zeros(len(tokens), len(self._steps))
        mask.masked_fill_(self._steps[None] > at[:, None], float("-inf"))
        cache = {self._cache_name: self._cache}
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor(tokens)[:, None],
                attention_mask=mask[:, None, None],
                position_ids=at[:, None],
                use_cache=False,
                **cache,
            )
        logits: torch.Tensor = output.logits[:, 0]
        return logits


def logit_sums(logits: torch.Tensor) -> list[int]:
    """CRC-32 over each row's bytes: two rows with the same sum have, in all likelihood, the same
    bits.
    """
    return [zlib.crc32(row.tobytes()) for row in logits.numpy()]
