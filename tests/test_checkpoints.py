"""Checkpoints saved at 4 ranks, loaded at 4, 1, 2 and 3, and read by transformers: FSDP's and DeepSpeed's."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import checkpoints
from course_lib.checkpoints import CheckpointError
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SAVED_AT, END, BATCH, SEQ_LEN = 3, 6, 12, 32
SHAPE = dict(layers=2, hidden=64, intermediate=176)
ZERO = ["zero1", "zero2", "zero3"] if importlib.util.find_spec("deepspeed") else []
RUNS = ["fsdp", "fsdp async, dropout", *ZERO]
OUTLIVE = ["fsdp", *ZERO]

# Another number of ranks adds the gradients' slices up in another order: up to 2e-7 was seen after three steps. Moments
# that are not loaded move the second loss by 1e-3, a step counter that starts again by 1e-2.
TOLERANCE = 1e-6


class FsdpRun:
    """The tiny Llama under fully_shard, AdamW and a scheduler whose rate differs at each step."""

    def __init__(self, name: str, seed: int) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model = tiny_llama(seed=seed, **SHAPE)
        for layer in self.model.model.layers:
            layer.self_attn.attention_dropout = 0.1 if "dropout" in name else 0.0
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, END)
        self.target = dict(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.asynchronous = "async" in name

    def step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss

    def moments(self):
        for p in self.model.parameters():
            state = self.optimizer.state[p]
            yield from (state["exp_avg"].full_tensor(), state["exp_avg_sq"].full_tensor(), state["step"])

    def weights(self):
        return {name: p.full_tensor() for name, p in self.model.named_parameters()}


class ZeroRun:
    """The same in a DeepSpeed engine, with its own scheduler."""

    asynchronous = False

    def __init__(self, name: str, seed: int) -> None:
        from course_lib.training.sharded.zero_config import zero_config
        from course_lib.training.sharded.zero_engine import initialize

        config = zero_config(int(name[-1]), ranks=dist.get_world_size(), global_batch=BATCH, lr=1e-2)
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": END}}
        self.engine = initialize(tiny_llama(seed=seed, **SHAPE), config)
        self.target = dict(engine=self.engine)

    def step(self, batch):
        loss = self.engine(input_ids=batch, labels=batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def moments(self):
        from deepspeed.utils import safe_get_full_optimizer_state

        if hasattr(self.engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()  # DeepSpeed itself does so at the first step
        for p in self.engine.module.parameters():
            yield from (safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq"))

    def weights(self):
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p) for name, p in self.engine.module.named_parameters()}


def built(name: str, seed: int):
    torch.set_num_threads(1)
    return (ZeroRun if "zero" in name else FsdpRun)(name, seed)


def trained(run, first: int, last: int) -> list[float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(first, last):
        batch = sample_batch(step, global_batch=BATCH, seq_len=SEQ_LEN, rank=rank, world_size=world_size)
        loss = run.step(batch).detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    return losses


def digest(tensors) -> str:
    """SHA-256 over the bytes of whole tensors."""
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()


def save_and_go_on(root: str) -> dict:
    """Save on the way, train to the end, and once more from the checkpoint to the end."""
    told = {}
    for name in RUNS:
        run = built(name, seed=0)
        torch.manual_seed(dist.get_rank())  # dropout differs from rank to rank
        losses = trained(run, 0, SAVED_AT)
        save = checkpoints.save_async if run.asynchronous else checkpoints.save
        path = save(f"{root}/{name}", SAVED_AT, extra={"next": [SAVED_AT, "sentence"]}, **run.target)
        told[name] = dict(moments=digest(run.moments()), weights=digest(run.weights().values()))
        losses += trained(run, SAVED_AT, END)  # the asynchronous one is being written meanwhile
        told[name] |= dict(losses=losses, path=path.result() if run.asynchronous else path)
    return told | {"resumed": resume(root, RUNS)}


def resume(root: str, names: list[str]) -> dict:
    told = {}
    for name in names:
        run = built(name, seed=9)  # other weights, and other random numbers
        extra = checkpoints.load(f"{root}/{name}", **run.target)
        told[name] = dict(moments=digest(run.moments()), weights=digest(run.weights().values()), extra=extra)
        told[name]["losses"] = trained(run, extra["step"], END)
    return told | ({"refused": what_it_says(root)} if dist.get_world_size() == 2 else {})


@pytest.fixture(scope="module")
def root(private_tmp, tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(root):
    """By rank: what the run of 4 ranks found."""
    results = launch(save_and_go_on, str(root), ranks=4, quiet=True, timeout=240).results
    damage(root)
    return results


@pytest.fixture(scope="module")
def resumed(root, saved):
    """By number of ranks, by rank: what a run found that goes on from there."""
    found = {n: launch(resume, str(root), OUTLIVE, ranks=n, quiet=True, timeout=240).results for n in (1, 2, 3)}
    return found | {4: [told["resumed"] for told in saved]}


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_is_told_the_same_path(name, saved, root):
    assert {told[name]["path"] for told in saved} == {root / name / "step-00000003"}
    assert sorted(p.name for p in (root / name).iterdir()) == [".lock", "step-00000003"]
    told = checkpoints.verify(root / name / "step-00000003")
    assert (told.step, told.world_size, told.kind) == (3, 4, "zero" if "zero" in name else "fsdp")
    assert told.model["model.embed_tokens.weight"] == ("float32", (256, 64))


@pytest.mark.parametrize("name", RUNS)
def test_resumed_at_as_many_ranks_it_goes_on_bit_for_bit(name, saved, resumed):
    for before, after in zip(saved, resumed[4], strict=True):
        assert before[name]["losses"][0] > before[name]["losses"][-1] + 0.1  # it learns something
        assert after[name]["losses"] == before[name]["losses"][SAVED_AT:]
        assert after[name]["extra"] == {"next": [3, "sentence"], "step": 3}


@pytest.mark.parametrize("name", OUTLIVE)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resumed_at_other_ranks_it_holds_the_same_and_goes_on(name, ranks, saved, resumed):
    for after in resumed[ranks]:
        assert after[name]["moments"] == saved[0][name]["moments"]
        assert after[name]["weights"] == saved[0][name]["weights"]
        for loss, whole in zip(after[name]["losses"], saved[0][name]["losses"][SAVED_AT:], strict=True):
            assert loss == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.parametrize("name", OUTLIVE)
def test_transformers_reads_it(name, saved, root, tmp_path):
    from transformers import AutoModelForCausalLM

    out = checkpoints.to_hugging_face(root / name, tmp_path / "model", tiny_llama(**SHAPE).config)
    assert {"config.json", "model.safetensors"} <= {p.name for p in out.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert digest(p for _, p in model.named_parameters()) == saved[0][name]["weights"]
    batch = sample_batch(SAVED_AT, global_batch=BATCH, seq_len=SEQ_LEN)
    with torch.no_grad():
        loss = model(input_ids=batch, labels=batch).loss.item()
    assert loss == pytest.approx(saved[0][name]["losses"][SAVED_AT], rel=TOLERANCE)
    with pytest.raises(FileExistsError, match="is there already"):
        checkpoints.to_hugging_face(root / name, out, model.config)


def test_a_config_of_another_model_is_told(saved, root, tmp_path):
    for sizes, word in (({"layers": 3}, "lacks 'model.layers.2"), ({"layers": 1}, "adds 'model.layers.1")):
        with pytest.raises(CheckpointError, match=word):
            checkpoints.to_hugging_face(root / "fsdp", tmp_path / "model", tiny_llama(**{**SHAPE, **sizes}).config)
    assert not list(tmp_path.iterdir())


def what_it_says(root: str) -> list[tuple[str, bool]]:
    """Each refusal's sentence, and whether the model was left as it was."""
    run, other = built("fsdp", seed=9), tiny_llama(layers=1, hidden=64, intermediate=176)
    half = tiny_llama(seed=9, **SHAPE).to(torch.bfloat16)
    adam = torch.optim.Adam(run.model.parameters())
    attempts = [
        ("fsdp", dict(model=other)),
        ("fsdp", dict(model=half)),
        ("fsdp", dict(model=run.model, optimizer=adam)),
        ("nowhere", dict(model=run.model)),
        ("flipped", dict(model=run.model)),
        ("hanging", dict(model=run.model)),
        *([("zero2", dict(model=run.model))] if ZERO else []),
        *([("zero2", dict(engine=built("zero1", seed=9).engine))] if ZERO else []),
    ]
    before, said = digest(run.weights().values()), []
    for name, target in attempts:
        try:
            checkpoints.load(f"{root}/{name}", **target)
        except CheckpointError as error:
            said.append(str(error))
    return [*said, before == digest(run.weights().values())]


def damage(root: Path) -> None:
    """Two checkpoints more: one with a flipped bit in a file that only one rank of two reads, one that lacks a file."""
    for name in ("flipped", "hanging"):
        shutil.copytree(root / "fsdp", root / name)
    shard = root / "flipped" / "step-00000003" / "fsdp" / "__2_0.distcp"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    (root / "hanging" / "step-00000003" / "fsdp" / "__1_0.distcp").unlink()


def test_all_ranks_refuse_what_does_not_fit_and_leave_the_model_alone(resumed, root):
    first, second = (told["refused"] for told in resumed[2])
    assert first == second and first[-1] is True
    first = first[:-1]
    words = [
        "is of another model: it has a parameter 'model.layers.1.self_attn.q_proj.weight', and this model has not",
        "'model.embed_tokens.weight' is float32, and this model's bfloat16",
        "holds the state of AdamW, and this run's optimizer is Adam",
        "is no folder: no checkpoint is there",
        "__2_0.distcp has other bytes than when it was saved",
        "lacks its file fsdp/__1_0.distcp",
        "was saved by DeepSpeed: load it into an engine",
        "was saved by ZeRO stage 2 and this engine has stage 1",
    ]
    assert len(first) == len(words) - (0 if ZERO else 2)
    for sentence, word in zip(first, words, strict=False):
        assert word in sentence and "\n" not in sentence and root.name in sentence
