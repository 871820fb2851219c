"""What DeepSpeed says late or never about a configuration: keys that it reads past, batch sizes, stages, offloading.

The keys are DeepSpeed 0.19's. Only those at the top stand here: an unknown one in another section DeepSpeed refuses itself.
"""

from __future__ import annotations

from typing import Any

from course_lib.validation import did_you_mean

Config = dict[str, Any]

KEYS = frozenset(
    """activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comms_logger
    communication_data_type compile compression_training csv_monitor data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel
    flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown
    monitor_config optimizer pipeline prescale_gradients progressive_layer_drop scheduler
    seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization""".split()
)


def check_config(config: Config, *, ranks: int) -> None:
    """Raise ValueError with one sentence about what is wrong with a configuration for so many ranks."""
    zero = config["zero_optimization"]
    sections = {name: config.get(name) for name in ("bf16", "fp16", "optimizer")}
    sections |= {name: zero.get(name) for name in ("offload_optimizer", "offload_param")}
    for name, section in sections.items():
        if section is not None and not isinstance(section, dict):
            raise ValueError(f'"{name}" is {section!r}: give an object, {{...}}.')
    for key in config:
        if key not in KEYS:
            near = did_you_mean(key, KEYS, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out."
            raise ValueError(f"DeepSpeed knows no key {key!r} at the top of a configuration: {hint}")
    batch_sizes(config, ranks=ranks)
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        raise ValueError(f"ZeRO has the stages 0, 1, 2 and 3, as whole numbers; {stage!r} is none of them.")
    for name, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        if (zero.get(name) or {}).get("device", "none") != "none" and stage < lowest:
            raise ValueError(f"{name} needs stage {lowest} or above, and this is stage {stage}.")


def batch_sizes(config: Config, *, ranks: int) -> tuple[int, int, int]:
    """(global batch, micro-batch, accumulation); what is missing follows from the others, as in DeepSpeed."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} is {value!r}: give a whole number of at least 1.")
    whole, micro_batch, micro_batches = (config.get(name) for name in names)
    if whole is None and micro_batch is None:
        raise ValueError(f"The configuration has neither {names[0]} nor {names[1]}: DeepSpeed needs one of them.")
    if micro_batches is None:
        micro_batches = 1 if whole is None or micro_batch is None else whole // (ranks * micro_batch)
    if whole is None:
        whole = micro_batch * micro_batches * ranks
    if micro_batch is None:
        micro_batch = whole // (ranks * micro_batches)
    if whole != micro_batch * micro_batches * ranks:
        raise ValueError(
            f"The batch sizes disagree: train_batch_size {whole} is not {micro_batch} (train_micro_batch_size_per_gpu) x "
            f"{micro_batches} (gradient_accumulation_steps) x {ranks} ranks = {micro_batch * micro_batches * ranks}."
        )
    return whole, micro_batch, micro_batches
