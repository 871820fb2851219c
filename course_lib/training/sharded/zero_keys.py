"""The keys of a DeepSpeed configuration (0.19). DeepSpeed itself reads past an unknown one at the top without a word."""

from __future__ import annotations

import difflib
from typing import Any

_OFFLOAD = ("device", "nvme_path", "buffer_count", "pin_memory")
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
    "zero_optimization.offload_optimizer": frozenset(
        (*_OFFLOAD, "pipeline_read", "pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc")
    ),
    "zero_optimization.offload_param": frozenset((*_OFFLOAD, "buffer_size", "max_in_cpu")),
    "bf16": frozenset(
        "enabled bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow immediate_grad_update".split()
    ),
    "fp16": frozenset(
        """enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads hysteresis initial_scale_power
        loss_scale loss_scale_window min_loss_scale""".split()
    ),
    "optimizer": frozenset(("type", "params", "legacy_fusion")),
}


def check_keys(config: dict[str, Any]) -> None:
    """Raises ValueError for a key that DeepSpeed does not know; the nearest one is offered, or the place it belongs to."""
    for path, known in KNOWN.items():
        section: Any = config
        for step in path.split(".") if path else ():
            section = section.get(step) if isinstance(section, dict) else None
        if section is None:
            continue
        if not isinstance(section, dict):
            raise ValueError(f'"{path}" is {section!r}: give an object, {{...}}.')
        for key in section:
            if key in known:
                continue
            raise ValueError(f"DeepSpeed knows no key {key!r}{f' in {path!r}' if path else ''}: {_hint(key, known)}")


def _hint(key: str, known: frozenset[str]) -> str:
    if near := difflib.get_close_matches(key, sorted(known), 1, 0.7):
        return f"did you mean {near[0]!r}?"
    if where := [path for path, keys in KNOWN.items() if key in keys]:
        return f"it belongs into {where[0]!r}." if where[0] else "it belongs to the top of the configuration."
    near = difflib.get_close_matches(key, sorted(known), 1, 0.4)
    return f"did you mean {near[0]!r}?" if near else "leave it out."
