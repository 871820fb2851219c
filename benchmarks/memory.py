"""How right and how fast the course's memory arithmetic is, beside what other tools say; every figure is computed here.

1. Seconds of one `estimate`, and of many different ones.
2. Predicted against measured on this CPU, to the byte at rest, and the peak of a step; misses are listed.
3. Beside it, for the same settings, what accelerate, DeepSpeed and PyTorch's MemTracker say.
4. Predicted against a step on fake tensors, for models that no laptop holds.
5. The fit of `LEAST_WASTE`: steps replayed through the simulated caching allocator.
6. Published peaks, those that were looked at and those that were held out; and runs that did not fit.

    python benchmarks/memory.py [number of a part ...]
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

GIB, MIB = 2**30, 2**20
PUBLISHED = Path(__file__).parents[1] / "tests" / "published" / "memory_peaks.json"
MANY, PEAK = 100_000, 0.05
METHODS, PRECISIONS = ("full", "lora", "qlora"), ("fp32", "bf16-mixed", "fp16-mixed", "bf16")
OPTIMIZERS, CHECKPOINTING = ("adamw", "adamw8bit", "sgd"), ("none", "selective", "full")
SIZES = {"tiny": (2, 64), "smollm2": (1, 64)}  # sequences, tokens in each


def settings() -> Iterator[dict[str, Any]]:
    """Different ones without end: lengths outermost, so that every cache has met every other choice early."""
    for seq_len in range(512, 10**6, 8):
        for model, method, precision, checkpointing, micro_batch, strategy in product(
            ("llama-3.1-8b", "llama-3.1-70b", "qwen3-0.6b", "smollm2-135m"), METHODS, PRECISIONS, CHECKPOINTING,
            (1, 2, 3, 4, 6, 8), ("single", "ddp", "zero2", "zero3", "fsdp"),
        ):  # fmt: skip
            yield {"model": model, "method": method, "precision": precision, "activation_checkpointing": checkpointing,
                   "micro_batch_size": micro_batch, "strategy": strategy, "ranks": 1 if strategy == "single" else 8,
                   "seq_len": seq_len}  # fmt: skip


def speed() -> dict[str, bool]:
    from course_lib.memory import estimate

    chosen = {"method": "qlora", "activation_checkpointing": "full", "micro_batch_size": 2, "seq_len": 4096}
    estimate("llama-3.1-8b", **chosen)
    singles = []
    for _ in range(50):  # a hundred at a time: a clock's own microsecond would be seen beside a single one
        began = time.perf_counter()
        for _ in range(100):
            estimate("llama-3.1-8b", **chosen)
        singles.append((time.perf_counter() - began) / 100)
    asked = list(islice(settings(), MANY))
    began, on_cpu = time.perf_counter(), time.process_time()
    for one in asked:
        estimate(**one)
    wall, seconds = time.perf_counter() - began, time.process_time() - on_cpu
    median = statistics.median(singles)
    print(
        f"one estimate, warm: median {median * 1e6:.1f} µs, fastest {min(singles) * 1e6:.1f} µs of {len(singles)} batches of 100"
    )
    print(
        f"{MANY:,} different settings, cold caches: {seconds:.2f} s, {seconds / MANY * 1e6:.1f} µs each; {wall:.2f} s by the clock"
    )
    return {"one estimate under 50 µs": median < 50e-6, f"{MANY:,} settings under 5 s": seconds < 5}


class Case:
    """A model that is built here, trained for two steps and measured in the second one."""

    def __init__(self, name: str, base: Any, chosen: dict[str, str]) -> None:
        import torch

        from benchmarks.gpu.models import build_optimizer
        from course_lib.training import methods

        self.chosen, self.precision = chosen, chosen["precision"]
        how = {"method": chosen["method"], "activation_checkpointing": chosen["activation_checkpointing"]}
        self.model = methods.prepare(copy.deepcopy(base), device="cpu", precision=self.precision, **how)
        self.optimizer = build_optimizer(self.model, chosen["optimizer"])
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.precision == "fp16-mixed")
        self.batch = torch.randint(0, 200, SIZES[name], generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        from course_lib.training import methods

        with methods.autocast(self.precision, "cpu"):
            loss = self.model(input_ids=self.batch, labels=self.batch).loss
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def measured(self) -> dict[str, int]:
        from course_lib.observe import MemoryProbe, tensor_bytes
        from course_lib.training.methods import quantization_constants

        self.step()
        probe = MemoryProbe(self.model, self.optimizer)
        with probe.measure():
            self.step()
        constants = tensor_bytes(quantization_constants(self.model))  # neither parameters nor buffers
        return probe.bytes | {
            "parameters": probe.bytes["parameters"] + constants,
            "peak": probe.bytes["peak"] + constants,
        }

    def mem_tracker(self) -> str:
        """PyTorch's own tracker over one more step, MiB. It puts hooks on every parameter, which frozen ones refuse."""
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(self.model, self.optimizer, self.batch)
        try:
            with tracker:
                self.step()
        except RuntimeError as error:
            if "doesn't require gradient" not in str(error):
                raise
            return "frozen: fails"
        return f"{next(iter(tracker.get_tracker_snapshot('peak').values()))['Total'] / MIB:.1f}"


def cases(name: str) -> Iterator[dict[str, str]]:
    """Every combination for the tiny model; for SmolLM2, whose 16-bit steps take a CPU many seconds, those that matter."""
    for method, precision, checkpointing, optimizer in product(METHODS, PRECISIONS, CHECKPOINTING, OPTIMIZERS):
        matters = precision == "fp32" and (optimizer == "adamw" or checkpointing == "none")
        matters |= precision == "bf16-mixed" and optimizer == "adamw" and checkpointing == "none"
        if name == "tiny" or matters:
            yield {
                "method": method,
                "precision": precision,
                "activation_checkpointing": checkpointing,
                "optimizer": optimizer,
            }


def others(base: Any) -> dict[str, Callable[[str], str]]:
    """What the static estimators answer for one GPU, MiB, by precision; the same whatever else is chosen."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(base)

    def accelerate(precision: str) -> str:
        named = {"fp32": "float32", "fp16-mixed": "float16"}.get(precision, "bfloat16")
        return f"{max(estimate_training_usage(total, named).values()) / MIB:.1f}"

    try:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
    except ImportError:
        return {"accelerate": accelerate, "DeepSpeed": lambda precision: "not installed"}
    _, on_gpu, _ = estimate_zero3_model_states_mem_needs(
        *model_to_params(base), cpu_offload=False, cpu_offload_params=False
    )
    return {"accelerate": accelerate, "DeepSpeed": lambda precision: f"{on_gpu / MIB:.1f}"}


def measured(with_others: bool) -> dict[str, bool]:
    import torch

    from course_lib.memory import estimate, shape_of
    from course_lib.models import load

    torch.set_num_threads(1)
    errors, misses, count = [], [], 0
    for name, (micro_batch, seq_len) in SIZES.items():
        base, _ = load(name)
        tools = others(base) if with_others else {}
        note = ": DeepSpeed's for ZeRO-3 on one GPU" if tools else ""
        print(f"{name}, {micro_batch} x {seq_len} tokens; MiB at the peak{note}")
        titles = [*tools, "MemTracker"] if tools else []  # the last one runs the step, the others know weights alone
        print(f"  {'':39}{'measured':>10}{'predicted':>11}{'error':>8}  at rest{''.join(f'{t:>14}' for t in titles)}")
        for chosen in cases(name):
            if with_others and (chosen["optimizer"] != "adamw" or chosen["precision"] in ("fp16-mixed", "bf16")):
                continue
            case = Case(name, base, chosen)
            seen = case.measured()
            told = estimate(shape_of(base), micro_batch_size=micro_batch, seq_len=seq_len, device="cpu", **chosen)
            rest = {"parameters": told.weights, "gradients": told.gradients, "optimizer_state": told.optimizer}
            wrong = {what: size - seen[what] for what, size in rest.items() if size != seen[what]}
            error = told.peak / seen["peak"] - 1
            label = "{method:5} {precision:10} {activation_checkpointing:9} {optimizer:9}".format(**chosen)
            answers = [answer(chosen["precision"]) for answer in tools.values()]
            answers += [case.mem_tracker()] if tools else []
            print(f"  {label:39}{seen['peak'] / MIB:10.1f}{told.peak / MIB:11.1f}{error:8.1%}  {'exact' if not wrong else 'MISSED':7}"
                  + "".join(f"{answer:>14}" for answer in answers), flush=True)  # fmt: skip
            errors.append(abs(error))
            count += 1
            if wrong or abs(error) > PEAK:
                misses.append(f"{name} {label}: peak {error:+.1%}, bytes at rest {wrong or 'exact'}")
            del case
            gc.collect()
    spread = f"median {statistics.median(errors):.2%}, worst {max(errors):.2%}"
    print(f"{count} settings: error of the peak {spread}; {len(misses)} misses")
    for miss in misses:
        print(f"  {miss}")
    return {} if with_others else {f"bytes at rest exact and peak within {PEAK:.0%} in {count} settings": not misses}


def full_training(preset: str, dtype: Any, checkpointing: str) -> tuple[Any, Any]:
    """A Llama of that preset's widths, on the tensors that the context makes, and its optimizer."""
    import torch

    from course_lib.memory import PRESETS
    from course_lib.models import llama
    from course_lib.training.activation_checkpointing import set_checkpointing

    model = llama(PRESETS[preset], dtype=dtype)
    set_checkpointing(model, checkpointing)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def fake() -> dict[str, bool]:
    import torch

    from course_lib.memory import PRESETS, estimate
    from course_lib.observe.fake import MOMENTS, count_step, fake_tensors

    torch.set_num_threads(1)
    print("GiB at the peak of forward and backward pass, the optimizer's step apart")
    print(f"  {'':38}{'executed':>10}{'predicted':>11}{'error':>9}{'seconds':>9}")
    worst = 0.0
    for preset, precision, checkpointing, seq_len in (
        ("llama-3.1-8b", "bf16", "none", 2048), ("llama-3.1-8b", "bf16", "selective", 2048),
        ("llama-3.1-8b", "bf16", "full", 2048), ("llama-3.1-8b", "fp32", "full", 8192),
        ("llama-3.1-70b", "bf16", "full", 2048),
    ):  # fmt: skip
        shape = PRESETS[preset]
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        began = time.perf_counter()
        with fake_tensors():
            model, optimizer = full_training(preset, dtype, checkpointing)
            counted = count_step(model, optimizer, torch.zeros(1, seq_len, dtype=torch.long), model.model.layers[0])
        executed = max(counted.moments[moment] for moment in MOMENTS[:3])
        seconds = time.perf_counter() - began
        told = estimate(shape, precision=precision, activation_checkpointing=checkpointing, seq_len=seq_len).phases
        peak = max(size for moment, size in told.items() if moment != "optimizer step")
        worst = max(worst, abs(peak / executed - 1))
        label = f"{preset:14} {precision:5} {checkpointing:10} {seq_len}"
        print(
            f"  {label:38}{executed / GIB:10.3f}{peak / GIB:11.3f}{peak / executed - 1:9.4%}{seconds:9.1f}",
            flush=True,
        )
    return {f"fake tensors within {PEAK:.0%} (worst {worst:.4%})": worst <= PEAK}


def waste() -> dict[str, bool]:
    import torch

    from course_lib.memory.allocator import replay, smallest_limit
    from course_lib.memory.breakdown import LEAST_WASTE
    from course_lib.observe.fake import LiveStorages, fake_tensors

    def three_steps(
        preset: str, dtype: torch.dtype, checkpointing: str, micro_batch: int, seq_len: int
    ) -> LiveStorages:
        with fake_tensors():
            model, optimizer = full_training(preset, dtype, checkpointing)
            with LiveStorages() as live:
                live.hold([*model.parameters(), *model.buffers()])
                for _ in range(3):
                    batch = torch.zeros(micro_batch, seq_len, dtype=torch.long)
                    model(input_ids=batch, labels=batch).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return live

    torch.set_num_threads(1)
    runs = [("tiny", "float32", 4, 128), ("smollm2-135m", "float32", 2, 512), ("smollm2-135m", "float32", 8, 1024),
            ("llama-3.2-1b", "bfloat16", 1, 2048), ("llama-3.2-1b", "bfloat16", 4, 1024), ("llama-3.1-8b", "bfloat16", 1, 2048),
            ("llama-3.1-8b", "bfloat16", 4, 1000)]  # fmt: skip
    print("  three steps from the first one on, replayed; GiB requested at the peak, and what goes beyond it:")
    print("  reserved on a card with room, and on the smallest card that sees it through")
    beyond: list[tuple[float, ...]] = []
    for (preset, dtype, micro_batch, seq_len), checkpointing in product(runs, ("none", "full")):
        live = three_steps(preset, getattr(torch, dtype), checkpointing, micro_batch, seq_len)
        events, requested = [event[1:] for event in live.log], live.highest
        row = tuple(size / requested - 1 for size in (replay(events).reserved_peak, smallest_limit(events)))
        label = f"{preset:13} {dtype:9} {checkpointing:5} {micro_batch} x {seq_len}"
        note = "   segments of 2 and 20 MiB are much to it: not in the fit" if preset == "tiny" else ""
        print(f"  {label:38}{requested / GIB:9.3f}" + "".join(f"{share:9.1%}" for share in row) + note, flush=True)
        if preset != "tiny":
            beyond.append(row)
    for name, shares in zip(("with room", "smallest card"), zip(*beyond, strict=True), strict=True):
        print(f"  {name:14} median {statistics.median(shares):6.1%}, {min(shares):.1%} to {max(shares):.1%}")
    tight = [row[1] for row in beyond]
    print(f"  LEAST_WASTE is {LEAST_WASTE:.1%}")
    quartiles = statistics.quantiles(tight, n=4)
    return {"LEAST_WASTE within the middle half of the replays": quartiles[0] <= LEAST_WASTE <= quartiles[2]}


class Peak(NamedTuple):
    """A published run: its row, bytes that are predicted for what was measured, and the error; for one that did not fit 0."""

    row: dict[str, Any]
    predicted: int
    error: float


def peaks() -> list[Peak]:
    """The rows of PUBLISHED whose settings are printed and which `estimate` knows all of, each with its prediction."""
    from course_lib.memory import estimate

    found = []
    for row in json.loads(PUBLISHED.read_text(encoding="utf-8")):
        if row["left_out"]:
            continue
        need, room = estimate(row["model"], **row["settings"]), int(row["card_gib"] * GIB)
        if row["peak_gib"] is None:
            found.append(Peak(row, need.device, 0.0))
            continue
        predicted = need.peak if row["kind"] == "allocated" else need.reserved_on(room)
        found.append(Peak(row, predicted, predicted / (row["peak_gib"] * GIB) - 1))
    return found


def said_to_fit(peak: Peak) -> bool:
    """Whether `beyond memory` would say so: enough on the card, enough on the host where that is printed, nothing uncounted."""
    from course_lib.memory import host_memory, shape_of
    from course_lib.memory.estimate import uncounted
    from course_lib.memory.settings import RunSettings

    row, shape, settings = peak.row, shape_of(peak.row["model"]), RunSettings(**peak.row["settings"])
    if peak.predicted > row["card_gib"] * GIB or uncounted(shape, settings):
        return False
    return not row["host_gib"] or host_memory(shape, settings, row["gpus"]).peak <= row["host_gib"] * GIB


def fitted_waste() -> float:
    """The median, over published runs that are not held out, of what was reserved beyond the predicted peak."""
    from course_lib.memory import estimate

    rows = [peak.row for peak in peaks() if not peak.row["held_out"] and peak.row["kind"] == "reserved"]
    rows = [row for row in rows if row["peak_gib"]]
    return statistics.median(row["peak_gib"] * GIB / estimate(row["model"], **row["settings"]).peak - 1 for row in rows)


def published() -> dict[str, bool]:
    from course_lib.memory.breakdown import EXPECTED_WASTE

    goals: dict[str, bool] = {}
    print(f"  reserved beyond the peak, fitted: {fitted_waste():.3f}; EXPECTED_WASTE is {EXPECTED_WASTE}")
    for held_out, name in ((False, "looked at while the model was made"), (True, "held out")):
        rows = [peak for peak in peaks() if peak.row["held_out"] is held_out and peak.row["peak_gib"]]
        print(f"  {name}: {'printed':>28}{'predicted':>11}{'error':>8}")
        for row, predicted, error in sorted(rows, key=lambda peak: peak.row["group"]):
            print(f"    {row['group']:9} {row['id']:32}{row['peak_gib']:9.1f}{predicted / GIB:11.1f}{error:8.1%}")
        errors = sorted(abs(peak.error) for peak in rows)
        nine = errors[int(0.9 * (len(errors) - 1))]
        print(f"    {len(rows)} rows: median error {statistics.median(errors):.1%}, nine of ten within {nine:.1%}")
        for group in sorted({peak.row["group"] for peak in rows}):
            signed = [peak.error for peak in rows if peak.row["group"] == group]
            print(f"    {group:9} {len(signed):3} rows, median {statistics.median(signed):+.1%}")
        if held_out:
            goals["held out: median error at most 8 %"] = statistics.median(errors) <= 0.08
    refused = [peak for peak in peaks() if peak.row["peak_gib"] is None]
    wrong = [peak.row["id"] for peak in refused if said_to_fit(peak)]
    print(f"  {len(refused)} runs that did not fit; said to fit: {', '.join(wrong) or 'none'}")
    return goals | {"no run is said to fit that did not": not wrong}


PARTS = {
    "seconds of an estimate": speed,
    "predicted and measured": lambda: measured(with_others=False),
    "beside other tools": lambda: measured(with_others=True),
    "executed on fake tensors": fake,
    "what the caching allocator adds": waste,
    "published peaks": published,
}


def main() -> int:
    import logging

    import torch

    logging.disable(logging.WARNING)  # of DeepSpeed's import, which looks for a GPU
    warnings.filterwarnings("ignore", "global module forward hook", UserWarning)  # MemTracker's, where it fails
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, tensors on the CPU")
    wanted = [int(number) for number in sys.argv[1:]] or range(1, len(PARTS) + 1)
    goals: dict[str, bool] = {}
    for number in wanted:
        title, part = list(PARTS.items())[number - 1]
        print(f"\n{number}. {title}")
        goals |= part()
    print()
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
