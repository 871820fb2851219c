"""Fine-tuning on one device: full, LoRA and QLoRA."""
