"""A checkpoint folder or file: what experts are in it, and of which tensors they consist."""

import json
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from elasticep.checkpoint.files import StoredTensor, TensorFile
from elasticep.checkpoint.names import ExpertTensor, expert_tensors, fuse, in_order
from elasticep.checkpoint.units import Units, stored_spec
from elasticep.errors import CheckpointError
from elasticep.weights import WeightSpec

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
_CONFIG_NAME: Final = "config.json"
_MAX_JSON_BYTES: Final = 256 << 20


def open_checkpoint(path: str | Path) -> "Checkpoint":
    """Open a Hugging Face folder, its index file, or a single safetensors file.

    Nothing but the index (or the file's header) and config.json is read.

    Raises:
        CheckpointError: there is none, it is not safetensors, or experts in it are incomplete.
    """
    where = Path(path)
    listed = listing_of(where)
    if listed.suffix == ".json":
        files = _read_index(listed)
    else:
        files = dict.fromkeys(TensorFile(listed).names, listed.name)
    return Checkpoint(where, listed.parent, files)


def listing_of(where: Path) -> Path:
    """The file that says what tensors a checkpoint has: an index, or a single safetensors file.

    Args:
        where: a folder, or that file.

    Raises:
        CheckpointError: there is none.
    """
    if where.is_dir():
        return _in_folder(where)
    if not where.is_file():
        raise CheckpointError(
            f"there is no checkpoint {str(where)!r}; give a Hugging Face folder or a .safetensors "
            "file"
        )
    if where.suffix not in (".json", ".safetensors"):
        raise CheckpointError(f"{where} is no .safetensors file; no other format is read")
    return where


class Checkpoint:
    """Experts of a checkpoint, by MoE layer.

    A group counts MoE layers only: its layer 0 is the model's first layer with routed experts
    (layer 3 of DeepSeek-V3). Layers beyond the model's own (heads that predict further tokens) are
    left out, as config.json says.

    Args:
        path: for messages.
        folder: where its files are.
        files: file name of every tensor, by tensor name.

    Attributes:
        path: for messages.
        layers: the model's layers that have routed experts, ascending.
        experts: how many each of them has.
    """

    def __init__(self, path: Path, folder: Path, files: Mapping[str, str]) -> None:
        self.path = path
        self._folder = folder
        self._files = files
        self._opened: dict[str, TensorFile] = {}
        self._lock = threading.Lock()
        self._tensors: dict[tuple[int, int | None], dict[str, str]] = {}
        tensors = expert_tensors(files)
        config = _model_config(folder)
        limit = _whole(config, "num_hidden_layers")
        kept = [tensor for tensor in tensors if limit is None or tensor.layer < limit]
        if not kept:
            raise CheckpointError(
                f"{path} has no tensors of routed experts ({len(files)} tensors in all); names "
                "like layers.0.mlp.experts.0.gate_proj.weight were looked for"
            )
        for tensor in kept:
            self._add(tensor)
        self.layers = tuple(sorted({tensor.layer for tensor in kept}))
        self.stacked = any(tensor.expert is None for tensor in kept)
        self.experts = self._count_experts(kept)
        told = _whole(config, "n_routed_experts", "num_local_experts", "num_experts")
        if told is not None and told != self.experts:
            raise CheckpointError(
                f"{path} has the tensors of {self.experts} experts per layer, its config.json says "
                f"{told}; fetch the checkpoint again"
            )

    def _add(self, tensor: ExpertTensor) -> None:
        kinds = self._tensors.setdefault((tensor.layer, tensor.expert), {})
        if tensor.kind in kinds:
            raise CheckpointError(
                f"{self.path}: {tensor.name} and {kinds[tensor.kind]} are the same tensor of one "
                "expert; the checkpoint holds two models"
            )
        kinds[tensor.kind] = tensor.name

    def _count_experts(self, tensors: Iterable[ExpertTensor]) -> int:
        first = self.layers[0]
        if self.stacked:
            if any(tensor.expert is not None for tensor in tensors):
                raise CheckpointError(
                    f"{self.path} has tensors of single experts beside tensors of all experts; "
                    "this form is not known"
                )
            kinds = self._tensors[first, None]
            self._require_alike([(layer, None) for layer in self.layers], kinds)
            shape = self.tensor(kinds[in_order(kinds)[0]]).shape
            if not shape:
                raise CheckpointError(f"{self.path}: {next(iter(kinds.values()))} has no experts")
            return shape[0]
        count = 1 + max(tensor.expert for tensor in tensors if tensor.expert is not None)
        pairs = [(layer, expert) for layer in self.layers for expert in range(count)]
        self._require_alike(pairs, self._tensors.get((first, 0), {}))
        return count

    def _require_alike(
        self, pairs: Iterable[tuple[int, int | None]], kinds: Mapping[str, str]
    ) -> None:
        for layer, expert in pairs:
            have = self._tensors.get((layer, expert), {})
            if set(have) == set(kinds) and have:
                continue
            whose = f"layer {layer}" + ("" if expert is None else f" expert {expert}")
            odd = in_order(set(kinds) ^ set(have))
            examples = [kinds.get(kind) or have[kind] for kind in odd[:4]]
            what = "lacks" if not have or set(kinds) - set(have) else "has more than others:"
            raise CheckpointError(
                f"{self.path}: {whose} {what} {', '.join(odd[:4]) or 'all its tensors'}"
                f"{f' (compare {examples[0]})' if examples else ''}; every expert must have the "
                "same tensors. Fetch the checkpoint again"
            )

    # ---- what an expert consists of

    @property
    def kinds(self) -> tuple[str, ...]:
        """Our names of an expert's tensors as they are stored."""
        key = (self.layers[0], None if self.stacked else 0)
        return tuple(in_order(self._tensors[key]))

    def weight_spec(self, *, fused: bool = True) -> WeightSpec:
        """The spec of one expert, read from the first one's file header.

        Args:
            fused: gate and up projection as one tensor `w13`, gate first, as grouped kernels take
                them; else `w1` and `w3`. Checkpoints that store both as one are left as they are.
        """
        kinds = fuse(self.kinds) if fused else self.kinds
        spec = WeightSpec(tuple(stored_spec(self, kind) for kind in kinds))
        return self.units(spec).spec

    def units(self, spec: WeightSpec) -> Units:
        """Where each expert's unit of this spec is read from.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or one of another shape or dtype.
        """
        return Units(self, spec)

    def name_of(self, layer: int, expert: int, kind: str) -> str:
        """The checkpoint's name of a tensor.

        Args:
            layer: MoE layer, 0-based.
            expert: 0-based.
            kind: our name.

        Raises:
            CheckpointError: there is no such layer, expert or tensor.
        """
        if not (0 <= layer < len(self.layers) and 0 <= expert < self.experts):
            raise CheckpointError(
                f"{self.path} has {len(self.layers)} MoE layers of {self.experts} experts; there "
                f"is no layer {layer} expert {expert}. Check the group's geometry"
            )
        kinds = self._tensors[self.layers[layer], None if self.stacked else expert]
        if kind not in kinds:
            raise CheckpointError(
                f"{self.path} has no tensor {kind!r} of experts; it has {', '.join(self.kinds)}. "
                "Take [weights] from `elasticep checkpoint`"
            )
        return kinds[kind]

    @property
    def names(self) -> Collection[str]:
        """Names of all its tensors, of experts or not."""
        return self._files.keys()

    def read(self, name: str) -> tuple[StoredTensor, bytearray]:
        """Any tensor: what it is, and its bytes.

        Raises:
            CheckpointError: there is none of this name, or it cannot be read.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; fetch it again")
        tensor = self.tensor(name)
        data = bytearray(tensor.nbytes)
        file = self.file_of(name)
        with file.open() as opened:
            file.read_into(opened, tensor.start, [memoryview(data)])
        return tensor, data

    def tensor(self, name: str) -> StoredTensor:
        """Where a tensor lies in its file."""
        return self.file_of(name).tensor(name)

    def file_of(self, name: str) -> TensorFile:
        """The file that has a tensor; its header is read the first time."""
        file = self._files[name]
        with self._lock:
            opened = self._opened.get(file)
            if opened is None:
                opened = self._opened[file] = TensorFile(self._folder / file)
        return opened

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return sum(file.bytes_read for file in self._opened.values())


def _in_folder(folder: Path) -> Path:
    for name in (INDEX_NAME, SINGLE_NAME):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{folder} has {len(found)} safetensors files but no {INDEX_NAME}; fetch the index"
        )
    pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
    hint = "only pickles, which are not read; convert it" if pickles else "nothing to read"
    raise CheckpointError(f"{folder} has no {INDEX_NAME} and no safetensors file: {hint}")


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has more than {_MAX_JSON_BYTES} bytes; is it JSON?")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON ({error}); fetch it again") from None


def _read_index(path: Path) -> dict[str, str]:
    plain = _read_json(path)
    table = plain.get("weight_map") if isinstance(plain, dict) else None
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{path} has no table weight_map; it is no index of a checkpoint")
    beside: set[str] = set()
    for name, file in table.items():
        if isinstance(file, str) and file in beside:
            continue
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: tensor {name!r} lies in {file!r}; files lie beside the index"
            )
        beside.add(file)
    return table


def _model_config(folder: Path) -> Mapping[str, Any]:
    path = folder / _CONFIG_NAME
    config = _read_json(path) if path.is_file() else {}
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    return config if isinstance(config, dict) else {}


def _whole(config: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return None
