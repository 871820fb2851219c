"""Sharded data parallelism: ZeRO with DeepSpeed, and FSDP2."""
