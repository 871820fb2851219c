"""What the site's page of combinations marks "runs" trains on CPU ranks here, with the losses of one rank."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from parity import TOLERANCE, off_by
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from classroom.authoring import combinations
from course_lib.choices import STRATEGIES
from course_lib.launch import launch
from course_lib.memory import estimate
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.on_cpu.deepspeed import assert_sharded, prepare_deepspeed
from course_lib.training.methods import autocast, prepare, trainable
from course_lib.training.pipeline import LlamaStage, token_loss
from course_lib.training.tensor_parallel import split

if missing := [name for name in ("bitsandbytes", "deepspeed", "peft") if importlib.util.find_spec(name) is None]:
    pytest.skip(f"{missing[0]} is not installed", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

IN_16_BITS, BY_BLOCKS = 3e-3, 1e-3  # bf16 rounds to 4e-3; 8-bit moments and Muon's bf16 depend on where shards end


def train(how):
    """On a rank: the mean loss of each of three steps on the whole batch."""
    strategy, precision, tp, pp = (how[name] for name in ("strategy", "precision", "tp", "pp"))
    dp = dist.get_world_size() // pp // tp
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    step = (by_deepspeed if STRATEGIES[strategy].zero_stage else by_torch)(how, mesh)
    place = {} if strategy == "single" else {"rank": mesh.get_local_rank("dp"), "world_size": dp}
    losses = []
    for index in range(3):
        loss = step(sample_batch(index, global_batch=8, seq_len=16, **place))  # None before the last stage
        total = torch.zeros(2) if loss is None else torch.stack([loss.detach().float(), torch.ones(())])
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    return losses


def build(how, precision):
    kept = how["activation_checkpointing"]
    return prepare(tiny_llama(layers=2), method=how["method"], precision=precision, activation_checkpointing=kept)


def by_torch(how, mesh):
    """A step of tensor parallelism, then a stage, then DDP or FSDP2, each an `if`."""
    strategy, precision, pp = how["strategy"], how["precision"], how["pp"]
    half = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision) if strategy == "fsdp" else None
    cast = "fp32" if half else precision  # FSDP2 casts by its policy
    model = build(how, cast)
    llama = model if how["method"] == "full" else model.get_base_model()
    layers = llama.model.layers
    if how["tp"] > 1:
        (split if llama is model else split_adapters)(layers, mesh["tp"])
    if pp > 1:
        model = LlamaStage(llama, mesh.get_local_rank("pp"), pp)
        layers = model.layers
    if strategy == "ddp":  # torch 2.13 counts a pipeline's micro-batches as parameters when it rebuilds buckets
        model = DistributedDataParallel(model, device_mesh=mesh["dp"], find_unused_parameters=pp > 1)
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half and torch.float32)
        offload = CPUOffloadPolicy(pin_memory=False) if how["offload"] == "all" else OffloadPolicy()
        for unit in (*layers, model):
            fully_shard(unit, mesh=mesh["dp"], mp_policy=policy, offload_policy=offload)
    optimizer = build_optimizer(how["optimizer"], trainable(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=precision == "fp16-mixed")
    if pp > 1:
        stage = PipelineStage(model, mesh.get_local_rank("pp"), pp, torch.device("cpu"), group=mesh.get_group("pp"))
        pipeline = Schedule1F1B(stage, 2, loss_fn=lambda logits, tokens: token_loss(logits.float(), tokens))

    def step(batch):
        with autocast(cast, "cpu"):
            if pp == 1:
                loss = model(input_ids=batch, labels=batch).loss
                scaler.scale(loss).backward()
            elif stage.is_last:
                pipeline.step(target=batch, losses=(losses := []))
                loss = torch.stack(losses).mean()
            else:
                loss = pipeline.step(batch)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def split_adapters(blocks, mesh):
    """Beside a matrix cut by columns B is cut, too, beside one cut by rows A."""
    columns = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    plan = {f"{name}_proj.{part}": ColwiseParallel() for name in columns for part in ("base_layer", "lora_B.default")}
    for name in ("self_attn.o", "mlp.down"):
        plan |= {f"{name}_proj.{part}": RowwiseParallel() for part in ("base_layer", "lora_A.default")}
    for block in blocks:
        parallelize_module(block, mesh, plan)


def build_optimizer(name, parameters):
    if name == "muon":
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-2)
    if name == "adamw8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.1) if name == "sgd" else torch.optim.AdamW(parameters, lr=1e-3)


def by_deepspeed(how, mesh):
    """A step with DeepSpeed's own tensor parallelism and pipeline."""
    import deepspeed  # on ranks alone, as it looks for accelerators
    from deepspeed.pipe import PipelineModule

    on_host = {"none": [], "optimizer": ["optimizer"], "all": ["optimizer", "param"]}[how["offload"]]
    zero = {"stage": STRATEGIES[how["strategy"]].zero_stage, "reduce_bucket_size": 100_000}
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": how["pp"],
        "gradient_clipping": 0.0,
        "bf16": {"enabled": how["precision"].startswith("bf16")},
        "zero_optimization": zero | {f"offload_{what}": {"device": "cpu"} for what in on_host},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if how["optimizer"] == "adamw_bf16":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if how["tp"] > 1:
        config["tensor_parallel"] = {"autotp_size": how["tp"]}
    model = build(how, "fp32")
    if how["pp"] > 1:
        stages = [LlamaStage(tiny_llama(layers=2), index, 2) for index in range(2)]
        model = PipelineModule(stages, 2, loss_fn=token_loss, partition_method="uniform")
    optimizer = build_optimizer(how["optimizer"], trainable(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if how["pp"] > 1:
        return lambda batch: engine.train_batch(iter([(part, part) for part in batch.chunk(2)]))
    if how["tp"] > 1:
        weight = engine.module.model.layers[0].self_attn.q_proj.weight
        assert getattr(weight, "ds_shape", weight.shape) == (64, 128)  # half of the heads
    else:
        assert_sharded(engine)

    def step(batch):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def train_each(settings):
    torch.set_num_threads(1)  # a small batch gains nothing from two, and loses much on a busy machine
    prepare_deepspeed()
    results = []
    for how in settings:
        try:
            results.append(train(how))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def alone(how):
    return how | {"strategy": "single", "offload": "none", "tp": 1, "pp": 1}


RUNS = [how for how in combinations.cells() if combinations.mark(how)[0] == "runs"]


@pytest.fixture(scope="module")
def losses(private_tmp):
    """By choices: of every cell marked "runs", and of one process that makes the same choices."""
    settings = defaultdict(dict)
    for how in RUNS:
        ranks = (1 if how["strategy"] == "single" else 2) * how["tp"] * how["pp"]
        settings[max(2, ranks)][str(how)] = how
        settings[2][str(alone(how))] = alone(how)
    found = {}
    for ranks, by_key in settings.items():
        run = launch(train_each, list(by_key.values()), ranks=ranks, quiet=True, timeout=280)
        found |= zip(by_key, run.results[0], strict=True)
    return found


def test_what_is_marked_so_trains_as_one_rank_does(losses):
    for how in RUNS:
        actual, expected = losses[str(how)], losses[str(alone(how))]
        assert isinstance(actual, list), (how, actual)
        by_blocks = how["optimizer"] in ("adamw8bit", "muon")
        tolerance = IN_16_BITS if how["precision"] != "fp32" else BY_BLOCKS if by_blocks else TOLERANCE
        assert off_by(actual, expected) < tolerance, how
    # each choice was made: three methods, three optimizers more, three precisions more
    different = {tuple(losses[str(alone(how))]) for how in RUNS if how["optimizer"] != "adamw_bf16"}
    assert len(different) == 9


def test_the_memory_model_has_what_is_marked_and_refuses_the_rest():
    for how in combinations.cells():
        settings = {name: value for name, value in how.items() if name not in ("tp", "pp")}
        settings |= {"ranks": 1 if how["strategy"] == "single" else 2, "seq_len": 16}
        settings |= {"tensor_parallel": how["tp"], "pipeline_parallel": how["pp"]}
        refused = False
        try:
            estimate("tiny", **settings)
        except ValueError:
            refused = True
        assert refused is (combinations.mark(how)[0] == "no"), how
