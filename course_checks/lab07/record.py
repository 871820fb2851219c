"""Makes the recordings of lab 7, by real runs: ``python -m course_checks.lab07.record losses`` (or beats, witnesses).

What a check compares an answer with must be the same on every machine, so these runs were made once; each file carries
the stamp of the machine that made it.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
STEPS = 300
# run -> what happens to it: {step: what}; every one is real training, disturbed on purpose
DISTURBED: dict[str, dict[str, Any]] = {
    "healthy": {},
    "noisy": {"batch": 4},
    "bad batches": {"garbage": [150, 153, 280]},
    "learning rate": {"lr": {200: 60.0, 201: 60.0}},
    "drift": {"mix": 0.5},
    "nan": {"nan": 220, "garbage": [100]},
}


def stamp() -> dict[str, Any]:
    import torch

    return {
        "made": datetime.date.today().isoformat(),
        "device": f"CPU, {platform.machine()}",
        "torch": torch.__version__,
        "by": "python -m course_checks.lab07.record",
    }


def one_run(
    seed: int, *, batch: int = 16, seq_len: int = 48, garbage: Any = (), lr: Any = None, mix: float = 0, nan: int = -1
) -> list[float]:
    """Losses of a tiny Llama, with what is asked for done to it."""
    import torch

    from course_lib.models import tiny_llama
    from course_lib.models.data import sample_batch

    torch.manual_seed(seed)
    model = tiny_llama(layers=1, hidden=64, intermediate=128, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for step in range(STEPS):
        rate = 4e-3 * min(1, (step + 1) / 30) * (lr or {}).get(step, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = sample_batch(step, global_batch=batch, seq_len=seq_len, seed=seed)
        noise = torch.randint(256, ids.shape)
        if step in garbage:
            ids = noise
        if mix and step > 60:  # a growing part of each text is garbage: the loss drifts up, and nothing is a spike
            ids = torch.where(torch.rand(ids.shape) < mix * (step - 60) / STEPS, noise, ids)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if step == nan:
            next(model.parameters()).grad.fill_(math.nan)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    return losses


def losses() -> dict[str, Any]:
    """Losses of each disturbed run; "nan" stands as null in the file."""
    runs = {}
    for seed, (name, what) in enumerate(DISTURBED.items()):
        told = one_run(seed, **what)
        runs[name] = [None if math.isnan(x) else x for x in told]
    return {"stamp": stamp(), "runs": runs}


def beats() -> dict[str, Any]:
    """Beats of three real ranks, as a watchdog on the same machine received them."""
    runs = []
    for shows, hang in (
        ("a recorded run of three ranks with a slow step of rank 2 and a save of rank 0", False),
        ("a recorded run of three ranks, in which rank 1 stops working for ever", True),
    ):
        told, until = _beaten(hang)
        culprits = {1: max(b[1] for b in told if b[0] == 1)} if hang else {}
        runs.append(
            {"shows": shows, "beats": told, "until": until, "culprits": culprits, "every": 1.0, "save_limit": 10.0}
        )
    return {"stamp": stamp(), "runs": runs}


def _beaten(hang: bool) -> tuple[list[Any], float]:
    import tempfile
    import threading
    import time

    from course_lib.launch import RanksHung, launch

    with tempfile.TemporaryDirectory() as folder:
        told: list[Any] = []
        began, over = time.time(), threading.Event()

        def receive() -> None:
            seen = [0, 0, 0]
            while not over.wait(0.02):
                for rank in range(3):
                    path = Path(folder, str(rank))
                    lines = path.read_text().splitlines() if path.exists() else []
                    now = round(time.time() - began, 3)
                    told.extend([rank, now, *json.loads(line)] for line in lines[seen[rank] :])
                    seen[rank] = len(lines)

        receiver = threading.Thread(target=receive)
        receiver.start()
        try:
            launch(
                _beating,
                folder,
                began,
                hang,
                ranks=3,
                timeout=30.0 if hang else 90.0,
                backend="gloo",
                threads=1,
                quiet=True,
            )
        except RanksHung:
            assert hang
        finally:
            over.set()
            receiver.join()
    first = told[0][1]
    moved = [
        [rank, round(received - first, 3), round(sent - first, 3), step, phase]
        for rank, received, sent, step, phase in told
    ]
    return moved, round(moved[-1][1] + (12.0 if hang else 1.0), 3)


def _beating(folder: str, began: float, hang: bool) -> None:
    """A rank that trains and beats from a hook in its layers."""
    import time

    import torch
    import torch.distributed as dist

    from course_lib.models import tiny_llama

    rank, model, last = dist.get_rank(), tiny_llama(layers=2, hidden=32), 0.0
    step = 0

    def beat(phase: str, *, now: bool = True) -> None:
        nonlocal last
        if now or time.time() - last >= 1.0:
            last = time.time()
            with open(f"{folder}/{rank}", "a") as file:
                file.write(json.dumps([round(last - began, 3), step, phase]) + "\n")

    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: beat("working", now=False))
    for step in range(1, 7):
        beat("working")
        until = time.time() + (6.0 if step == 3 and rank == 2 else 1.5)
        while time.time() < until:  # micro-batches
            model(input_ids=torch.randint(256, (2, 32))).logits.sum().backward()
            if hang and step == 5 and rank == 1:
                time.sleep(1000)
        beat("waiting")
        for p in model.parameters():
            dist.all_reduce(p.grad)
        if step == 4 and rank == 0:
            beat("saving")
            for _ in range(400):
                torch.save(model.state_dict(), f"{folder}/checkpoint")
                time.sleep(0.01)
    beat("done")


WITNESSED = {
    "ddp": ("a run without any overlay, on 2 ranks", ["ddp.yml"], 2),
    "fsdp2": ("a run with fsdp2.yml, on 2 ranks", ["fsdp2.yml"], 2),
    "zero1": ("a run with zero1.yml", ["zero1.yml"], 2),
    "zero2": ("a run with zero2.yml", ["zero2.yml"], 2),
    "zero3": ("a run with zero3.yml", ["zero3.yml"], 2),
    "lora": ("a LoRA run on 2 ranks (few parameters are trained)", ["lora.yml"], 2),
    "tensor_parallel": ("a run with tensor_parallel_size: 2", ["tensor_parallel.yml"], 2),
    "fsdp2_3": ("a run with fsdp2.yml on 3 ranks (rows do not divide by 3)", ["fsdp2.yml"], 3),
    "alone": ("a run on one rank", [], 1),
    "typo": ("a run in whose YAML fsdp_config is misspelt as fsdp_confg, exit code 0", ["fsdp2.yml"], 2),
}


def witnesses() -> dict[str, Any]:
    """What each rank held in Axolotl runs by the lesson's own YAMLs. Several minutes."""
    import os
    import tempfile

    from course_tools.axolotl import make_inputs, merged, train, warm_axolotl

    warm_axolotl()

    lessons = FOLDER.parents[1] / "lessons"
    kept = (
        "wrapper",
        "world_size",
        "zero_stage",
        "param_class",
        "placements",
        "local_elements",
        "total_elements",
        "trainable_elements",
        "optimizer_elements",
        "rank",
    )
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(lessons / "07_axolotl", f"{folder}/07_axolotl")
        os.chdir(folder)
        make_inputs("runs/axolotl", layers=2, hidden=64)
        for name, (about, overlays, ranks) in WITNESSED.items():
            config = merged(*(f"07_axolotl/{layer}" for layer in ("base.yml", *overlays)), max_steps=2)
            if name == "typo":
                config["fsdp_confg"] = config.pop("fsdp_config")
            held = train(config, ranks=ranks).witness
            runs[name] = {"about": about, "witness": [{key: one[key] for key in kept} for one in held]}
    return {"stamp": stamp(), "runs": runs}


def main(arguments: list[str]) -> int:
    for name in arguments:
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(globals()[name](), separators=(",", ":")) + "\n", encoding="utf-8")
        print(path, path.stat().st_size, "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
