"""Lab 2. MUTANTS: (exercise, what the solution says, what is planted, a word of the verdict). RIGHT: written another way.

SCRIPT_MUTANTS: (what fits.py says, what is planted, a word of the verdict).
"""

MUTANTS = [
    ("checkpointed", "            torch.set_rng_state(ctx.random_state[0])\n", "", "draws another mask"),
    ("checkpointed", "with torch.random.fork_rng(), torch.enable_grad():  # on", "with torch.enable_grad():  # on", "after backward() the random stream"),
    ("checkpointed", "Recompute.apply(block, x, *block.parameters())", "Recompute.apply(block, x)", "must reach the block's parameters"),
    ("checkpointed", "Recompute.apply(block, x, *block.parameters())", "block(x)", "nothing is recomputed"),
    ("checkpointed", "Recompute.apply(block, x, *block.parameters())", "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)", "PyTorch's own"),
    ("checkpointed", "return block(x)  # no", "ctx.kept = block.down(block.up(x))\n        return block(x)  # no", "stay alive"),
    ("checkpointed", "return block(x)  # no", "y = block(x)\n        torch.set_rng_state(ctx.random_state[0])\n        return y  # no", "after your forward the random stream"),
    ("checkpointed", "x.detach().requires_grad_(x.requires_grad)", "x.detach()", "the blocks before learn nothing"),
    ("checkpointed", "if t.requires_grad], gradient))", "if t.requires_grad], torch.ones_like(gradient)))", "the gradient of block"),
    ("checkpointed", "            y = ctx.block(x)\n", "            ctx.block(x)\n            torch.set_rng_state(ctx.random_state[0])\n            y = ctx.block(x)\n", "2 times in backward"),
    ("accumulated_step", "loss.backward()  #", "(loss / max(1, (labels != -100).sum()) / 3).backward()  #", ""),
    ("accumulated_step", 'reduction="sum")', 'reduction="mean") * (labels != -100).sum()', "0 / 0"),
    ("accumulated_step", "count += int((labels != -100).sum())", "count += labels.numel()", "-100 is no token"),
    ("accumulated_step", "        p.grad /= count\n", "        p.grad /= 1\n", "the sum over all labels"),
    ("accumulated_step", "in micro_batches:", "in list(micro_batches):", "overwritten"),
    ("accumulated_step", "    for p in model.parameters():\n        p.grad /= count\n    nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n", "    nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n    for p in model.parameters():\n        p.grad /= count\n", "divide first"),
    ("accumulated_step", "    nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n", "", "max_norm=0.05"),
    ("accumulated_step", "    optimizer.step()\n", "", "0 times"),
    ("accumulated_step", "    optimizer.zero_grad()\n", "", "of the first left"),
    ("accumulated_step", "        loss.backward()  # before the next one comes\n        total += loss.item()\n        count += int((labels != -100).sum())\n", "        total = total + loss\n        count += int((labels != -100).sum())\n    total.backward()\n", "before the next one"),
    ("accumulated_step", "return total / count", "return total", "the loss that your step returns"),
    ("fits", "02_single_gpu/fits.py", "02_single_gpu/fast.py", "no file"),
    ("repaired", "            # first: it freezes all that it finds\n            model = prepare_model_for_kbit_training(model, ", "            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules='all-linear', task_type='CAUSAL_LM'))\n            return prepare_model_for_kbit_training(model, ", "freezes every parameter"),
    ("repaired", "get_peft_model(model, lora).train()", "get_peft_model(model, lora)", "evaluation mode"),
    ("repaired", "if \"lora_B\" in name]", "if \"lora_B.weight\" in name]", "groups hold"),
    ("repaired", "            schedule.step()\n", "", "moves the scheduler"),
    ("repaired", "weight_decay=0.0", "weight_decay=0.01", "weight decay"),
    ("repaired", "r=4, lora_alpha=32", "r=8, lora_alpha=32", "rank 4"),
    ("repaired", "16 * 0.002", "0.002", "the loss"),
    ("repaired", "class Repaired(broken.Program):\n", "class Repaired(broken.Program):\n        def schedule(self, optimizer):\n            return super().schedule(optimizer)\n\n", "healthy"),
    ("order", "if saving >= 0.05 * now:", "if saving > 0:", "is left out"),
    ("order", "min(after, key=after.get)", "next(name for name in techniques if name in left)", "saves most at that moment"),
    ("order", "for techniques in TECHNIQUES.values():\n        left = set(techniques)", "for techniques in [{n: 0 for t in TECHNIQUES.values() for n in t}]:\n        left = set(techniques)", "dearer price"),
    ("order", "while left and (now := need(run, names)) > run.room:", "while left and (now := need(run, names)):", "fits already"),
    ("order", "taken.append((best, saving))", "taken.append((best, need(run) - need(run, [best])))", "run as it was"),
    ("order", "if need(run, names) > run.room:", "if need(run, names) > 1e9:", "ValueError"),
    ("block_code", "even.sign() * even.abs() ** 4  #", "even  #", "come back as 0"),
    ("block_code", "absmax = blocks.abs().amax(1)", "absmax = blocks.abs().amax().repeat(len(blocks))", "an outlier in block 3"),
    ("block_code", "codes.to(torch.uint8)", "codes.to(torch.int16)", "one byte"),
    ("block_code", "tuple(state.shape)", "(state.numel(),)", "shape"),
    ("block_code", '"absmax": absmax,', '"absmax": absmax, "state": state,', "holds the tensor itself"),
]  # fmt: skip

RIGHT = {
    "accumulated_step": [
        """
def accumulated_step(model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    losses, counts = [], []
    for tokens, labels in micro_batches:
        if not (labels != -100).any():
            continue
        losses.append(F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="sum"))
        counts.append((labels != -100).sum())
        losses[-1].backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]) / sum(counts)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / sum(counts)
    for p in model.parameters():
        p.grad *= factor
    optimizer.step()
    return (sum(losses) / sum(counts)).detach()
"""
    ],
    "block_code": [
        """
class BlockCode:
    def quantize(self, state, signed):
        code = functional.create_dynamic_map(signed=signed)
        codes, kept = functional.quantize_blockwise(state, code=code, blocksize=256)
        return {"codes": codes, "absmax": kept.absmax, "signed": signed}

    def dequantize(self, stored):
        code = functional.create_dynamic_map(signed=stored["signed"])
        return functional.dequantize_blockwise(stored["codes"], absmax=stored["absmax"], code=code, blocksize=256)


from bitsandbytes import functional
"""
    ],
}

SCRIPT_MUTANTS = [
    ("labels=labels, num_items_in_batch=trained).loss", "labels=labels).loss / 8", "mean is over all labels"),
    ("(batch[1][:, 1:] != -100)", "(batch[1] != -100)", "mean is over all labels"),
    ("(batch[1][:, 1:] != -100)", "(rows['labels'][:batch_size, 1:] != -100)", "mean is over all labels"),
    (".split(2)", ".split(16)", "so many rows at once"),
    ("    net.train()  # it comes in evaluation mode, in which nothing is checkpointed\n", "", "evaluation mode"),
    ("quantization_config=four_bits, ", "", "not packed"),
    ("start : start + batch_size", "batch_size : 2 * batch_size", "each once"),
    ("        optimizer.zero_grad()\n", "", "still there"),
    ("loss_of_step += loss.item()", "loss_of_step = loss.item()", "losses.jsonl"),
    ("    net.save_pretrained(folder)\n", "", "no adapter"),
    ('"lr": 5e-3', '"lr": 1e-5', "falls by"),
]
