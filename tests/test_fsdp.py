"""FSDP2 against one rank on the whole batch: the same losses and norms, and bytes, collectives and sentences as told."""

from __future__ import annotations

import math
import sys
from collections import Counter
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from course_lib.data import sample_batch
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.training import fsdp, fsdp_sharding
from course_lib.training.building import prepare, trainable
from course_lib.training.command_line import parse

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

STEPS, LONG = 3, 20
SIZES = dict(steps=STEPS, global_batch=12, seq_len=32)

# fp32 rounds to 6e-8 of a value, and the ranks' parts add up in another order than the whole batch: up to 3e-7 seen
# after 20 steps. A norm over one rank's shards alone would be off by 0.3, gradients summed in place of averaged by 1.
TOLERANCE = 1e-5

ON_TWO = {
    "yes": dict(clip=1.0),
    "20 steps": dict(steps=LONG),
    "no": dict(reshard="no"),
    "whole": dict(wrap="whole"),
    "accumulate": dict(accumulate=2, clip=1.0),
    "every micro-batch": dict(accumulate=2, sync_every_micro_batch=True, clip=1.0),
    "full checkpointing": dict(checkpointing="full"),
    "prefetch": dict(prefetch=2),
    "offload": dict(offload=True, clip=1.0),
    "meta": dict(meta_init=True),
    "meta, offload": dict(meta_init=True, offload=True),
    "lora": dict(method="lora"),
    "lora, meta": dict(method="lora", meta_init=True),
    "qlora": dict(method="qlora"),
    "qlora, no": dict(method="qlora", reshard="no", offload=True),
    "bf16-mixed": dict(precision="bf16-mixed", steps=2),
    "bf16": dict(precision="bf16", steps=2),
    "qlora, bf16-mixed": dict(method="qlora", precision="bf16-mixed", steps=2),
    "fp16-mixed": dict(precision="fp16-mixed", clip=1.0, steps=2),
}
ON_FOUR = {
    "yes": dict(prefetch=1),
    "2x2": dict(mesh="2x2", clip=1.0),
    "2": dict(reshard="2"),
    "2x2, meta": dict(mesh="2x2", meta_init=True, reshard="no", offload=True),
}
ON_THREE = {"yes": dict(clip=1.0), "no": dict(reshard="no", meta_init=True)}
ON_ONE = {"yes": dict(clip=1.0)}
LAUNCHES = {1: ON_ONE, 2: ON_TWO, 3: ON_THREE, 4: ON_FOUR}
EVERY = [(ranks, name) for ranks, settings in LAUNCHES.items() for name in settings]
SIXTEEN_BITS = {"bf16-mixed": 3e-3, "bf16": 1e-2, "qlora, bf16-mixed": 3e-3, "fp16-mixed": 3e-4}  # bf16 rounds to 4e-3


def several(settings):
    torch.set_num_threads(1)  # a small batch gains nothing from two, and loses much on a busy machine
    return {name: fsdp.train(**{**SIZES, **how}) for name, how in settings.items()}


class Runs(dict):
    """The launch of each number of ranks, started when it is first asked for."""

    def __missing__(self, ranks):
        self[ranks] = launch(several, LAUNCHES[ranks], ranks=ranks, quiet=True, timeout=280)
        return self[ranks]


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs()


@cache
def one_rank(method="full", clip=0.0):
    """Losses and norms of one process on the whole batch, by a loop that knows nothing of shards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    net = prepare(tiny_llama(seed=0), method=method, device="cpu")
    optimizer = torch.optim.AdamW(trainable(net), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS if clip or method != "full" else LONG):
        batch = sample_batch(step, global_batch=12, seq_len=32)
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(trainable(net), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.set_num_threads(threads)
    return losses, norms


def off_by(ours, theirs):
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_it_trains_as_one_rank_does(ranks, name, runs):
    how = LAUNCHES[ranks][name]
    losses, norms = one_rank(how.get("method", "full"), how.get("clip", 0.0))
    steps = how.get("steps", STEPS)
    allowed = SIXTEEN_BITS.get(name, TOLERANCE)
    for rank, outcomes in enumerate(runs[ranks].results):
        outcome = outcomes[name]
        assert (outcome.rank, outcome.world_size) == (rank, ranks)
        assert outcome.wrapper == ("FSDPPeftModelForCausalLM" if "method" in how else "FSDPLlamaForCausalLM")
        assert outcome.losses == runs[ranks].results[0][name].losses
        assert off_by(outcome.losses, losses[:steps]) < allowed
        assert off_by(outcome.extra["gradient_norms"], norms[:steps]) < allowed if "clip" in how else not norms
    if "clip" in how:
        assert max(norms) > how["clip"] and off_by(losses, one_rank()[0][:STEPS]) > 1e-5  # it did clip


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_sixteen_bits_are_not_fp32(name, runs):
    how = ON_TWO[name]
    losses, _ = one_rank(how.get("method", "full"), how.get("clip", 0.0))
    assert off_by(runs[2].results[0][name].losses, losses[:2]) > 1e-7


def parameters_of(how):
    """(shape, bytes a number, is it trained) of each parameter, from the model as one process has it."""
    method, precision = how.get("method", "full"), how.get("precision", "fp32")
    frozen = 2 if precision == "bf16" or "mixed" in precision and method != "full" else 4
    net = prepare(tiny_llama(seed=0), method=method.removeprefix("q") if method == "qlora" else method, device="cpu")
    for name, p in net.named_parameters():
        size = 4 if p.requires_grad and precision != "bf16" else frozen
        packed = (
            method == "qlora" and "base_layer" in name
        )  # two weights a byte, shown to FSDP2 as numbers like the rest
        yield ((p.numel() // 2 // size, 1) if packed else tuple(p.shape)), size, p.requires_grad


def at_rest(how, shards, rank):
    """(parameters, gradients, optimizer state) in bytes: every share padded to the largest, but for Adam's moments."""
    parameters = gradients = moments = 0
    for shape, size, trained in parameters_of(how):
        row, share = math.prod(shape[1:]) * size, math.ceil(shape[0] / shards)
        parameters += share * row
        if trained:
            gradients += share * row
            moments += 2 * max(0, min(share, shape[0] - share * rank)) * row + 4  # and a counter of steps
    return parameters + 2 * 16 * 4, gradients, moments  # two buffers of 16 rotary frequencies are whole on every rank


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_what_lies_on_each_rank(ranks, name, runs):
    how = LAUNCHES[ranks][name]
    shards = 2 if "mesh" in how else ranks
    for rank, outcomes in enumerate(runs[ranks].results):
        found = outcomes[name].memory
        told = tuple(found[what] for what in ("parameters", "gradients", "optimizer_state"))
        assert told == at_rest(how, shards, rank % shards)
        if name == "yes" and ranks > 1:
            extra = outcomes[name].extra
            assert (extra["parameters"], extra["units"], extra["ranks"]) == (803_968, 5, ranks)
            assert extra["local"] == pytest.approx(803_968 / ranks, rel=0.02)


def test_uneven_rows_are_uneven(runs):
    assert len({outcomes["yes"].extra["local"] for outcomes in runs[3].results}) == 2


def test_constants_of_four_bits_are_whole_on_every_rank(runs):
    whole = {outcomes["qlora"].extra["quantization_constants"] for outcomes in runs[2].results}
    assert len(whole) == 1 and whole.pop() > 40_000


def last_step(runs, ranks, name, rank=0):
    """[(kind, bytes put in, ranks that took part)] of a setting's last step. Every step ends with a report of 4 bytes."""
    told = [c for c in runs[ranks].collectives if c.rank == rank]
    reports = [i for i, c in enumerate(told) if (c.kind, c.bytes) == ("all_reduce", 4)]
    settings = list(LAUNCHES[ranks])
    assert "fp16-mixed" not in settings[: settings.index(name)]  # its scaler reports by 4 bytes as well
    end = sum(LAUNCHES[ranks][before].get("steps", STEPS) for before in settings[: settings.index(name) + 1])
    return [(c.kind, c.bytes, len(c.group)) for c in told[reports[end - 2] + 1 : reports[end - 1]]]


ROOT, BLOCK = 65_664 * 4, 184_576 * 4  # bytes of the embedding, last norm and head; of a block


@pytest.mark.parametrize(
    ("name", "gathers", "scatters"),
    [
        ("20 steps", [ROOT] + 8 * [BLOCK], 4 * [BLOCK] + [ROOT]),  # a block forward and backward, the root once
        ("no", [ROOT] + 4 * [BLOCK], 4 * [BLOCK] + [ROOT]),
        ("whole", 2 * [ROOT + 4 * BLOCK], [ROOT + 4 * BLOCK]),
        ("accumulate", 2 * ([ROOT] + 8 * [BLOCK]), 4 * [BLOCK] + [ROOT]),
        ("every micro-batch", 2 * ([ROOT] + 8 * [BLOCK]), 2 * (4 * [BLOCK] + [ROOT])),
        ("full checkpointing", [ROOT] + 8 * [BLOCK], 4 * [BLOCK] + [ROOT]),
        ("prefetch", [ROOT] + 8 * [BLOCK], 4 * [BLOCK] + [ROOT]),
        ("bf16-mixed", [ROOT // 2] + 8 * [BLOCK // 2], 4 * [BLOCK] + [ROOT]),
        ("bf16", [ROOT // 2] + 8 * [BLOCK // 2], 4 * [BLOCK // 2] + [ROOT // 2]),
        ("lora", [ROOT] + 8 * [BLOCK + 149_504], 4 * [149_504]),  # 37,376 numbers in a block's adapters
    ],
)
def test_a_step_s_collectives_on_two_ranks(name, gathers, scatters, runs):
    for rank in range(2):
        step = last_step(runs, 2, name, rank)
        assert [2 * size for kind, size, _ in step if kind == "all_gather"] == gathers
        assert [size for kind, size, _ in step if kind == "reduce_scatter"] == scatters
        rest = [(kind, size) for kind, size, _ in step if kind not in ("all_gather", "reduce_scatter")]
        assert rest == ([("all_reduce", 39 * 4)] if "clip" in ON_TWO[name] else [])  # one norm a parameter


def test_a_number_gathers_again_among_neighbours(runs):
    step = last_step(runs, 4, "2")
    assert Counter(step) == {
        ("all_gather", ROOT // 4, 4): 1,
        ("all_gather", BLOCK // 4, 4): 4,
        ("all_gather", BLOCK // 2, 2): 4,
        ("reduce_scatter", BLOCK, 4): 4,
        ("reduce_scatter", ROOT, 4): 1,
    }


def test_copies_of_a_sharded_model_sum_their_shards(runs):
    step = last_step(runs, 4, "2x2")
    assert Counter(step) == {
        ("all_gather", ROOT // 2, 2): 1,
        ("all_gather", BLOCK // 2, 2): 8,
        ("reduce_scatter", BLOCK, 2): 4,
        ("reduce_scatter", ROOT, 2): 1,
        ("all_reduce", BLOCK // 2, 2): 4,
        ("all_reduce", ROOT // 2, 2): 1,
        ("all_reduce", 39 * 4, 2): 1,
    }


def test_the_bytes_that_the_system_counts(runs):
    """gloo's all_gather sends what a ring's does; its reduce_scatter what a ring's all_reduce does, twice as much."""
    for ranks, name in ((2, "20 steps"), (2, "no"), (3, "yes"), (4, "2x2")):
        for rank, outcomes in enumerate(runs[ranks].results):
            step = last_step(runs, ranks, name, rank)
            factor = {"all_gather": lambda n: n - 1, "reduce_scatter": lambda n: 2 * (n - 1) / n}
            factor["all_reduce"] = factor["reduce_scatter"]
            sent = sum(factor[kind](n) * size for kind, size, n in step)
            counted = outcomes[name].wire_bytes
            assert counted is None or sent < counted < 1.02 * sent


def test_a_whole_unit_peaks_higher_and_checkpointing_keeps_less(runs):
    def least(
        name, what="peak"
    ):  # gloo's threads let a buffer go when they come to it: now and then one more is counted
        return min(outcomes[name].memory[what] for outcomes in runs[2].results)

    assert least("whole") > least("20 steps") + BLOCK
    assert least("accumulate") - least("accumulate", "activations") > (
        least("every micro-batch") - least("every micro-batch", "activations") + BLOCK  # whole gradients wait
    )
    assert 5 * least("full checkpointing", "activations") < least("20 steps", "activations")
    assert least("full checkpointing") < least("20 steps")


def test_meta_init_changes_nothing(runs):
    for outcomes in runs[2].results:
        assert outcomes["meta"].losses == outcomes["20 steps"].losses[:STEPS]
        assert outcomes["lora, meta"].losses == outcomes["lora"].losses


def orders(prefetch):
    """What starts first in a forward pass: "g" a gather, a number that block's computing; then calls of fully_shard."""
    import torch.distributed as dist

    told, calls = [], []
    gather, share = dist.all_gather_into_tensor, fsdp_sharding.fully_shard
    dist.all_gather_into_tensor = lambda *args, **kwargs: (told.append("g"), gather(*args, **kwargs))[1]
    fsdp_sharding.fully_shard = lambda module, **how: (calls.append(how), share(module, **how))[1]
    try:
        net = fsdp_sharding.shard(tiny_llama(seed=0), prefetch=prefetch, offload=True, reshard=False)
        for i, block in enumerate(fsdp_sharding.blocks(net)):
            block.register_forward_pre_hook(lambda *_, i=i: told.append(str(i)))
        batch = sample_batch(0, global_batch=2, seq_len=8)
        net(input_ids=batch, labels=batch)
    finally:
        dist.all_gather_into_tensor, fsdp_sharding.fully_shard = gather, share
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
    from torch.nn.parallel import DistributedDataParallel

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
    "checkpointing='some'": dict(checkpointing="some"),
    "reshard='maybe': write yes, no, or": dict(reshard="maybe"),
    "reshard=2 is no proper divisor of the 2 ranks": dict(reshard="2"),
    "reshard=0 is no proper divisor": dict(reshard="0"),
    "mesh='2x2' takes 4 ranks and there are 2": dict(mesh="2x2"),
    "mesh='2' *: write copies x shards": dict(mesh="2"),
    "mesh='0x2': write copies x shards": dict(mesh="0x2"),
    "mesh='2x1' has one shard a copy": dict(mesh="2x1", offload=True),
    "prefetch=-1: give how many units": dict(prefetch=-1),
    "prefetch=1 has nothing to gather ahead": dict(prefetch=1, wrap="whole"),
    "clip=-1: give the greatest norm": dict(clip=-1),
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
        fsdp.train(**small, steps=4, checkpoints=folder, save_every=2, save_in_background=background)
        for background in (False, True)
    ]
    dist.barrier()
    return {
        "orders": [orders(prefetch) for prefetch in (0, 2)],
        "tied": [tied(on_meta) for on_meta in (False, True)],
        "fall-backs": [said_by(fsdp_sharding.proof, *case) for case in fall_backs()],
        "wrong": [said_by(fsdp.train, **{"steps": 1, **how}) for how in WRONG.values()],
        "whole": saved[0].losses,
        "resumed": fsdp.train(**small, steps=6, checkpoints=folder, resume=True),
        "straight": fsdp.train(**small, steps=6),
        "from nothing": fsdp.train(**small, steps=1, checkpoints=folder + "/none", resume=True).extra["first_step"],
        "other data": said_by(fsdp.train, **small | dict(seq_len=16), steps=6, checkpoints=folder, resume=True),
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
    import inspect

    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy

    old = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self", "module"}
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
    told = parse(fsdp.train, "--method lora --reshard 2 --mesh 2x4 --offload --meta-init --clip 0.5".split())
    assert (told["method"], told["reshard"], told["mesh"], told["clip"]) == ("lora", "2", "2x4", 0.5)
    assert told["offload"] is told["meta_init"] is True and told["resume"] is False
