"""FSDP2 and tensor parallelism on one rank beside neither, a trace of a step of each, FP8 products, a planted hang's dump.

On one rank nothing is sent to anybody: what these cost beyond plain training is their own work.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.models import build_optimizer, llama
from benchmarks.gpu.running import ROOT, Part, Piece, Row, Skip
from benchmarks.gpu.speed import seconds_of
from course_lib.launch import launch, process_group, rank_device
from course_lib.memory import PRESETS
from course_lib.observe import observe

TOP = 8  # kernels that a row names
HANG_TIMEOUT, BLOCKED, CYCLES_A_SECOND = 8, 60, 2_000_000_000  # the watchdog ends it after some 16 seconds


def pieces(part: Part) -> Iterator[Piece]:
    for way in ("plain", "FSDP2", "tensor parallel"):
        yield f"one rank, {way}", lambda way=way: one_rank(part, way)
    yield "flight recorder", lambda: flight_recorder(part)
    yield "FP8", lambda: fp8(part)


def one_rank(part: Part, way: str) -> Iterable[Row]:
    sizes: dict[str, Any] = {"model": "llama-3.2-1b", "precision": "bf16", "shape": (4, 2048), "steps": 8}
    if part.small:
        sizes = {"model": "tiny", "precision": "fp32", "shape": (2, 32), "steps": 2}
    run = launch(on_rank, way, ranks=1, quiet=True, timeout=part.seconds_left, **sizes)
    values, trace = run.results[0]
    kept = part.folder / f"trace_{way.replace(' ', '_')}.json.gz"
    part.folder.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(trace)
    yield "one rank", way, values | {"collectives": len(run.collectives), "sizes": sizes}


def on_rank(
    way: str, *, model: str, precision: str, shape: tuple[int, int], steps: int
) -> tuple[dict[str, Any], bytes]:
    """(what a step takes, the profiler's trace of one)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.profiler import profile

    from course_lib.training.fsdp import shard
    from course_lib.training.tensor_parallel import split

    device = rank_device()
    net = llama(model, device=device, precision=precision)
    if way == "FSDP2":
        net = shard(net)
    elif way == "tensor parallel":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        split(net.model.layers, mesh)
    optimizer = build_optimizer(net, "adamw")
    ids = torch.randint(0, PRESETS[model].vocab, shape, device=device)

    def step() -> None:
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seen = observe(net, optimizer)
    for _ in range(steps + 1):
        with seen.step(tokens=ids.numel()):
            step()
    with profile() as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    column = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
    # on a GPU its kernels, not the operations that hold them
    kind = getattr(torch.autograd.DeviceType, device.type.upper())
    events = [event for event in profiler.key_averages() if event.device_type == kind and not event.is_user_annotation]
    slowest = sorted(events, key=lambda event: -getattr(event, column))[:TOP]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        return {
            "wrapper": type(net).__name__, "device": str(device), "tokens_per_second": seen.tokens_per_second,
            "median_step": seen.median_step, "memory": seen.memory,
            "slowest": {event.key[:90]: getattr(event, column) / 1e6 for event in slowest},
        }, path.read_bytes()  # fmt: skip


def fp8(part: Part) -> Iterable[Row]:
    """The product of a linear layer's forward pass in FP8 (e4m3), the casting of its input counted, beside bf16."""
    if part.on_gpu and torch.cuda.get_device_capability() < (8, 9):
        raise Skip("FP8 products need compute capability 8.9 or later")
    tokens, products = (32, [(64, 32)]) if part.small else (8192, [(4096, 4096), (14336, 4096), (4096, 14336)])

    def cast(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
        return (tensor / scale).to(torch.float8_e4m3fn), scale

    quickly = cast if part.small or shutil.which("cc") is None else torch.compile(cast)
    for rows, columns in products:
        x, weight = (torch.randn(n, columns, device=part.device, dtype=torch.bfloat16) for n in (tokens, rows))
        weight8, weight_scale = cast(weight)

        def in_fp8(
            x: torch.Tensor = x, weight8: torch.Tensor = weight8, weight_scale: Any = weight_scale
        ) -> torch.Tensor:
            x8, scale = quickly(x)
            return torch._scaled_mm(
                x8, weight8.t(), scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        exact, flops = x @ weight.t(), 2 * tokens * rows * columns
        yield "FP8", f"{tokens}x{columns} by {rows}", {
            "bf16_tflops": flops / seconds_of(lambda x=x, weight=weight: x @ weight.t(), part) / 1e12,
            "fp8_tflops": flops / seconds_of(in_fp8, part) / 1e12,
            "relative_error": ((in_fp8() - exact).float().norm() / exact.float().norm()).item(),
        }  # fmt: skip


def flight_recorder(part: Part) -> Iterable[Row]:
    """NCCL's record of a collective that never starts, asked for while it hangs and written by PyTorch's watchdog."""
    if not part.on_gpu:
        raise Skip("a hang on NCCL needs a GPU")
    with tempfile.TemporaryDirectory() as folder:
        dumps = {"asked for": Path(folder, "asked"), "by the watchdog": Path(folder, "dump_0")}
        variables = {
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/dump_",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
        }
        command = [sys.executable, "-c", f"from benchmarks.gpu.sharded import hang; hang({str(dumps['asked for'])!r})"]
        with open(f"{folder}/said", "w+") as said:
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=said, stderr=said)
            try:
                code = process.wait(min(120.0, part.seconds_left))
            except subprocess.TimeoutExpired:  # then there is at least the dump that was asked for
                process.kill()
                code = process.wait()
        for name, file in dumps.items():
            if not file.is_file():
                why = f"no dump; {Path(folder, 'said').read_text()[-300:]}"
                yield "failed", f"flight recorder, {name}", {"why": why}
                continue
            entries = pickle.loads(file.read_bytes())["entries"]
            states = Counter(f"{entry['profiling_name']} {entry['state']}" for entry in entries)
            yield "flight recorder", name, {"states": states, "last": entries[-1]["state"], "exit_code": code}


def hang(path: str) -> None:
    """Run in a process of its own, since the watchdog ends it: a long kernel lies before a collective, which never starts."""
    with process_group("nccl", timeout=HANG_TIMEOUT):
        ones = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(ones)  # makes the communicator
        torch.cuda.synchronize()
        torch.cuda._sleep(BLOCKED * CYCLES_A_SECOND)
        dist.all_reduce(ones, async_op=True)
        time.sleep(2)
        Path(path).write_bytes(torch._C._distributed_c10d._dump_nccl_trace())
        time.sleep(BLOCKED)
