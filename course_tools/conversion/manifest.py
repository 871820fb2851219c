"""manifest.json of a folder of shards: for which grid and in which layout it was split, and what each file must be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.checkpoints.errors import CheckpointError
from course_tools.conversion.pieces import LAYOUTS
from course_tools.conversion.tensor_files import BYTES, About

NAME = "manifest.json"
FORMAT = 1


def shard_name(layout: str, tp: int, pp: int, rank: int, stage: int) -> str:
    """The file of a shard, relative to its folder; the megatron layout has Megatron's folders, without _PPP at pp=1.

    Megatron itself pickles a model_optim_rng.pt there, with the optimizer in it; ours are safetensors of the weights.
    """
    if layout == "megatron":
        return f"mp_rank_{rank:02d}{f'_{stage:03d}' if pp > 1 else ''}/model.safetensors"
    return f"tp-{rank + 1:02d}-of-{tp:02d}_pp-{stage + 1:02d}-of-{pp:02d}.safetensors"


@dataclass(frozen=True)
class Shard:
    """One file: its size, its SHA-256, and the dtype and shape of each tensor in it."""

    bytes: int
    sha256: str
    tensors: dict[str, About]


@dataclass(frozen=True)
class Manifest:
    """``shards`` by (tp rank, stage)."""

    layout: str
    tp: int
    pp: int
    shards: dict[tuple[int, int], Shard]

    def file(self, rank: int, stage: int) -> str:
        return shard_name(self.layout, self.tp, self.pp, rank, stage)

    def shapes(self) -> dict[tuple[int, int], dict[str, tuple[int, ...]]]:
        return {place: {n: about[1] for n, about in shard.tensors.items()} for place, shard in self.shards.items()}


def to_json(manifest: Manifest) -> str:
    files = {manifest.file(*place): vars(shard) for place, shard in sorted(manifest.shards.items())}
    told = {"format": FORMAT, "layout": manifest.layout, "tp": manifest.tp, "pp": manifest.pp, "shards": files}
    return json.dumps(told, indent=1) + "\n"


def read(folder: Path) -> Manifest:
    """The manifest of a folder of shards. Raises CheckpointError where there is none, or it means nothing."""
    path = folder / NAME
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {NAME}, so no finished split is there: where training wrote the shards, seal them first."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: damaged ({error}).") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT or told.get("layout") not in LAYOUTS:
        raise CheckpointError(f"{path} is no manifest of shards in format {FORMAT} and a layout that is known here.")
    layout, tp, pp, files = (told.get(key) for key in ("layout", "tp", "pp", "shards"))
    if any(type(size) is not int or not 0 < size < 10_000 for size in (tp, pp)) or not isinstance(files, dict):
        raise CheckpointError(f"{path} gives tp={tp!r}, pp={pp!r} or no table of shards: damaged.")
    names = {}
    if len(files) == tp * pp:
        names = {shard_name(layout, tp, pp, rank, stage): (rank, stage) for rank in range(tp) for stage in range(pp)}
    if set(files) != set(names):
        raise CheckpointError(
            f"{path} does not fit itself: tp={tp}, pp={pp} and layout={layout} are {tp * pp} shards with the names of that "
            f"layout, and it lists {len(files)}, among them {sorted(set(files) - set(names))[:1]}: damaged."
        )
    try:
        return Manifest(layout, tp, pp, {place: _shard(files[name]) for name, place in names.items()})
    except (TypeError, ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path} has a shard without its size, SHA-256 and tensors: damaged.") from None


def _shard(told: Any) -> Shard:
    tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in told["tensors"].items()}
    if any(dtype not in BYTES or any(type(n) is not int for n in shape) for dtype, shape in tensors.values()):
        raise ValueError
    if type(told["bytes"]) is not int or not isinstance(told["sha256"], str):
        raise ValueError
    return Shard(told["bytes"], told["sha256"], tensors)
