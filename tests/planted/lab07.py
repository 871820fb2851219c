"""Answers to lab 7. RIGHT: name of the exercise -> an answer unlike the shipped one. WRONG: (exercise, answer, words)."""

import hashlib
import math
import os
import pickle
import statistics
from pathlib import Path

import torch

# ----------------------------------------------------------------------------------------------------------- one_file
RUN = {
    "micro_batch_size": 4,
    "max_steps": 6,
    "sequence_len": 64,
    "learning_rate": "2e-3",
    "lr_scheduler": "linear",
    "warmup_ratio": 0.34,
    "optimizer": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "curriculum_sampling": True,
    "shuffle_merged_datasets": False,
    "bf16": False,
    "seed": 7,
}


def _run(**changes):
    config = {key: value for key, value in {**RUN, **changes}.items() if value is not None}
    return (lambda: config,)


# ----------------------------------------------------------------------------------------------------------- switched
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "reshard_after_forward": False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
    },
}
ZERO3 = {"deepspeed": str(Path(__file__).parents[2] / "lessons" / "07_axolotl" / "zero3.json")}


def right_prove(witness):
    """By what lies where, and the wrapper only where that does not tell."""
    parameters = max(w["local_elements"] for w in witness) / witness[0]["total_elements"]
    states = max(w["optimizer_elements"] for w in witness) / 2 / witness[0]["trainable_elements"]
    stage, wrapper = witness[0]["zero_stage"], witness[0]["wrapper"]
    names = {"DistributedDataParallel": "DDP", "FSDPLlamaForCausalLM": "FSDP2", "DeepSpeedEngine": f"ZeRO-{stage}"}
    alone = "tensor parallel" if parameters < 1 else "alone"
    return [names.get(wrapper, alone), parameters, states]


def _proof(change):
    def prove(witness):
        return change(*right_prove(witness), witness)

    return _switched(prove=prove)


def _of_all_parameters(method, parameters, states, witness):
    return method, parameters, witness[0]["optimizer_elements"] / 2 / witness[0]["total_elements"]


def _switched(fsdp2=FSDP2, zero3=ZERO3, prove=right_prove):
    return (lambda: {"fsdp2": fsdp2, "zero3": zero3}, prove)


def _fsdp(**changes):
    config = {key: value for key, value in {**FSDP2["fsdp_config"], **changes}.items() if value is not None}
    return _switched(fsdp2={"fsdp_version": 2, "fsdp_config": config})


def _zero(settings, stage):
    return _switched(zero3={"deepspeed": {"zero_optimization": {"stage": stage}} | settings})


# -------------------------------------------------------------------------------------------------------- broken_yamls
MENDED = {
    "batch.yml": {"gradient_acumulation_steps": None, "gradient_accumulation_steps": 8},
    "colab.yml": {"bf16": "auto", "fp16": True},
    "shards.yml": {"deepspeed": None},
    "wide.yml": {"micro_batch_size": 1, "gradient_accumulation_steps": 32},
    "night.yml": {"save_only_model": None},
}


def _mend(name, **changes):
    return (lambda: MENDED | {name: changes},)


# ------------------------------------------------------------------------------------------------------------- packing
def right_pack(lengths, capacity):
    """Bins as lists of lengths that shrink, and a search from the left."""
    bins = []
    for length, index in sorted(((length, -i) for i, length in enumerate(lengths)), reverse=True):
        fits = [b for b in bins if sum(lengths[i] for i in b) + length <= capacity]
        if fits:
            fits[0].append(-index)
        elif length <= capacity:
            bins.append([-index])
    return bins


def right_epoch(lengths, sequence_len, micro, ranks, accumulate, packing):
    lengths = [n for n in lengths if n <= sequence_len]
    rows = len(right_pack(lengths, micro * sequence_len)) * micro if packing else len(lengths)
    steps = rows / (micro * ranks * accumulate)
    return (max(1, math.floor(steps)) if packing else -(-rows // (micro * ranks * accumulate))), (
        rows * sequence_len - sum(lengths)
    ) / (rows * sequence_len)


def _pack(order=True, where="first", keep=False, values=False):
    def pack(lengths, capacity):
        bins = []
        indices = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if order else range(len(lengths))
        for i in indices:
            if lengths[i] > capacity and not keep:
                continue
            fits = [b for b in bins if sum(lengths[j] for j in b) + lengths[i] <= capacity]
            if where == "last":
                fits = [b for b in fits if b is bins[-1]]
            if where == "fullest":
                fits.sort(key=lambda b: -sum(lengths[j] for j in b))
            fits[0].append(i) if fits else bins.append([i])
        return [[lengths[i] for i in b] for b in bins] if values else bins

    return pack


def _epoch(rows=False, micro_twice=False, rounded=None, long=False, ranks_too=True, padding=lambda p, *_: p):
    def epoch(lengths, sequence_len, micro, ranks, accumulate, packing):
        kept = list(lengths) if long else [n for n in lengths if n <= sequence_len]
        capacity = sequence_len * (micro if packing and not rows else 1)
        units = len(right_pack(kept, capacity)) if packing else len(kept)
        each = (ranks if ranks_too else 1) * accumulate
        if not packing or rows or micro_twice:
            each *= micro
        how = rounded or (math.floor if packing else math.ceil)
        share = right_epoch(lengths, sequence_len, micro, ranks, accumulate, packing)[1]
        return max(1, how(units / each)), padding(share, units * capacity, sum(lengths))

    return epoch


# ------------------------------------------------------------------------------------------------------------ survives
def right_save(folder, step, state):
    """No rename at all: a checksum behind the bytes, and torn files are passed over."""
    os.makedirs(folder, exist_ok=True)
    complete = [path for path in _by_step(folder) if _read(path)]
    for path in set(_by_step(folder)) - set(complete[-2:]):
        path.unlink()
    data = pickle.dumps(state)
    with open(f"{folder}/checkpoint-{step}", "wb") as file:
        file.write(data + hashlib.sha256(data).digest())
        file.flush()
        os.fsync(file.fileno())


def right_load(folder):
    for path in reversed(_by_step(folder)):
        state = _read(path)
        if state:
            return int(path.name.split("-")[1]), state[0]
    return None


def _by_step(folder):
    return sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def _read(path):
    data = path.read_bytes()
    return [pickle.loads(data[:-32])] if hashlib.sha256(data[:-32]).digest() == data[-32:] else None


def _save(sync=True, half="half", rename=True, delete="after", keep=2, swallow=False):
    def save(folder, step, state):
        place = Path(folder)
        place.mkdir(exist_ok=True, parents=True)
        if delete == "before":
            _thin(place, keep - 1)
        final = place / f"{step}.pt"
        path = place / half.format(step=step) if rename else final
        try:
            with open(path, "wb") as file:
                torch.save(state, file)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
        except (OSError, RuntimeError):
            if swallow:
                return
            raise
        if rename:
            path.rename(final)
        if delete == "after":
            _thin(place, keep)

    return save


def _thin(place, keep):
    saved = sorted(place.glob("*.pt"), key=lambda p: int(p.stem))
    for old in saved[: len(saved) - keep]:
        old.unlink()


def _load(key=lambda path: int(path.stem)):
    def load(folder):
        saved = sorted(Path(folder).glob("*.pt"), key=key)
        return (int(saved[-1].stem), torch.load(saved[-1])) if saved else None

    return load


def with_pointer(folder, step, state):
    _save()(folder, step, state)
    Path(folder, "latest").write_text(str(step))


def by_pointer(folder):
    if not Path(folder, "latest").exists():
        return None
    step = int(Path(folder, "latest").read_text())
    return step, torch.load(f"{folder}/{step}.pt")


# ------------------------------------------------------------------------------------------------------ spike_detector
def right_spike(past, loss):
    """A ratio to the median, and no measure of the noise."""
    recent = [x for x in past if x == x][-24:]
    return not loss < math.inf or (len(recent) > 8 and loss / statistics.median(recent) > 1.7)


def _mean_and_deviation(past, loss):
    recent = [x for x in past[-30:] if x == x]
    if len(recent) < 10:
        return loss != loss
    return loss != loss or loss > statistics.mean(recent) + 6 * statistics.stdev(recent)


def _both_sides(past, loss):
    recent = [x for x in past[-30:] if x == x]
    return loss != loss or (len(recent) > 9 and abs(loss / statistics.median(recent) - 1) > 0.3)


def _never_nan(past, loss):
    return len(past) > 9 and loss > 1.7 * statistics.median(past[-24:])


def _against_the_start(past, loss):
    return loss != loss or (bool(past) and loss > 1.3 * max(x for x in past[:20] if x == x))


# ------------------------------------------------------------------------------------------------------- watchdog_rule
def right_hung(beats, now, every, save_limit):
    """Rank by rank, with max() over its beats."""
    ranks = {b.rank for b in beats}
    last = {r: max((b for b in beats if b.rank == r), key=lambda b: b.received) for r in ranks}
    active = {r: b for r, b in last.items() if b.phase != "done"}
    if active and {b.phase for b in active.values()} == {"waiting"}:
        silent = min(now - b.received for b in active.values())
        lowest = min(b.step for b in active.values())
        return {r for r, b in active.items() if b.step == lowest and silent >= 2 * every}
    return {
        r
        for r, b in active.items()
        if (b.phase == "working" and now - b.received >= 2 * every)
        or (b.phase == "saving" and now - b.received >= save_limit)
    }


def _hung(beats_allowed=2.0, clock="received", phases=("working", "saving"), save=True, deadlock=True, who="lowest"):
    def hung(beats, now, every, save_limit):
        last = {}
        for b in beats:
            last[b.rank] = b
        found = []
        for rank, b in last.items():
            limit = save_limit if b.phase == "saving" and save else beats_allowed * every
            if b.phase in phases and now - getattr(b, clock) > limit:
                found.append(rank)
        active = [b for b in last.values() if b.phase != "done"]
        if deadlock and active and all(b.phase == "waiting" for b in active):
            if now - max(getattr(b, clock) for b in active) > 2 * every:
                lowest = min(b.step for b in active)
                return [b.rank for b in active if who == "all" or b.step == lowest]
        return found

    return (hung,)


def _no_progress(beats, now, every, save_limit):
    last, began = {}, {}
    for b in beats:
        if b.rank not in last or last[b.rank].step != b.step:
            began[b.rank] = b.received
        last[b.rank] = b
    return [r for r, b in last.items() if b.phase == "working" and now - began[r] > 10 * every]


# -------------------------------------------------------------------------------------------------------- not_restored
STATES = {"held_out": "model", "batch": "data position", "lr": "scheduler", "loss": "random state"}


def right_find(whole, resumed):
    """All that differs, then the cause that explains the rest."""
    whole = {r.step: r for r in whole}
    first = resumed[0]
    wrong = {k for k in ("held_out", "lr", "loss") if abs(getattr(first, k) / getattr(whole[first.step], k) - 1) > 1e-5}
    wrong |= {"batch"} if first.batch != whole[first.step].batch else set()
    for sign, state in STATES.items():
        if sign in wrong:
            return state
    return "optimizer" if any(abs(r.loss / whole[r.step].loss - 1) > 1e-5 for r in resumed) else "nothing"


def _find(order=("held_out", "batch", "lr", "loss"), tolerance=1e-5, aligned=True):
    def differ(a, b):
        return a != b if isinstance(a, str) else abs(a - b) > tolerance

    def find(whole, resumed):
        beside = [next(w for w in whole if w.step == r.step) for r in resumed] if aligned else whole
        pairs = list(zip(beside, resumed, strict=False))
        for key in order:
            if differ(getattr(pairs[0][0], key), getattr(pairs[0][1], key)):
                return STATES[key]
        return "optimizer" if any(differ(w.loss, r.loss) for w, r in pairs) else "nothing"

    return (find,)


RIGHT = {
    "one_file": _run(),
    "switched": _switched(),
    "broken_yamls": (lambda: MENDED,),
    "packing": (right_pack, right_epoch),
    "survives": (right_save, right_load),
    "spike_detector": (right_spike,),
    "watchdog_rule": (right_hung,),
    "not_restored": (right_find,),
}
WRONG = [
    ("one_file", (lambda: "learning_rate: 2e-3\n  max_steps: 6",), "line 2, column"),
    ("one_file", _run(learning_rate=1e-3), "by the wiki page"),
    ("one_file", _run(micro_batch_size=2), "the wiki page sets ACCUMULATE=2"),
    ("one_file", _run(micro_batch_size=1, gradient_accumulation_steps=2), "BATCH is 2"),
    ("one_file", _run(max_steps=None), "goes on to the end of the epoch"),
    ("one_file", _run(lr_scheduler=None), "default is cosine"),
    ("one_file", _run(warmup_ratio=None), "is none of six"),
    ("one_file", _run(weight_decay=None), "the 0.0 in the parser is never used"),
    ("one_file", _run(weight_decay=None, weigth_decay=0.1), "Axolotl knows weight_decay"),
    ("one_file", _run(adam_beta2=None), "inside main()"),
    ("one_file", _run(max_grad_norm=None), "--clip"),
    ("one_file", _run(sequence_len=128), "cuts long texts"),
    ("one_file", _run(sample_packing=True), "several texts into one row"),
    ("one_file", _run(bf16="auto"), "computes in fp32 everywhere"),
    ("one_file", _run(curriculum_sampling=None, seed=42), "shuffles them each epoch"),
    ("one_file", _run(shuffle_merged_datasets=None), "shuffles a dataset when it loads it"),
    ("one_file", _run(adam_epsilon=0.1), "the losses part at step 3"),  # step 1 and 2 come before the first real update
    ("switched", _proof(lambda m, p, s, w: ("FSDP2", p, s)), "it was DDP, and you say FSDP2"),
    ("switched", _proof(lambda m, p, s, w: ("DDP" if m == "alone" else m, p, s)), "it was alone"),
    ("switched", _proof(lambda m, p, s, w: (m.replace("ZeRO-1", "ZeRO-2"), p, s)), "it was ZeRO-1"),
    ("switched", _proof(lambda m, p, s, w: (m, 1 / len(w), s)), "not every method divides them"),
    ("switched", _proof(lambda m, p, s, w: (m, p, 2 * s)), "the share of Adam's states"),
    ("switched", _proof(_of_all_parameters), "states of the trained parameters alone"),
    ("switched", _switched(fsdp2={"fsdp_config": FSDP2["fsdp_config"]}), "does not say fsdp_version: 2"),
    ("switched", _switched(fsdp2={"fsdp_version": 2}), "Axolotl trains with DDP, and says nothing"),
    ("switched", _switched(fsdp2={"fsdp_version": 2, "fsdp_confg": {}}), "Axolotl knows fsdp_config"),
    ("switched", _switched(fsdp2={"fsdp": ["full_shard", "auto_wrap"]}), "is the list of FSDP1"),
    ("switched", _switched(fsdp2=FSDP2 | ZERO3), "would both shard the model"),
    ("switched", _fsdp(auto_wrap_policy=None), "one unit, gathered at once"),
    ("switched", _fsdp(transformer_layer_cls_to_wrap="Qwen2DecoderLayer"), "LlamaDecoderLayer"),
    ("switched", _switched(zero3={"deepspeed": "zero3.json"}), "there is no file zero3.json"),
    ("switched", _zero(AUTO, stage=2), "shards the parameters too"),
    ("switched", _zero({}, stage=3), '"auto", so that the batch'),
    ("switched", _fsdp(state_dict_type="WHOLE"), "Axolotl does not run the overlay fsdp2"),
    ("broken_yamls", (lambda: MENDED | {"lab.yml": {}},), "is none of the files"),
    ("broken_yamls", (lambda: {"batch.yml": MENDED["batch.yml"]},), "colab.yml still waits"),
    ("broken_yamls", _mend("batch.yml", micro_batch_size=16), "has nothing to do with the mistake"),
    ("broken_yamls", _mend("batch.yml", gradient_accumulation_steps=8), "the misspelt line is still there"),
    ("broken_yamls", _mend("batch.yml", gradient_acumulation_steps=None), "is misspelt"),
    ("broken_yamls", _mend("batch.yml", gradient_acumulation_steps=None, gradient_accumulation_steps=4), "are 64"),
    ("broken_yamls", _mend("colab.yml", bf16=False), "computes in fp32"),
    ("broken_yamls", _mend("colab.yml", bf16="auto"), "emulates"),
    ("broken_yamls", _mend("colab.yml", fp16=True), "ignores fp16"),
    ("broken_yamls", _mend("shards.yml", fsdp_version=None, fsdp_config=None), "the comment wants FSDP2"),
    ("broken_yamls", _mend("shards.yml", deepspeed=None, fsdp_version=None, fsdp_config=None), "what is left is DDP"),
    ("broken_yamls", _mend("shards.yml", fsdp_version=None), "would both shard"),
    ("broken_yamls", _mend("wide.yml", gradient_accumulation_steps=8), "what stands there already"),
    ("broken_yamls", _mend("wide.yml", micro_batch_size=1, gradient_accumulation_steps=16), "4 ranks bring data"),
    ("broken_yamls", _mend("wide.yml", micro_batch_size=4), "two are all that fits"),
    ("broken_yamls", _mend("night.yml", save_steps=50), "What lies in each checkpoint"),
    ("packing", (_pack(order=False), right_epoch), "first fit in the order given"),
    ("packing", (_pack(where="last"), right_epoch), "look into the last bin"),
    ("packing", (_pack(where="fullest"), right_epoch), "first fit takes the first one"),
    ("packing", (_pack(keep=True), right_epoch), "fits into no bin"),
    ("packing", (_pack(values=True), right_epoch), "give indices, not lengths"),
    ("packing", (right_pack, _epoch(rows=True)), "one row of micro x sequence_len"),
    ("packing", (right_pack, _epoch(micro_twice=True)), "counts the micro-batch twice"),
    ("packing", (right_pack, _epoch(rounded=math.ceil)), "rounds up with packing too"),
    ("packing", (right_pack, _epoch(rounded=math.floor)), "rounds down without packing too"),
    ("packing", (right_pack, _epoch(long=True)), "Axolotl drops them"),
    ("packing", (right_pack, _epoch(ranks_too=False)), "forgets that the ranks share"),
    ("packing", (right_pack, _epoch(padding=lambda p, *_: 1 - p)), "share of real tokens"),
    ("packing", (right_pack, _epoch(padding=lambda p, slots, everything: 1 - everything / slots)), "leave them out"),
    ("survives", (_save(rename=False), _load()), "rename when the file is complete"),
    ("survives", (_save(sync=False), _load()), "fsync before you rename"),
    ("survives", (_save(delete="before", keep=1), _load()), "no checkpoint is left"),
    ("survives", (_save(half="half-{step}"), _load()), "what killed saves left half written"),
    ("survives", (_save(delete="never"), _load()), "remove older checkpoints"),
    ("survives", (_save(delete="never"), _load(key=lambda path: path.stem)), "compare the steps as numbers"),
    ("survives", (_save(swallow=True), _load()), "Let the error out"),
    ("survives", (with_pointer, by_pointer), "It met a torn file"),
    ("spike_detector", (lambda past, loss: loss > 4,), "a fixed number does not fit"),
    ("spike_detector", (lambda past, loss: len(past) > 20 and not loss < 4,), "a fixed limit does not know"),
    ("spike_detector", (_mean_and_deviation,), "A median does not mind"),
    ("spike_detector", (lambda past, loss: len(past) > 9 and loss > 1.5 * past[-1],), "the step before was lower"),
    ("spike_detector", (_both_sides,), "good news is no spike"),
    ("spike_detector", (_against_the_start,), "passed unseen"),
    ("spike_detector", (_never_nan,), "math.isfinite"),
    ("watchdog_rule", _hung(beats_allowed=1.5), "two whole heartbeats"),
    ("watchdog_rule", _hung(beats_allowed=3), "two heartbeats without a word"),
    ("watchdog_rule", _hung(clock="sent"), "the watchdog's own clock"),
    ("watchdog_rule", _hung(phases=("working", "saving", "waiting")), "it waits for"),
    ("watchdog_rule", _hung(phases=("working", "saving", "done")), "nothing more to say"),
    ("watchdog_rule", _hung(save=False), "a save is silent"),
    ("watchdog_rule", _hung(phases=("working",)), "and not for ever"),
    ("watchdog_rule", _hung(deadlock=False), "nobody is left who could come"),
    ("watchdog_rule", _hung(who="all"), "you report rank 0"),
    ("watchdog_rule", (_no_progress,), "the number of the step stands still"),
    ("not_restored", _find(order=("loss", "held_out", "batch", "lr")), "the model was not restored"),
    ("not_restored", _find(order=("held_out", "loss", "batch", "lr")), "look at the batch first"),
    ("not_restored", _find(order=("held_out", "batch", "loss")), "the learning rate is another"),
    ("not_restored", _find(order=("held_out", "batch", "lr")), "what is left that a loss with dropout depends on"),
    ("not_restored", _find(tolerance=0.0), "the last digits differ"),
    ("not_restored", _find(aligned=False), "Compare the records of the same `step`"),
    ("not_restored", (lambda whole, resumed: "nothing",), "weights that were not restored"),
]
