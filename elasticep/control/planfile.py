"""Placements as JSON: our own form, and the maps that serving engines read.

| form | what it is | who reads it |
|---|---|---|
| `elasticep` | sizes, experts and weights of every slot | this package, loses nothing |
| `sglang` | `{"physical_to_logical_map": [[...], ...]}` | SGLang, `--init-expert-location` |
| `vllm` | `[[...], ...]`, one list of logical ids per layer | vLLM, initial expert maps |
| `vllm-ascend` | `{"moe_layer_count", "layer_list": [{"device_list": ...}]}` | vLLM Ascend |

Engines count physical slots rank by rank, fill every one, and let an expert's replicas share its
tokens evenly. So plan for them with `PlanPolicy(weighted=False, fill=True)`; an empty slot is
refused on the way out, weights are dropped.
"""

import json
from collections.abc import Collection
from typing import Any

import numpy as np

from elasticep.control.tables import EMPTY, InvalidPlacement, Placement, integer_table, spread
from elasticep.errors import ConfigError

FORMS = ("elasticep", "sglang", "vllm", "vllm-ascend")
_MAP = "physical_to_logical_map"


def export_json(placement: Placement, members: Collection[int], form: str = "elasticep") -> str:
    """The placement as JSON text in one of `FORMS`.

    Args:
        placement: what to export.
        members: ranks of the view; engines number them 0, 1, ... in ascending order.
        form: see the table above.

    Raises:
        ConfigError: an unknown form.
        InvalidPlacement: the form has no empty slots and the placement has one on a member.
    """
    if form not in FORMS:
        raise ConfigError(f"form {form!r} is not known; there are {', '.join(FORMS)}")
    if form == "elasticep":
        return json.dumps({"form": "elasticep/1"} | placement.to_dict())
    rows = placement.slot_expert[:, sorted(members)]
    empty = np.argwhere(rows == EMPTY)
    if len(empty):
        layer, index, slot = (int(i) for i in empty[0])
        raise InvalidPlacement(
            f"layer {layer} rank {sorted(members)[index]} slot {slot} is empty, which engines do "
            f"not know ({len(empty)} in all); plan with PlanPolicy(weighted=False, fill=True)"
        )
    flat = rows.reshape(placement.layers, -1).tolist()
    if form == "sglang":
        # Engines pass the whole dictionary on as keyword arguments: not a key more.
        return json.dumps({_MAP: flat})
    if form == "vllm":
        return json.dumps(flat)
    layers = [
        {
            "layer_id": layer,
            "device_count": len(devices),
            "device_list": [
                {"device_id": i, "device_expert": experts} for i, experts in enumerate(devices)
            ],
        }
        for layer, devices in enumerate(rows.tolist())
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers})


def import_json(text: str, experts: int, ranks: int, layers: int | None = None) -> Placement:
    """A placement from any of `FORMS`, recognised by its content.

    Args:
        text: JSON.
        experts: logical experts per layer.
        ranks: ranks that the slots of engines' maps are dealt to, in equal parts.
        layers: needed only where one list stands for all layers.

    Returns:
        Engines' maps come back with even weights, ranks numbered from 0. It is not checked against
        a group: call `validate`.

    Raises:
        InvalidPlacement: not a placement, or of other sizes; the message says what is wrong.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPlacement(f"the plan is not JSON: {error}") from error
    if isinstance(plain, dict) and "slot_expert" in plain:
        placement = Placement.from_dict(plain)
        if placement.experts != experts:
            raise InvalidPlacement(
                f"the plan is for {placement.experts} experts per layer, the group has {experts}; "
                "use one that was planned for this group"
            )
        return placement
    flat = _physical_map(plain)
    if flat and not isinstance(flat[0], list):
        flat = [flat] * (layers or 1)
    table = integer_table(flat, np.int32)
    if table.ndim != 2 or 0 in table.shape or table.shape[1] % ranks:
        raise InvalidPlacement(
            f"the plan's map is {table.shape}; it must be [layers, slots] with slots a multiple of "
            f"the {ranks} ranks that there are; plan for as many ranks"
        )
    if layers is not None and len(table) != layers:
        raise InvalidPlacement(
            f"the plan's map has {len(table)} layers, the group has {layers}; layers without "
            "routed experts do not count"
        )
    if int(table.min()) < EMPTY or int(table.max()) >= experts:
        wrong = int(table.max() if int(table.max()) >= experts else table.min())
        raise InvalidPlacement(
            f"the plan's map names expert {wrong}; the group has 0 to {experts - 1}, and "
            f"{EMPTY} for an empty slot"
        )
    slot_expert = table.reshape(len(table), ranks, -1)
    weight = spread(slot_expert, np.zeros(slot_expert.shape, np.uint32), experts)
    return Placement(experts=experts, slot_expert=slot_expert, slot_weight=weight)


def _physical_map(plain: Any) -> list[Any]:
    if isinstance(plain, list):
        return plain
    if isinstance(plain, dict) and isinstance(plain.get(_MAP), list):
        rows: list[Any] = plain[_MAP]
        return rows
    try:
        return [
            [expert for device in layer["device_list"] for expert in device["device_expert"]]
            for layer in plain["layer_list"]
        ]
    except (KeyError, TypeError) as error:
        raise InvalidPlacement(
            f"the plan holds neither slot_expert, {_MAP}, layer_list nor a list of layers; "
            "`elasticep rebalance GROUP --export -` prints one of each --form"
        ) from error
