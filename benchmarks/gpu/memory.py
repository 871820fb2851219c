"""Training steps beside `estimate`. The error table is the result.

Which rows may serve to fit the memory model and which only test it stands in `CASES`, before anything is measured. How
much of the card a row fills is `estimate`'s word, so that the rows spread over any card.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.models import Training, free
from benchmarks.gpu.running import Part, Piece, Row, Skip
from course_lib.memory import estimate
from course_lib.observe import MemoryProbe
from course_lib.units import GIB

MEDIAN, WORST = 0.08, 0.15  # goals: error of `reserved`
DEFAULTS = {"method": "full", "precision": "bf16-mixed", "optimizer": "adamw", "activation_checkpointing": "none"}


@dataclass(frozen=True)
class Case:
    """One training: `estimate`'s own settings; how much of the card it shall fill by `estimate`, or else its micro-batch."""

    model: str
    settings: dict[str, Any]
    fill: float = 0.0
    loss: str = "eager"
    held_out: bool = False

    @property
    def name(self) -> str:
        said = [f"{key}={value}" for key, value in self.settings.items()] + [f"loss={self.loss}"] * (
            self.loss != "eager"
        )
        return " ".join([self.model, *said] + [f"fill={self.fill:g}"] * bool(self.fill))


def case(model: str, fill: float = 0.0, loss: str = "eager", held_out: bool = False, **settings: Any) -> Case:
    return Case(model, settings, fill, loss, held_out)


def cases() -> list[Case]:
    """The most telling first: what does not come to its turn in one run is the next one's (ONLY=...)."""
    small, one, eight = "smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"
    full, some = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
    bf16, long = {"precision": "bf16", "seq_len": 2048}, {"seq_len": 2048}
    fixed, middle = {"micro_batch_size": 4, "seq_len": 2048}, {"micro_batch_size": 8, "seq_len": 1024}
    return [
        case(small, **middle),
        case(one, 0.5, **long, held_out=True),
        case(eight, 0.85, **bf16, **full),
        case(eight, 0.95, **bf16, **full, held_out=True),
        case(eight, 1.4, **bf16, **full, held_out=True),  # shall not fit
        case(eight, 0.9, method="lora", seq_len=4096, **full),
        case(eight, 0.5, method="lora", **long, held_out=True),
        case(eight, 0.5, method="qlora", seq_len=4096, **full),
        case(eight, 0.75, optimizer="adamw8bit", **bf16, **some, held_out=True),
        case(one, 0.35, **long),
        case(one, 0.95, **long),
        case(one, 0.8, **long, **full, held_out=True),
        case(one, 0.4, **long, **some),
        case(one, 0.7, attention="eager", **long),
        case(one, 0.6, **bf16),
        case(one, 0.7, precision="fp32", **long, held_out=True),
        case(one, 0.75, method="lora", **long, **some),
        case(one, 0.3, method="qlora", **long, **full, held_out=True),
        case(one, 0.9, seq_len=8192, **full, held_out=True),
        case(one, 1.2, **long),  # shall not fit
        case(one, loss="chunked", **fixed),
        case(one, loss="fused", **fixed),
        case(small, micro_batch_size=1, seq_len=512),
        case(small, **middle, **some, held_out=True),
        case(small, **middle, **full),
        case(small, attention="eager", **middle, held_out=True),
        case(small, precision="fp16-mixed", **middle),
        case(small, optimizer="adamw8bit", **middle, held_out=True),
        case(small, method="lora", **middle),
        case(small, 0.2, **long),
    ]


def small_cases() -> list[Case]:
    sizes = {"precision": "fp32", "seq_len": 32}
    return [
        case("tiny", micro_batch_size=2, **sizes),
        case("tiny", loss="chunked", micro_batch_size=2, activation_checkpointing="full", **sizes),
        case("tiny", 0.5, method="lora", held_out=True, **sizes),
    ]


def pieces(part: Part) -> Iterator[Piece]:
    for each in small_cases() if part.small else cases():
        yield each.name, lambda each=each: measured(each, part)


def measured(case: Case, part: Part) -> Iterable[Row]:
    """Predict, then run the step, and give both."""
    settings = DEFAULTS | case.settings
    free(part.device)
    card = torch.cuda.mem_get_info()[1] if part.on_gpu else 2**26
    if case.fill:
        settings["micro_batch_size"] = filling(case, settings, card, part)
    in_chunks = "fused" if case.loss == "chunked" else "eager"  # what torch.compile fuses, `estimate` does not know
    told = estimate(case.model, device=part.device.type, loss=in_chunks, **settings)
    found: dict[str, Any] = {}
    training = None
    try:
        training = Training(case.model, device=part.device, loss=case.loss, **settings)
        found = on_gpu(training, 2 if "8b" in case.model else 3) if part.on_gpu else on_cpu(training)
    except RuntimeError as error:
        # where the allocator has taken all, what fails may be cuBLAS, or a kernel that is loaded
        if not any(sign in str(error) for sign in ("out of memory", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")):
            raise
        found = {"out_of_memory": str(error).split("\n")[0][:200]}
    finally:
        training = None
        free(part.device)
    predicted = {"allocated": told.allocated, "reserved": told.reserved.expected, "context": told.cuda_context}
    found |= {f"predicted_{what}": size for what, size in predicted.items()} | {"predicted_fits": told.fits(card)}
    yield "step", case.name, found | {"card": card, "held_out": case.held_out, "loss": case.loss, "settings": settings}


def filling(case: Case, settings: dict[str, Any], card: int, part: Part) -> int:
    """The largest micro-batch with which reserve and context are within that share of the card. Raises Skip for none."""

    def needed(size: int) -> int:
        told = estimate(case.model, device=part.device.type, **settings | {"micro_batch_size": size})
        return told.reserved.expected + told.cuda_context * part.on_gpu

    size = 0
    while size < 4096 and needed(size + 1) <= case.fill * card:
        size += 1
    if not size:
        raise Skip(f"by the estimate one sequence is more than {case.fill:.0%} of this card")
    return size


def on_gpu(training: Training, steps: int) -> dict[str, Any]:
    torch.cuda.empty_cache()  # what building took besides
    torch.cuda.reset_accumulated_memory_stats()
    held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    for number in range(steps):
        if number < 2:  # the first step makes Adam's state
            torch.cuda.reset_peak_memory_stats()
        loss = training.step()
    torch.cuda.synchronize()
    free_bytes, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "context": total - free_bytes - torch.cuda.memory_reserved(),
        # where the allocator has given segments back, `reserved` is not what it would take on a larger card
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "held_before": held,
        "last_loss": loss.item(),
    }


def on_cpu(training: Training) -> dict[str, Any]:
    """A CPU has no caching allocator, so nothing is reserved."""
    training.step()
    probe = MemoryProbe(training.model, training.optimizer)
    with probe.measure():
        loss = training.step()
    return {"allocated": probe.bytes["peak"], "last_loss": loss.item()}


def error_of(row: dict[str, Any], what: str) -> str:
    return (
        f"{row[what] / GIB:8.2f} ({row[f'predicted_{what}'] / row[what] - 1:+6.1%})" if row.get(what) else f"{'-':>17}"
    )


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Every step's error; then median and worst, of the rows to fit and of those held out, and whether "fits" was right.

    `estimate` knows the eager loss only: rows with another one are shown and not counted. Nor are those, for `reserved`,
    where the allocator had to give segments back ("trimmed").
    """
    steps = [row for row in rows if row["kind"] == "step"]
    yield f"  {'GiB':78}{'allocated':>18}{'reserved':>18}{'context':>9}"
    for row in steps:
        pair = [error_of(row, what) for what in ("allocated", "reserved")]
        context = f"{row['context'] / GIB:9.2f}" if "context" in row else f"{'-':>9}"
        note = " out of memory" * ("out_of_memory" in row) + " trimmed" * bool(row.get("retries"))
        note += " held out" * row["held_out"]
        yield f"  {row['name'][:78]:78} {pair[0]} {pair[1]}{context}{note}"
    for held_out, words in ((False, "to fit"), (True, "held out")):
        counted = [row for row in steps if row["held_out"] is held_out and row["loss"] == "eager"]
        for what in ("allocated", "reserved"):
            whole = [row for row in counted if row.get(what) and not (what == "reserved" and row.get("retries"))]
            if off := [abs(row[f"predicted_{what}"] / row[what] - 1) for row in whole]:
                median, worst = statistics.median(off), max(off)
                said = f"  {words}, {what}: median {median:.1%}, worst {worst:.1%} of {len(off)} rows"
                met = median <= MEDIAN and worst <= WORST
                goal = f"; goal {MEDIAN:.0%} and {WORST:.0%}: {'met' if met else 'MISSED'}"
                yield said + goal * (what == "reserved")
        told = [row for row in counted if "reserved" in row or "out_of_memory" in row]
        wrong = [row["name"] for row in told if row["predicted_fits"] == ("out_of_memory" in row)]
        yield f"  {words}, fits: wrong for {len(wrong)} of {len(told)} rows {'; '.join(wrong)}"
