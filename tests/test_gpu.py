"""What only a GPU can show of the library; `make gpu` runs these. Without a GPU they are skipped."""

from __future__ import annotations

import importlib
import os
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch, rank_device
from course_lib.launch.emulation.memory_limit import memory_limit
from course_lib.models import tiny_llama
from course_lib.observe import MemoryProbe
from course_lib.observe.trace import trace_step
from course_lib.training import methods, single
from course_lib.units import MIB

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")]
CLOSE = 1e-3  # losses in fp32, summed in another order by other kernels


def what_a_rank_sees() -> tuple[str, float, str]:
    ones = torch.ones(1 << 20, device=rank_device())
    dist.all_reduce(ones)
    return str(ones.device), ones[0].item(), os.environ.get("CUDA_VISIBLE_DEVICES", "unset")


def test_a_rank_has_its_gpu_though_this_process_has_used_cuda():
    torch.zeros(1, device="cuda")  # a process that has used CUDA must not be forked
    run = launch(what_a_rank_sees, ranks=1, quiet=True)
    assert run.stamp["backend"] == "nccl" and run.results[0][:2] == ("cuda:0", 1.0)
    (call,) = [one for one in run.collectives if one.kind == "all_reduce"]
    assert call.bytes == 4 << 20 and call.seconds > 0 and run.memory[0]["peak"] >= 4 << 20


def test_ranks_beyond_the_gpus_run_on_the_cpu_and_see_none():
    ranks = torch.cuda.device_count() + 1
    run = launch(what_a_rank_sees, ranks=ranks, quiet=True)
    assert run.stamp["backend"] == "gloo" and set(run.results) == {("cpu", float(ranks), "")}


def test_a_tensor_comes_back_from_a_rank():
    back = launch(lambda: torch.arange(4, device=rank_device()), ranks=1, quiet=True).results[0]
    assert back.is_cuda and back.tolist() == [0, 1, 2, 3]


def test_the_caching_allocator_keeps_the_limit():
    with memory_limit(256 * MIB), pytest.raises(torch.OutOfMemoryError):
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.empty(512 * MIB, dtype=torch.uint8, device="cuda").is_cuda


def trained(device: str, precision: str = "fp32", method: str = "full", steps: int = 5, **how) -> list[float]:
    model = methods.prepare(tiny_llama(), method=method, precision=precision, device=device, **how)
    optimizer = torch.optim.AdamW(methods.trainable(model), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16-mixed")
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    losses = []
    for _ in range(steps):
        with methods.autocast(precision, device):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_are_the_cpus():
    assert trained("cuda") == pytest.approx(trained("cpu"), rel=CLOSE)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16"])
@pytest.mark.parametrize("kept", ["none", "selective", "full"])
def test_sixteen_bits_train(precision, kept):
    losses = trained("cuda", precision, activation_checkpointing=kept, steps=8)
    assert losses[-1] < losses[0] and losses[0] == pytest.approx(trained("cpu", steps=1)[0], rel=0.02)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_train(method):
    pytest.importorskip("peft")
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    losses = trained("cuda", "bf16-mixed", method, steps=12)
    assert losses[-1] < losses[0]


def test_the_probe_and_a_trace_see_what_the_gpu_does():
    model = methods.prepare(tiny_llama(), precision="fp32", device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, 256, (4, 64), device="cuda")

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    probe = MemoryProbe(model, optimizer)
    with probe.measure():
        step()
    assert probe.bytes["peak"] == torch.cuda.max_memory_allocated()
    assert probe.bytes["peak"] > probe.bytes["parameters"] + probe.bytes["optimizer_state"]
    assert probe.bytes["activations"] > 0
    spans = trace_step(step)
    assert {"forward", "backward", "optimizer"} <= {span.kind for span in spans if span.thread < 0}


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        ("tensor.tensor_parallel", {}),
        ("tensor.tensor_parallel", {"implementation": "dtensor"}),
    ],
)
def test_a_program_on_one_gpu_has_the_losses_of_none(program, settings):
    train = importlib.import_module(f"course_lib.training.{program}").train
    outcome = launch(train, ranks=1, quiet=True, timeout=150, steps=4, **settings).results[0]
    assert outcome.losses == pytest.approx(single.train(steps=4).losses, rel=CLOSE)
    assert outcome.memory["peak_reserved"] >= outcome.memory["peak"] > 0
