"""QLoRA on one device: adapters in fp32 beside frozen weights in NF4 (Dettmers et al., arXiv:2305.14314)."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from course_lib.models.data import chat_examples, shuffled
from course_lib.observe import observe
from course_lib.on_cpu.bitsandbytes import prepare_bitsandbytes
from course_lib.training.command_line import run
from course_lib.training.outcome import Outcome, outcome

prepare_bitsandbytes()


def train(
    *,
    folder: str,
    steps: int = 20,
    micro_batch_size: int = 4,
    seq_len: int = 128,
    lr: float = 5e-4,
    save: str | None = None,
) -> Outcome:
    """Fine-tune a chat model on the course's questions and answers.

    Args:
        folder: of the model, or its name on the Hugging Face hub.
        steps: optimizer steps.
        micro_batch_size: pairs in a step.
        seq_len: tokens a pair, padding included; longer pairs are left out.
        lr: AdamW's learning rate.
        save: a folder for the adapter.
    """
    device, compute = "cpu", torch.float32  # many CPUs have no 16-bit arithmetic
    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 doesn't
        device, compute = "cuda", torch.bfloat16 if has_bf16 else torch.float16
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    four_bits = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=compute)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map=device)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=compute is torch.float16)
    pairs = chat_examples(AutoTokenizer.from_pretrained(folder), "train", seq_len)
    batches = shuffled(pairs, micro_batch_size, seq_len, seed=0)
    observation, losses = observe(model, optimizer), []
    for _ in range(steps):
        batch = {name: tensor.to(device) for name, tensor in next(batches).items()}  # labels: answers only
        with observation.step(tokens=batch["input_ids"].numel()):
            with torch.autocast(device, compute, enabled=compute is not torch.float32):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.item())
    if save:
        model.save_pretrained(save)
    return outcome(observation, losses, type(model).__name__)


if __name__ == "__main__":
    run(train, own_group=False)
