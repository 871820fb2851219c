"""The keys of a DeepSpeed configuration (0.19): at the top, where DeepSpeed ignores unknown ones, and of its ZeRO section.

They stand here and are not read off DeepSpeed's own models, because these know nothing of the top level, importing them
takes two seconds, and a notebook on a GPU machine must not import DeepSpeed: it touches the driver, and ranks could not be
forked any more. A test compares the ZeRO section with DeepSpeed's model. Other sections DeepSpeed checks by itself.
"""

from __future__ import annotations

from typing import Any

from course_lib.validation import did_you_mean

KNOWN: dict[str, frozenset[str]] = {
    "": frozenset(
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
    ),
    "zero_optimization": frozenset(
        """allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload
        cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters
        leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear
        offload_optimizer offload_param overlap_comm override_module_apply parameter_alignment
        pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
        save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
        stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
        stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce zenflow
        zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights
        zero_quantized_weights""".split()
    ),
}


def check_keys(config: dict[str, Any]) -> None:
    """Raise ValueError for a key that DeepSpeed does not know, with the nearest one or the place that it belongs to."""
    zero = config.get("zero_optimization")
    sections = {name: config.get(name) for name in ("zero_optimization", "bf16", "fp16", "optimizer")}
    if isinstance(zero, dict):
        sections |= {f"zero_optimization.{name}": zero.get(name) for name in ("offload_optimizer", "offload_param")}
    for name, section in sections.items():
        if section is not None and not isinstance(section, dict):
            raise ValueError(f'"{name}" is {section!r}: give an object, {{...}}.')
    for path, section in (("", config), ("zero_optimization", zero or {})):
        for key in section:
            if key not in KNOWN[path]:
                where = f" in {path!r}" if path else ""
                raise ValueError(f"DeepSpeed knows no key {key!r}{where}: {_hint(key, path)}")


def _hint(key: str, path: str) -> str:
    if near := did_you_mean(key, KNOWN[path], cutoff=0.7):
        return f"did you mean {near[0]!r}?"
    if path and key in KNOWN[""]:
        return "it belongs to the top of the configuration."
    if key in KNOWN["zero_optimization"]:
        return "it belongs into 'zero_optimization'."
    near = did_you_mean(key, KNOWN[path], cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else "leave it out."
