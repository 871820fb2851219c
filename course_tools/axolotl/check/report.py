"""What a check found, for a program and for a reader."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_lib.memory import Breakdown, Host
from course_lib.memory.cards import Cards
from course_lib.units import GIB, MIB
from course_tools.axolotl.check.batch import Batch
from course_tools.axolotl.check.document import Document
from course_tools.axolotl.check.findings import Finding, dotted
from course_tools.axolotl.check.holders import Holder


@dataclass(frozen=True)
class Report:
    """An Axolotl YAML, read.

    Attributes:
        document: the file. cluster: the cards; None if none were told.
        launch_command: what starts the run. strategy: who wraps the model, in words.
        batch: an optimizer step and an epoch. holders: what each rank holds.
        memory: of the fullest GPU, by the course's estimate; None with `memory_unknown`, why not.
        host: of a machine's own memory.
        fits: whether the card holds it; None without a card, or where not all is counted. largest: the micro_batch_size that would, where it does not
            (the eval_batch_size where evaluation is the peak).
        caveats: what the estimate does not see. findings: errors first. validator_seconds: that Axolotl's took.
        validated: it was asked. extra: bytes beside `memory` that Axolotl's own ways cost.
    """

    document: Document
    cluster: Cards | None
    launch_command: str
    strategy: str
    batch: Batch
    holders: tuple[Holder, ...]
    memory: Breakdown | None
    memory_unknown: str
    host: Host | None
    fits: bool | None
    largest: int | None
    caveats: tuple[str, ...]
    findings: tuple[Finding, ...]
    validator_seconds: float
    validated: bool
    extra: int

    @property
    def name(self) -> str:
        return str(self.document.path or "the YAML")

    def mended(self) -> str:
        """The YAML with what `--fix` is sure of; the first of two findings about one key counts."""
        mends: dict[Any, Any] = {}
        for finding in self.findings:
            mends |= {path: value for path, value in finding.mend.items() if path not in mends}
        return self.document.mended(mends)

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "error")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        return {
            "name": self.name,
            "gpus": str(self.cluster) if self.cluster else None,
            "launch_command": self.launch_command,
            "strategy": self.strategy,
            "batch": asdict(self.batch),
            "holders": [asdict(one) | {"share": one.share} for one in self.holders],
            "memory": self.memory.as_dict() if self.memory else None,
            "memory_unknown": self.memory_unknown,
            "host": self.host._asdict() if self.host else None,
            "fits": self.fits,
            "largest_micro_batch": self.largest,
            "caveats": list(self.caveats),
            "findings": [
                asdict(one) | {"mend": {dotted(path): value for path, value in one.mend.items()}}
                for one in self.findings
            ],
            "validator_seconds": self.validator_seconds,
        }

    def __str__(self) -> str:
        return "\n".join([*self._run(), *self._memory(), "", *self._findings()])

    def _run(self) -> list[str]:
        batch = self.batch
        exact = "" if batch.packing else " at most"
        lines = [
            f"{self.name} on {self.cluster or 'no cards told'}",
            f"  {self.launch_command}",
            "",
            f"a step    {batch.micro} micro x {batch.accumulate} accumulated x {batch.data_ranks} data ranks = "
            f"{batch.global_batch} {'packed rows' if batch.packing else 'sequences'},{exact} {batch.tokens:,} tokens",
        ]
        if batch.steps_per_epoch is None:
            lines.append(f"an epoch  unknown: {batch.unknown}")
        else:
            lines.append(f"an epoch  {batch.rows:,} rows: {batch.steps_per_epoch:,} steps")
        if batch.total_steps is not None:
            lines.append(f"the run   {batch.total_steps:,} steps" + (" (max_steps)" if batch.capped else ""))
        return lines

    def _memory(self) -> list[str]:
        lines = ["", f"who holds what: {self.strategy}"]
        for one in self.holders:
            size = "" if one.bytes is None else f"{amount(one.bytes):>12}"
            lines.append(
                f"  {one.what:10} {one.share:>6} a rank{size}" + (", on the host" if one.where == "host" else "")
            )
        if self.memory is None:
            return [*lines, f"memory a GPU: not predicted. {self.memory_unknown}"]
        need = self.memory
        lines.append(f"  activations and logits {amount(need.activations + need.logits):>19}")
        if self.cluster and not self.cluster.card:
            lines.append(f"memory a rank: peak {amount(need.peak)} ({need.peak_phase})")
        else:
            lines.append(
                f"memory a GPU: peak {amount(need.peak)} ({need.peak_phase}), a card needs {amount(need.device + self.extra)}"
            )
        if self.cluster and self.cluster.card:
            room = amount(self.cluster.card.memory)
            verdict = {True: "fits", False: "DOES NOT FIT", None: "what is counted fits, and not all is counted"}[
                self.fits
            ]
            lines.append(f"  {self.cluster.card.name}: {room}, {verdict}")
        if self.host and self.host.peak:
            offloaded = f", {amount(self.host.training)} offloaded from then on" if self.host.training else ""
            lines.append(
                f"host memory of each machine: {amount(self.host.loading)} while the model is loaded{offloaded}"
            )
        return [*lines, *(f"  {caveat}" for caveat in self.caveats)]

    def _findings(self) -> list[str]:
        if not self.findings:
            asked = "" if self.validated else " by the rules here; Axolotl's own validator was not asked"
            return [f"nothing found that is wrong{asked}"]
        lines = []
        for one in self.findings:
            place = f"line {one.line}: " if one.line else ""
            lines.append(f"{one.level:8}{place}{one.key + ': ' if one.key else ''}{one.sentence}")
            if one.fix:
                lines.append(f"        -> {one.fix}")
        return lines


def amount(size: int) -> str:
    """Bytes as GiB, small ones as MiB."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / MIB:,.2f} MiB"


def launch_command(path: Path | None, cluster: Cards | None) -> str:
    """``axolotl train`` for these cards; on several machines the command of each of them, with its rank to fill in."""
    name = shlex.quote(str(path or "run.yml"))
    if cluster is None or cluster.ranks == 1:
        return f"axolotl train {name} --launcher python"
    torchrun = f"axolotl train {name} --launcher torchrun -- "
    if cluster.nodes == 1:
        return f"{torchrun}--nproc_per_node={cluster.per_node}"
    rendezvous = "--rdzv_endpoint=$HEAD:29500 --rdzv_backend=c10d --rdzv_id=run"
    return f"{torchrun}--nnodes={cluster.nodes} --nproc_per_node={cluster.per_node} {rendezvous}"
