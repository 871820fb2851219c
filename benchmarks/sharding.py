"""ZeRO and FSDP2 on real ranks: bytes against their prediction, seconds against other launchers.

1. Bytes at rest on each rank of 2, 3 and 4: ZeRO's stages 1 to 3, offloading, FSDP2, measured and predicted.
2. Seconds a step and of starting: the course's ZeRO program by `launch` and torchrun against DeepSpeed's own launcher. Runs
   alternate, so that a noisy minute hits all of them.
3. The peak of a step against `estimate`.

    python benchmarks/sharding.py [--part N ...] [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_lib.launch import launch, rank_device
from course_lib.launch.commands import shell
from course_lib.memory import estimate, shape_of
from course_lib.memory.sharded import HELD, resident_bytes
from course_lib.memory.units import units_of
from course_lib.models import tiny_llama
from course_lib.observe import observe
from course_lib.training.methods import prepare
from course_lib.training.outcome import outcome


def adapters(method: str) -> Any:
    return prepare(tiny_llama(), method=method).get_base_model()  # PEFT's layers without its wrapper


MIB, LIMIT, PEAK = 2**20, 0.01, 0.05
BUCKET = 1_000_000  # elements; DeepSpeed's own 500 million are 2 GB on every rank
BUFFERS = 128  # bytes of the tiny model's rotary frequencies, whole on every rank
STEPS = 20

# name -> (program, its settings or those of `deepspeed_config`, what `resident_bytes` is told, ranks that it needs or 0)
ZERO = {f"ZeRO-{stage}": ("zero", {"stage": stage}, {"strategy": f"zero{stage}"}, 0) for stage in (1, 2, 3)}
ZERO |= {
    f"ZeRO-{stage}, optimizer offloaded": (
        "zero", {"stage": stage, "offload": "optimizer"}, {"strategy": f"zero{stage}", "offload": "optimizer"}, 0,
    )
    for stage in (1, 2, 3)
}  # fmt: skip
ZERO["ZeRO-3, all offloaded"] = (
    "zero", {"stage": 3, "offload": "all"}, {"strategy": "zero3", "offload": "all"}, 0)  # fmt: skip
ZERO |= {
    f"ZeRO-{stage}, bf16": (
        "zero", {"stage": stage, "bf16": {"enabled": True}}, {"strategy": f"zero{stage}", "precision": "bf16"}, 0,
    )
    for stage in (2, 3)
}  # fmt: skip
FSDP = {
    "FSDP2": ("fsdp", {}, {}, 0),
    "FSDP2, hybrid 2x2": ("hybrid", {}, {"shard_ranks": 2}, 4),
    "FSDP2, bf16-mixed": ("fsdp", {"bf16": True}, {"precision": "bf16-mixed"}, 0),
    "FSDP2, LoRA": ("fsdp", {"build": partial(adapters, method="lora")}, {}, 0),
    "FSDP2, QLoRA": ("fsdp", {"build": partial(adapters, method="qlora")}, {}, 0),
}
DDP = {"DDP": ("ddp", {}, {"strategy": "ddp"}, 0)}


def deepspeed_config(stage: int, *, global_batch: int = 8, offload: str = "none", **top: Any) -> dict[str, Any]:
    """DeepSpeed's configuration with the benchmark's bucket; `top` goes to its top level."""
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    # stage 3 treats the small model as a large one: no prefetching, no reuse, nothing too small to shard
    section |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    section |= {"stage3_param_persistence_threshold": 0}
    if offload != "none":
        section["offload_optimizer"] = {"device": "cpu"}
        top["zero_force_ds_cpu_optimizer"] = False
    if offload == "all":
        section["offload_param"] = {"device": "cpu"}
    return {"train_batch_size": global_batch, "gradient_clipping": 0.0, "zero_optimization": section} | top


def hybrid(*, steps: int, seq_len: int, global_batch: int) -> Any:
    """Train as `course_lib.training.fsdp` does, with two copies of the shards."""
    device, ranks = rank_device(), torch.distributed.get_world_size()
    mesh = init_device_mesh(device.type, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    model, ids = tiny_llama().to(device), torch.zeros(global_batch // ranks, seq_len, dtype=torch.long, device=device)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = observe(model, optimizer)
    for _ in range(steps):
        with seen.step(tokens=ids.numel()):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return outcome(seen, [], type(model).__name__)


def train_of(program: str) -> Callable[..., Any]:
    return hybrid if program == "hybrid" else import_module(f"course_lib.training.{program}").train


def run_all(cases: dict[str, tuple], *, global_batch: int = 8, **sizes: Any) -> dict[str, Any]:
    """On a rank: every program after another."""
    torch.set_num_threads(1)
    found = {}
    for name, (program, settings, *_) in cases.items():
        if program == "zero":
            settings = {"config": deepspeed_config(global_batch=global_batch, **settings)}
        else:
            settings = {"global_batch": global_batch, **settings}
        found[name] = train_of(program)(**sizes, **settings)
        gc.collect()  # an engine is full of cycles
    return found


def resident() -> dict[str, bool]:
    print("MiB on rank 0, gradients present; the error is that of the rank and category that is furthest off")
    print(f"  {'':31}{'measured':>10}{'predicted':>11}{'padding':>9}{'rounding':>10}{'on host':>9}{'worst':>8}")
    worst, exact, count = 0.0, 0, 0
    for ranks in (2, 3, 4):
        cases = {name: case for name, case in (DDP | ZERO | FSDP).items() if case[3] in (0, ranks)}
        results = launch(
            run_all, cases, ranks=ranks, quiet=True, timeout=600, steps=2, seq_len=16, global_batch=ranks
        ).results
        print(f"{ranks} ranks")
        for name, (_, settings, how, _) in cases.items():
            units = units_of("tiny", method=settings["build"].keywords["method"] if "build" in settings else "full")
            errors, first = [], None
            for rank, outcomes in enumerate(results):
                outcome = outcomes[name]
                told = resident_bytes(
                    units, ranks=ranks, rank=rank, bucket_elements=BUCKET, buffers=BUFFERS, **({"strategy": "fsdp"} | how)
                )  # fmt: skip
                held = {
                    what: outcome.memory.get(what, 0) + outcome.extra.get("on_host", {}).get(what, 0) for what in HELD
                }
                held["buckets"] += outcome.memory.get("ddp_buckets", 0)
                errors += [abs(told[what] / size - 1) if size else float(told[what] > 0) for what, size in held.items()]
                first = first or (held, told)
            held, told = first
            sizes = (sum(held.values()), told["total"], told["padding"], told["rounding"], told["host"])
            print(f"  {name:31}{sizes[0] / MIB:10.3f}{sizes[1] / MIB:11.3f}{sizes[2] / MIB:9.3f}{sizes[3] / MIB:10.3f}"
                  f"{sizes[4] / MIB:9.3f}{'exact' if not max(errors) else f'{max(errors):.2%}':>8}", flush=True)  # fmt: skip
            worst, exact, count = max(worst, *errors), exact + (not max(errors)), count + 1
    return {
        f"bytes at rest within {LIMIT:.0%} in all {count} settings ({exact} to the byte, worst {worst:.2%})": worst
        <= LIMIT
    }


def by_launch(config: str) -> tuple[float, float]:
    """(seconds a step, seconds around the steps)."""
    run = launch(train_of("zero"), config, ranks=2, quiet=True, timeout=300, threads=1, steps=STEPS)
    step = run.results[0].median_step
    return step, run.seconds - STEPS * step


def by_command(command: str) -> tuple[float, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda" if torch.cuda.is_available() else "cpu"}
    output = shell(f"{command.format(port=port)} --steps {STEPS}", timeout=300, **settings)
    told = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert told["world_size"] == 2, f"{command}: {told['world_size']} ranks"
    return told["median_step"], time.perf_counter() - began - STEPS * told["median_step"]


def seconds(rounds: int) -> dict[str, bool]:
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name, "ds_config.json")
    file.write_text(json.dumps(deepspeed_config(2)))
    words = f"course_lib.training.zero --config {file}"
    racers: dict[str, Callable[[], tuple[float, float]]] = {
        "zero.train, launch": lambda: by_launch(str(file)),
        "zero.train, torchrun": lambda: by_command(f"torchrun --nproc_per_node 2 -m {words}"),
        "zero.train, deepspeed --num_gpus 2": lambda: by_command(
            f"deepspeed --num_gpus 2 --master_port {{port}} --module {words}"
        ),
    }
    goals = {}
    print(f"{rounds} rounds, {STEPS} steps each, 2 ranks; medians, (fastest to slowest); the last line is DeepSpeed's")
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in racers}
    for number in range(rounds):
        for name in list(racers)[:: 1 if number % 2 == 0 else -1]:  # nobody is always the first
            took[name].append(racers[name]())
    theirs = list(racers)[-1]
    for name, rows in took.items():
        steps, starts = ([row[i] for row in rows] for i in (0, 1))
        ratio = statistics.median(ours[0] / other[0] for ours, other in zip(rows, took[theirs], strict=True))
        spread = max(_spread([row[0] for row in took[who]]) for who in (name, theirs))
        print(f"  {name:36}{1e3 * statistics.median(steps):8.1f} ms a step ({1e3 * min(steps):.1f} to {1e3 * max(steps):.1f})"
              f"{statistics.median(starts):8.2f} s to start and end   step {ratio:.2f} times theirs", flush=True)  # fmt: skip
        if name != theirs:
            goals[f"{name} no slower a step than {theirs}: {ratio:.2f} times, noise {spread:.0%}"] = ratio <= 1 + spread
    return goals


def _spread(values: list[float]) -> float:
    """Half of the range over the median: what a round differs by when nothing has changed."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def peaks() -> dict[str, bool]:
    cases = {
        **{name: ZERO[name] for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3")},
        "FSDP2": FSDP["FSDP2"],
        "FSDP2, 2 micro-batches": ("fsdp", {"gradient_accumulation_steps": 2}),
        "ZeRO-1, 2 micro-batches": ("zero", {"stage": 1, "gradient_accumulation_steps": 2}),
        "ZeRO-2, 2 micro-batches": ("zero", {"stage": 2, "gradient_accumulation_steps": 2}),
        "ZeRO-3, 2 micro-batches": ("zero", {"stage": 3, "gradient_accumulation_steps": 2}),
    }
    found = launch(run_all, cases, ranks=2, quiet=True, timeout=300, steps=3).results[0]
    print(f"  {'peak of a step on 2 ranks, MiB':31}{'measured':>10}{'predicted':>11}{'error':>8}  at the moment")
    worst = 0.0
    for name, (program, settings, *_) in cases.items():
        micro_batches = settings.get("gradient_accumulation_steps", 1)
        told = estimate(
            shape_of("tiny"), strategy=f"zero{settings['stage']}" if program == "zero" else "fsdp", ranks=2, precision="fp32",
            micro_batch_size=4 // micro_batches, num_microbatches=micro_batches, seq_len=128, device="cpu", bucket_elements=BUCKET,
        )  # fmt: skip
        error = told.peak / found[name].memory["peak"] - 1
        worst = max(worst, abs(error))
        print(
            f"  {name:31}{found[name].memory['peak'] / MIB:10.2f}{told.peak / MIB:11.2f}{error:+8.1%}  {told.peak_phase}"
        )
    return {
        f"peak of a step within {PEAK:.0%} of estimate's in {len(cases)} settings (worst {worst:.1%})": worst <= PEAK
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, nargs="*", default=[], help="numbers of the parts to run; all without it")
    parser.add_argument("--rounds", type=int, default=3, help="of part 2")
    asked = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, bool]]] = {
        "bytes at rest": resident,
        "seconds": lambda: seconds(asked.rounds),
        "peak of a step": peaks,
    }
    wanted = asked.part or list(range(1, len(parts) + 1))
    if asked.rounds < 1 or not all(1 <= number <= len(parts) for number in wanted):
        parser.error(f"parts are 1 to {len(parts)}, rounds at least 1.")
    logging.disable(logging.WARNING)  # of DeepSpeed's import, which looks for a GPU
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs, tiny Llama where nothing else is said"
    )
    goals: dict[str, bool] = {}
    for number in wanted:
        title, part = list(parts.items())[number - 1]
        began = time.perf_counter()
        print(f"\n{number}. {title}", flush=True)
        goals |= part()
        print(f"   ({time.perf_counter() - began:.0f} s)", flush=True)
    print()
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
