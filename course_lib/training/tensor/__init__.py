"""Tensor parallelism by hand, by DTensor, and by Megatron-core."""
