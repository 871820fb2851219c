"""Five YAMLs that Axolotl starts, or that a reader would: each has one mistake, and its comments say what was meant."""

from __future__ import annotations

BROKEN: dict[str, str] = {
    "batch.yml": """\
# one node, 8 x H100: 2 sequences x 8 ranks x 8 accumulated = 128 sequences a step
base_model: Qwen/Qwen2.5-7B
datasets: [{path: data/support.jsonl, ds_type: json, type: chat_template}]
output_dir: runs/support
sequence_len: 4096
sample_packing: true
attn_implementation: flash_attention_2
micro_batch_size: 2
gradient_acumulation_steps: 8
num_epochs: 2
learning_rate: 1.0e-5
bf16: true
fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Qwen2DecoderLayer
saves_per_epoch: 2
""",
    "colab.yml": """\
# one free T4 (16 GB, compute capability 7.5)
base_model: Qwen/Qwen2.5-1.5B
datasets: [{path: data/recipes.jsonl, ds_type: json, type: alpaca}]
output_dir: runs/recipes
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 1024
sample_packing: false
attn_implementation: sdpa
micro_batch_size: 2
gradient_accumulation_steps: 8
num_epochs: 1
learning_rate: 2.0e-4
bf16: true
tf32: false
saves_per_epoch: 4
""",
    "shards.yml": """\
# 2 nodes x 8 A100; the team's other runs all shard with FSDP2, this one too
base_model: meta-llama/Llama-3.1-8B
datasets: [{path: data/laws.jsonl, ds_type: json, type: completion}]
output_dir: runs/laws
sequence_len: 8192
sample_packing: true
attn_implementation: flash_attention_2
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 1.0e-5
bf16: true
gradient_checkpointing: true
deepspeed: deepspeed_configs/zero3_bf16.json
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
saves_per_epoch: 4
""",
    "wide.yml": """\
# 8 x H100 in one node, tensor parallel over pairs; 128 sequences a step, as in the run that it shall be compared with.
# Two sequences at once is all that fits.
base_model: meta-llama/Llama-3.1-8B
datasets: [{path: data/poems.jsonl, ds_type: json, type: completion}]
output_dir: runs/poems
sequence_len: 4096
sample_packing: false
attn_implementation: flash_attention_2
tensor_parallel_size: 2
dp_shard_size: 4
micro_batch_size: 2
gradient_accumulation_steps: 8
max_steps: 3000
learning_rate: 2.0e-5
bf16: true
fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
save_steps: 500
""",
    "night.yml": """\
# a queue that ends every job after 8 hours: it is started again and goes on where it was, with the same losses
base_model: Qwen/Qwen2.5-7B
datasets: [{path: data/logs.jsonl, ds_type: json, type: completion}]
output_dir: /scratch/logs
auto_resume_from_checkpoints: true
sequence_len: 4096
sample_packing: true
attn_implementation: flash_attention_2
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 20000
optimizer: adamw_torch_fused
learning_rate: 1.0e-5
lr_scheduler: cosine
bf16: true
deepspeed: deepspeed_configs/zero2.json
save_strategy: steps
save_steps: 200
save_total_limit: 2
save_only_model: true
""",
}
