"""Which slice of parameters, gradients and optimizer state each rank holds under DDP, FSDP2 and ZeRO."""

import sys

import cloudpickle

from course_lib.figures.sharding import HELD
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.observe.held_elements import held_slices

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest


def hold_both():
    """On a rank: what it holds under DDP, under FSDP2, and under each of ZeRO's stages where DeepSpeed is installed."""
    import importlib.util

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.training.sharded.fsdp_sharding import shard

    torch.set_num_threads(1)
    ids = torch.zeros(1, 4, dtype=torch.long)
    found = {}
    for name, wrap in (("DDP", DistributedDataParallel), ("FSDP2", shard)):
        model = wrap(tiny_llama(layers=1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            found[name] = held_slices(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    stages = (2, 3) if importlib.util.find_spec("deepspeed") else ()
    for stage in stages:
        from course_lib.training.sharded.zero_config import zero_config
        from course_lib.training.sharded.zero_engine import initialize

        ranks = dist.get_world_size()
        config = zero_config(stage, ranks=ranks, global_batch=ranks, bucket_elements=10**6)
        engine = initialize(tiny_llama(layers=1), config)
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            found[f"ZeRO-{stage}"] = held_slices(engine)
            engine.step()
    return found


def covered(slices):
    return sum(end - first for first, end in slices)


def test_ranks_hold_the_slices_that_their_method_says(private_tmp):
    found = launch(hold_both, ranks=2, quiet=True, timeout=200).results
    holding = {name: [found[rank][name] for rank in (0, 1)] for name in found[0]}
    whole = sum(p.numel() for p in tiny_llama(layers=1).parameters())
    for rank in (0, 1):
        assert holding["DDP"][rank] == {"elements": whole} | {kind: [(0, whole)] for kind in HELD}
    for name in set(holding) - {"DDP"}:
        for kind in HELD:
            first, second = (holding[name][rank][kind] for rank in (0, 1))
            if (name, kind) == ("ZeRO-2", "parameters"):
                assert first == second == [(0, whole)]
                continue
            assert covered(first) + covered(second) == whole, f"{name}: {kind}"
            assert not set(first) & set(second) and len(first) > 1 or name == "ZeRO-2"
            assert abs(covered(first) - whole / 2) < 0.01 * whole
