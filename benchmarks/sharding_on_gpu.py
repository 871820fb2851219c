"""Part 5 of `benchmarks/sharding.py`: full, LoRA and QLoRA training under FSDP2 with shapes of 1 and 8 billion parameters.

Weights are drawn at random: speed and memory do not ask what a model has learned.
"""

from __future__ import annotations

import json
from typing import Any

from course_lib.units import MIB


def on_gpu(shape: Any, method: str, steps: int, seq_len: int, micro_batch: int) -> dict[str, Any]:
    """On a rank: weights drawn at random in a model of that shape, sharded by FSDP2, trained for some steps."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from course_lib.observe import observe
    from course_lib.training.finetune.building import best_precision, build_optimizer, dtypes, prepare, trainable
    from course_lib.training.sharded.fsdp_sharding import proof, shard

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    precision = best_precision(device)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, tie_word_embeddings=shape.tied, use_cache=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if method != "full" and precision.startswith("bf16") else before)
    try:
        with device:
            net = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    kinds = dtypes(method, precision)
    net = prepare(
        net, method=method, precision=precision, activation_checkpointing="full", device=device, storage=kinds.weights
    )
    net = shard(net, precision=precision)
    optimizer = build_optimizer(trainable(net), "adamw", 1e-4)
    told = proof(net, dist.get_world_size())
    seen = observe(net, optimizer)
    ids = torch.randint(0, shape.vocab, (micro_batch, seq_len), device=device)
    for _ in range(steps):
        with seen.step(tokens=ids.numel()):
            net(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"precision": precision, "tokens_per_second": seen.tokens_per_second, "median_step": seen.median_step,
            "memory": seen.memory, "parameters": told["parameters"], "wrapper": type(net).__name__}  # fmt: skip


def recorded(path: str) -> dict[str, bool]:
    import torch

    if not torch.cuda.is_available():
        print("  no GPU here: nothing is measured, and nothing is written")
        return {}
    from course_lib.launch import RankFailed, launch
    from course_lib.memory import PRESETS, estimate
    from course_lib.notebook.ledger import stamp

    gpus, rows = torch.cuda.device_count(), []
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        for method in ("full", "lora", "qlora"):
            sizes = {"steps": 8, "seq_len": 2048, "micro_batch": 1}
            row: dict[str, Any] = {"shape": name, "method": method, "gpus": gpus, **sizes}
            try:
                results = launch(on_gpu, PRESETS[name], method, ranks=gpus, quiet=True, timeout=600, **sizes).results
            except RankFailed as error:
                row["failed"] = str(error).splitlines()[0]
                print(f"  {name:14} {method:6} {row['failed']}", flush=True)
            else:
                row |= results[0] | {"tokens_per_second": sum(result["tokens_per_second"] for result in results)}
                told = estimate(name, method=method, precision=row["precision"], strategy="fsdp", ranks=gpus, activation_checkpointing="full",
                                seq_len=2048)  # fmt: skip
                row["predicted_peak"] = told.peak
                print(f"  {name:14} {method:6}{row['tokens_per_second']:10,.0f} tokens/s  peak {row['memory']['peak'] / MIB:10,.0f} MiB"
                      f"  predicted {told.peak / MIB:10,.0f}", flush=True)  # fmt: skip
            rows.append(row)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(
            {"stamp": stamp() | {"device": torch.cuda.get_device_name(), "gpus": gpus}, "rows": rows}, file, indent=1
        )
    print(f"  written to {path}")
    return {f"tokens/s and peak of {len(rows)} trainings recorded": all("failed" not in row for row in rows)}
