"""Fine-tune adapters beside a model in 4 bits on one GPU: python fits.py --model base --data rows.pt --folder run"""

import argparse
import json

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

RANK = 8


def bytes_between_steps(config):
    """Weights, adapters, and the adapters' two moments."""
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden * config.num_key_value_heads // config.num_attention_heads
    outputs_of = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    outputs_of += [(inner, hidden), (inner, hidden), (hidden, inner)]
    packed = sum(outputs * inputs for outputs, inputs in outputs_of)
    adapters = sum(RANK * (outputs + inputs) for outputs, inputs in outputs_of)
    rest = config.vocab_size * hidden  # the embedding, in fp32; it is the head, too
    return config.num_hidden_layers * (packed * 4.127 / 8 + adapters * 12) + 4 * rest


def main(model, data, folder, batch_size, steps, lr):
    with open(f"{folder}/plan.json", "w") as file:
        json.dump({"bytes": bytes_between_steps(AutoConfig.from_pretrained(model))}, file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    four_bits = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=torch.float32)
    net = AutoModelForCausalLM.from_pretrained(model, quantization_config=four_bits, device_map=device)
    net = prepare_model_for_kbit_training(net, gradient_checkpointing_kwargs={"use_reentrant": False})
    net = get_peft_model(net, LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    net.train()  # it comes in evaluation mode, in which nothing is checkpointed
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=lr, fused=True)
    rows = torch.load(data)  # input_ids and labels (rows, length); a label of -100 is not trained on

    for step in range(steps):
        start = step * batch_size
        batch = [rows[name][start : start + batch_size].to(device) for name in ("input_ids", "labels")]
        trained, loss_of_step = (batch[1][:, 1:] != -100).sum(), 0.0
        for ids, labels in zip(*(tensor.split(2) for tensor in batch), strict=True):
            loss = net(input_ids=ids, labels=labels, num_items_in_batch=trained).loss
            loss.backward()
            loss_of_step += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        with open(f"{folder}/losses.jsonl", "a") as log:
            log.write(json.dumps({"step": step + 1, "loss": loss_of_step}) + "\n")

    net.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "folder"):
        parser.add_argument(f"--{name}", required=True)
    for name, value in {"batch_size": 16, "steps": 4, "lr": 5e-3}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
