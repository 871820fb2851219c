"""What a search answers: plans, the first things that did not fit, and the case that nothing does."""

from __future__ import annotations

from dataclasses import dataclass, field

from course_lib.choices import AXES, METHODS, STRATEGIES
from course_lib.memory import Breakdown, Shape
from course_lib.parallel.grid import Grid
from course_tools.planning.machines import Machines


def words(grid: Grid) -> str:
    """DP 4 x TP 2, as a reader says it."""
    axes = " x ".join(f"{axis.upper()} {getattr(grid, axis)}" for axis in AXES if getattr(grid, axis) > 1) or "1 GPU"
    return axes + (f" (EP {grid.ep})" if grid.ep > 1 else "")


def adapts_attention_alone(shape: Shape) -> bool:
    """Whether adapters leave a mixture's experts alone, which PEFT would copy to adapt, and QLoRA has them in NF4."""
    return shape.experts is not None and not shape.experts.bias


@dataclass(frozen=True)
class Settings:
    """Everything that a planner chooses. The names are those of `course_lib.memory.estimate` where it has them.

    Attributes:
        strategy: "single", "ddp", "zero1", "zero2", "zero3", "fsdp". method: "full", "lora", "qlora".
        dp, tp, pp, cp: ranks along the data, tensor, pipeline and context axis. ep: expert-parallel ones of the data axis.
        sequence_parallel: norms and residuals split along the sequence over the tensor-parallel ranks.
        micro_batch_size: sequences in one forward pass of one data-parallel rank. num_microbatches: such passes in
            one step.
        virtual_stages: stages that each pipeline rank holds (interleaved 1F1B where more than 1).
        activation_checkpointing: "none", "selective", "full". offload: "none", "optimizer", "all".
        optimizer: of `course_lib.choices.OPTIMIZERS`.
        copies: of the model among the data-parallel ranks, where FSDP shards each within a machine (HSDP); 1 shards over
            all ranks.
    """

    strategy: str
    method: str = "full"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    micro_batch_size: int = 1
    num_microbatches: int = 1
    virtual_stages: int = 1
    activation_checkpointing: str = "none"
    offload: str = "none"
    optimizer: str = "adamw"
    copies: int = 1
    precision: str = "bf16-mixed"

    @property
    def sharing(self) -> str:
        """How data-parallel ranks share the model, as a reader says it."""
        if self.strategy == "single" and self.grid.size > 1:
            return "model parallelism"
        return "HSDP" if self.copies > 1 else STRATEGIES[self.strategy].label

    @property
    def grid(self) -> Grid:
        return Grid(dp=self.dp, pp=self.pp, tp=self.tp, cp=self.cp, ep=self.ep)

    @property
    def kind(self) -> tuple[str | int | Grid, ...]:
        """Settings that differ in the rest are variants of one plan."""
        return (self.method, self.strategy, self.offload, self.optimizer, self.copies, self.grid)

    @property
    def besides(self) -> list[str]:
        """What is not as it usually is, as a reader says it."""
        checkpointing = self.activation_checkpointing
        said = {
            f"{self.virtual_stages} virtual stages": self.virtual_stages > 1,
            "sequence parallelism": self.sequence_parallel,
            f"{checkpointing} checkpointing": checkpointing != "none",
            "optimizer on the host": self.offload == "optimizer",
            "all states on the host": self.offload == "all",
            self.optimizer: self.optimizer != "adamw",
        }
        return [text for text, so in said.items() if so]

    def __str__(self) -> str:
        parts = [f"{METHODS[self.method]} by {self.sharing}", f"on {words(self.grid)}"]
        parts.append(f"{self.copies} copies" if self.copies > 1 else "")
        parts.append(f"micro-batch {self.micro_batch_size} x {self.num_microbatches}")
        return ", ".join(filter(None, [*parts, *self.besides]))


@dataclass(frozen=True)
class Plan(Settings):
    """Settings that fit, and what they are predicted to cost.

    Attributes:
        memory: of the fullest GPU, `course_lib.memory.Breakdown`; with virtual stages its peak has what interleaving adds.
        host: bytes of a machine's own memory, while the model is loaded or for what is offloaded.
        step_seconds: of one optimizer step. parts: its seconds by name; they add up to it.
        mfu: share of the card's peak that the model's own FLOPs make up, by MFU_DEFINITION.
        days: for `tokens`; None where no tokens were given.
        limit: what takes most of the step beside multiplying matrices.
        model, machines, global_batch (sequences a step), seq_len (tokens a sequence), tokens: the question.
        lora_rank: of the factors, for "lora" and "qlora". attention: "flash" or "eager". loss: of
            `course_lib.choices.LOSSES`. compile: whether by torch.compile.
    """

    memory: Breakdown = field(kw_only=True)
    host: int = field(kw_only=True)
    step_seconds: float = field(kw_only=True)
    parts: dict[str, float] = field(kw_only=True)
    mfu: float = field(kw_only=True)
    days: float | None = field(default=None, kw_only=True)
    limit: str = field(kw_only=True)
    model: Shape = field(kw_only=True)
    machines: Machines = field(kw_only=True)
    global_batch: int = field(kw_only=True)
    seq_len: int = field(kw_only=True)
    tokens: float | None = field(default=None, kw_only=True)
    lora_rank: int = field(default=16, kw_only=True)
    attention: str = field(default="flash", kw_only=True)
    loss: str = field(default="eager", kw_only=True)
    compile: bool = field(default=False, kw_only=True)

    @property
    def memory_bytes(self) -> int:
        """Bytes that a card must have: peak, what the allocator cannot reuse, and CUDA's context."""
        return self.memory.device

    @property
    def gpus(self) -> int:
        return self.grid.size

    @property
    def tokens_per_second(self) -> float:
        return self.global_batch * self.seq_len / self.step_seconds


@dataclass(frozen=True)
class Refusal:
    """Something that would have been fast and does not fit.

    Attributes:
        settings: the variant that comes nearest. needs, has: bytes on a GPU (or of a machine's own where `where` says "host").
        sentence: needs, has and why, for a reader.
        where: "GPU" or "host".
    """

    settings: Settings
    needs: int
    has: int
    sentence: str
    where: str = "GPU"

    @property
    def missing(self) -> int:
        """Bytes too much."""
        return self.needs - self.has


@dataclass(frozen=True)
class Answer:
    """What `plan` found.

    Attributes:
        plans: method by method, of each strategy and grid a variant that fits and is within 2 % of the fastest; the simplest
            first among those whose steps are alike (`search.ALIKE`), and none that is slower and no simpler than another.
        refused: the first three, by their speed, of which no variant fits.
        searched: settings whose time was computed. estimated: those whose memory was.
        seconds: that the search took.
        batch_note: why so many sequences a step, where the planner chose; or "". notes: what was assumed, a sentence each.
    """

    plans: list[Plan]
    refused: list[Refusal]
    searched: int
    estimated: int
    seconds: float
    batch_note: str = ""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Plan:
        return self.plans[0]


class NoPlan(ValueError):
    """Nothing fits: the sentence says by how much, and what would.

    Attributes:
        nearest: what comes nearest to fitting. would: what would fit, a few words each.
    """

    def __init__(self, sentence: str, nearest: Refusal | None = None, would: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.nearest = nearest
        self.would = would
