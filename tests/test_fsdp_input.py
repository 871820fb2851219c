"""What FSDP2 is told and what it refuses: prefetch, tied weights, silent fall-backs, wrong choices, resuming."""

from __future__ import annotations

import inspect
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.training.command_line import parse
from course_lib.training.sharded import fsdp, fsdp_sharding

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

TOLERANCE = 1e-5  # as in test_fsdp


def orders(prefetch):
    """What starts first in a forward pass: "g" a gather, a number that block's computing; then calls of fully_shard."""
    told, calls = [], []
    names = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
    gathers, share = [getattr(dist, name) for name in names], fsdp_sharding.fully_shard
    for name, gather in zip(names, gathers, strict=True):  # the older and the newer name of what FSDP2 calls
        setattr(dist, name, lambda *args, gather=gather, **kwargs: (told.append("g"), gather(*args, **kwargs))[1])
    fsdp_sharding.fully_shard = lambda module, **how: (calls.append(how), share(module, **how))[1]
    try:
        net = fsdp_sharding.shard(tiny_llama(seed=0), prefetch=prefetch, offload=True, reshard_after_forward=False)
        for i, block in enumerate(fsdp_sharding.blocks(net)):
            block.register_forward_pre_hook(lambda *_, i=i: told.append(str(i)))
        batch = sample_batch(0, global_batch=2, seq_len=8)
        net(input_ids=batch, labels=batch)
    finally:
        fsdp_sharding.fully_shard = share
        for name, gather in zip(names, gathers, strict=True):
            setattr(dist, name, gather)
    return "".join(told), [(type(how["offload_policy"]), how.get("reshard_after_forward")) for how in calls]


def tied(on_meta):
    """(are they one tensor, its local rows, loss) of a model whose head is its embedding."""
    rank = dist.get_rank()
    whole = tiny_llama(seed=0, tie_embeddings=True)
    if on_meta:
        whole = whole if rank == 0 else None
        net = fsdp_sharding.shard(fsdp_sharding.on_meta(whole), mesh=fsdp_sharding.make_mesh("", "cpu"))
        fsdp_sharding.materialize(net, whole, torch.device("cpu"))
    else:
        net = fsdp_sharding.shard(whole)
    one, rows = net.lm_head.weight is net.model.embed_tokens.weight, net.lm_head.weight.to_local().shape[0]
    batch = sample_batch(0, global_batch=2, seq_len=8)
    return one, rows, net(input_ids=batch, labels=batch).loss.item()  # which leaves the gathered root in its place


def fall_backs():
    """Models that look as if they were sharded, and that are not."""
    plain = tiny_llama(layers=1)
    yield plain, 2, None
    yield DistributedDataParallel(tiny_llama(layers=1)), 2, None
    blocks_only = tiny_llama(layers=1)
    fully_shard(blocks_only.model.layers[0])
    yield blocks_only, 2, None
    a_whole_head = tiny_llama(layers=1)
    fully_shard(a_whole_head, ignored_params={a_whole_head.lm_head.weight})
    yield a_whole_head, 2, None
    early = tiny_llama(layers=1)
    optimizer = torch.optim.AdamW(early.parameters())
    yield fsdp_sharding.shard(early), 2, optimizer
    yield early, 3, None


def said_by(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


WRONG = {
    "method='qlra'": dict(method="qlra"),
    "precision='fp8'": dict(precision="fp8"),
    "wrap='layer'": dict(wrap="layer"),
    "checkpointing='some'": dict(activation_checkpointing="some"),
    "reshard_after_forward='maybe': write yes, no, or": dict(reshard_after_forward="maybe"),
    "reshard_after_forward=2 is no proper divisor of the 2 ranks": dict(reshard_after_forward="2"),
    "reshard_after_forward=0 is no proper divisor": dict(reshard_after_forward="0"),
    "mesh='2x2' takes 4 ranks and there are 2": dict(mesh="2x2"),
    "mesh='2' *: write copies x shards": dict(mesh="2"),
    "mesh='0x2': write copies x shards": dict(mesh="0x2"),
    "mesh='2x1' has one shard a copy": dict(mesh="2x1", offload=True),
    "prefetch=-1: give how many units": dict(prefetch=-1),
    "prefetch=1 has nothing to gather ahead": dict(prefetch=1, wrap="whole"),
    "max_grad_norm=-1: give the greatest norm": dict(max_grad_norm=-1),
    "save_every=-1: give a number": dict(save_every=-1),
    "save_every and resume need a folder": dict(save_every=1),
    "resume need a folder": dict(resume=True),
    "meta_init cannot quantize": dict(meta_init=True, method="qlora"),
    "global_batch=7 does not divide into 2 ranks x 1": dict(global_batch=7),
    "steps=0: give": dict(steps=0),
}


def questions(folder):
    """Everything that two ranks are asked once, in one launch."""
    torch.set_num_threads(1)
    small = dict(global_batch=4, seq_len=8, layers=1)
    saved = [
        fsdp.train(**small, steps=4, checkpoint_dir=folder, save_every=2, save_in_background=background)
        for background in (False, True)
    ]
    dist.barrier()
    return {
        "orders": [orders(prefetch) for prefetch in (0, 2)],
        "tied": [tied(on_meta) for on_meta in (False, True)],
        "fall-backs": [said_by(fsdp_sharding.proof, *case) for case in fall_backs()],
        "wrong": [said_by(fsdp.train, **{"steps": 1, **how}) for how in WRONG.values()],
        "whole": saved[0].losses,
        "resumed": fsdp.train(**small, steps=6, checkpoint_dir=folder, resume=True),
        "straight": fsdp.train(**small, steps=6),
        "from nothing": fsdp.train(**small, steps=1, checkpoint_dir=folder + "/none", resume=True).extra["first_step"],
        "other data": said_by(fsdp.train, **small | dict(seq_len=16), steps=6, checkpoint_dir=folder, resume=True),
    }


@pytest.fixture(scope="module")
def answers(private_tmp, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return launch(questions, folder, ranks=2, quiet=True, timeout=240).results


def test_prefetch_starts_gathers_ahead_of_need(answers):
    (by_itself, calls), (ahead, _) = answers[0]["orders"]
    assert by_itself == "gg0g1g2g3"  # the root's, and each block's when it is needed
    assert ahead == "gggg0g123"  # two more behind the block that comes next
    assert calls == 4 * [(CPUOffloadPolicy, False)] + [(CPUOffloadPolicy, None)]  # the root's is FSDP2's own choice


def test_a_tied_head_stays_tied(answers):
    whole = tiny_llama(seed=0, tie_embeddings=True)
    batch = sample_batch(0, global_batch=2, seq_len=8)
    loss = whole(input_ids=batch, labels=batch).loss.item()
    for rank in answers:
        assert rank["tied"] == 2 * [(True, 128, pytest.approx(loss, rel=TOLERANCE))]


def test_what_is_not_sharded_is_told(answers):
    for rank in answers:
        plain, ddp, blocks_only, a_whole_head, early, ranks = rank["fall-backs"]
        assert plain.startswith("RuntimeError: asked for FSDP2 and got LlamaForCausalLM, which shards no parameter")
        assert "got DistributedDataParallel" in ddp and "got LlamaForCausalLM" in blocks_only
        assert "lm_head.weight is whole on every rank" in a_whole_head
        assert "the optimizer steps tensors that are not the model's shards" in early
        assert "asked for FSDP2 on 3 ranks and got 2" in ranks


def test_wrong_choices_are_told_in_a_sentence(answers):
    for rank in answers:
        for (words, how), said in zip(WRONG.items(), rank["wrong"], strict=True):
            assert said.startswith("ValueError: ") and all(part in said for part in words.split(" *")), (how, said)
            assert "\n" not in said


def test_a_run_goes_on_where_its_checkpoint_was(answers):
    for rank in answers:
        resumed, straight = rank["resumed"], rank["straight"]
        assert resumed.extra["first_step"] == 4 and rank["from nothing"] == 0
        assert rank["whole"] + resumed.losses == straight.losses  # the same sums in the same order: bit for bit
        assert "ValueError: seq_len=16" in rank["other data"] and "another order of the data" in rank["other data"]


def test_the_way_across_from_fsdp1_names_what_is_there():
    old = set(inspect.signature(FSDP1.__init__).parameters) - {"self", "module"}
    named = {
        word.strip() for key in fsdp_sharding.FROM_FSDP1 for word in key.replace("=", " ").replace(",", " ").split()
    }
    assert old <= named, old - named
    assert {strategy.name for strategy in ShardingStrategy} <= named
    assert {"param_dtype", "reduce_dtype"} <= set(inspect.signature(MixedPrecisionPolicy).parameters)
    for key, new in fsdp_sharding.FROM_FSDP1.items():
        for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "unshard"):
            assert method not in new or hasattr(FSDPModule, method), key


def test_the_command_line_has_every_choice():
    told = parse(
        fsdp.train,
        "--method lora --reshard-after-forward 2 --mesh 2x4 --offload --meta-init --max-grad-norm 0.5".split(),
    )
    assert (told["method"], told["reshard_after_forward"], told["mesh"], told["max_grad_norm"]) == (
        "lora",
        "2",
        "2x4",
        0.5,
    )
    assert told["offload"] is told["meta_init"] is True and told["resume"] is False
