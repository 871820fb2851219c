"""manifest.json of a folder of shards: the grid and layout for which it was split, and each file's size and checksum."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from course_lib.checkpoints.errors import CheckpointError
from course_tools.conversion.pieces import LAYOUTS

NAME = "manifest.json"
FORMAT = 2


def shard_name(layout: str, tp: int, pp: int, rank: int, stage: int) -> str:
    """Name a shard's file, relative to its folder; layout megatron has Megatron's folders, without _PPP at pp=1.

    Megatron itself pickles a model_optim_rng.pt there, with the optimizer in it; ours are safetensors of the weights.
    """
    if layout == "megatron":
        return f"mp_rank_{rank:02d}{f'_{stage:03d}' if pp > 1 else ''}/model.safetensors"
    return f"tp-{rank + 1:02d}-of-{tp:02d}_pp-{stage + 1:02d}-of-{pp:02d}.safetensors"


@dataclass(frozen=True)
class Shard:
    """One file: its size in bytes and its SHA-256."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``shards`` by (tp rank, stage)."""

    layout: str
    tp: int
    pp: int
    shards: dict[tuple[int, int], Shard]

    def file(self, rank: int, stage: int) -> str:
        return shard_name(self.layout, self.tp, self.pp, rank, stage)


def to_json(manifest: Manifest) -> str:
    files = {manifest.file(*place): vars(shard) for place, shard in sorted(manifest.shards.items())}
    fields = {"format": FORMAT, "layout": manifest.layout, "tp": manifest.tp, "pp": manifest.pp, "shards": files}
    return json.dumps(fields, indent=1) + "\n"


def read(folder: Path) -> Manifest:
    """Read the manifest of a folder of shards. Raises CheckpointError if there is none, or it makes no sense."""
    path = folder / NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {NAME}, so no finished split is there: where training wrote the shards, seal them first."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: damaged ({error}).") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT or fields.get("layout") not in LAYOUTS:
        raise CheckpointError(f"{path} is no manifest of shards in format {FORMAT} and a layout that is known here.")
    try:
        layout, tp, pp = fields["layout"], int(fields["tp"]), int(fields["pp"])
        shards = {name: Shard(int(one["bytes"]), str(one["sha256"])) for name, one in fields["shards"].items()}
    except (TypeError, ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path} lacks the grid, or a shard's size and SHA-256: damaged.") from None
    places = [(rank, stage) for rank in range(tp) for stage in range(pp)] if len(shards) == tp * pp else []
    names = {shard_name(layout, tp, pp, *place): place for place in places}
    if set(shards) != set(names):
        raise CheckpointError(
            f"{path} does not fit itself: tp={tp}, pp={pp} and layout={layout} are {tp * pp} shards with the names of "
            f"that layout, and it lists {len(shards)}: damaged."
        )
    return Manifest(layout, tp, pp, {names[name]: shard for name, shard in shards.items()})
