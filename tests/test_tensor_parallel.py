"""Every matrix cut over two ranks, by hand and by DTensor: losses, gradients, bytes and collectives as one rank's and told."""

from __future__ import annotations

import sys
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RankFailed, launch
from course_lib.memory import shape_of
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.parallel.traffic import tensor_parallel as formula
from course_lib.training import single
from course_lib.training.command_line import parse
from course_lib.training.tensor import tensor_parallel
from course_lib.training.tensor.divisibility import check_split
from course_lib.training.tensor.model import TensorParallelLlama

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

BATCH, TOKENS = 4, 32
STEPS = {("hand", False): 20, ("hand", True): 20, ("dtensor", False): 20, ("dtensor", True): 5}
SETTINGS = list(STEPS)  # (implementation, sequence_parallel)
BY_NAME = {  # of a part by hand -> of the whole
    "blocks": "model.layers",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attention": "self_attn",
    "head": "lm_head",
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    **{short: f"{short}_proj" for short in ("q", "k", "v", "o", "gate", "up", "down")},
}

# fp32 rounds to 6e-8 of a value, and sums of two parts round otherwise than one sum: up to 2.1e-7 seen after 20 steps
TOLERANCE = 1e-5


def all_settings():
    torch.set_num_threads(1)
    sizes = dict(global_batch=BATCH, seq_len=TOKENS)
    outcomes = {
        how: tensor_parallel.train(implementation=how[0], sequence_parallel=how[1], steps=steps, **sizes)
        for how, steps in STEPS.items()
    }
    dist.barrier()
    by_hand = {}
    for sequence_parallel in (False, True):
        for vocab_parallel in (False, True):
            for tied in (False, True):
                model = TensorParallelLlama(
                    tiny_llama(layers=2, tie_embeddings=tied),
                    dist.group.WORLD,
                    sequence_parallel=sequence_parallel,
                    vocab_parallel=vocab_parallel,
                )
                batch = sample_batch(0, global_batch=BATCH, seq_len=TOKENS)
                loss = model(batch, batch)
                loss.backward()
                model.sum_partial_gradients()
                dist.barrier()
                gradients = {name: p.grad for name, p in model.named_parameters()}
                by_hand[sequence_parallel, vocab_parallel, tied] = loss.item(), gradients
    return outcomes, by_hand


@pytest.fixture(scope="module")
def run(private_tmp):
    return launch(all_settings, ranks=2, quiet=True, timeout=250)


@pytest.fixture(scope="module")
def one_rank():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    outcome = single.train(steps=max(STEPS.values()), global_batch=BATCH, seq_len=TOKENS)
    torch.set_num_threads(threads)
    return outcome


@pytest.mark.parametrize("how", SETTINGS)
def test_it_trains_as_one_rank_does(how, run, one_rank):
    for rank, (outcomes, _) in enumerate(run.results):
        outcome = outcomes[how]
        assert (outcome.rank, outcome.world_size) == (rank, 2)
        assert outcome.wrapper == ("TensorParallelLlama" if how[0] == "hand" else "LlamaForCausalLM")
        assert len(outcome.losses) == STEPS[how] and outcome.losses == run.results[0][0][how].losses
        for ours, theirs in zip(outcome.losses, one_rank.losses, strict=False):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.parametrize("how", SETTINGS)
def test_a_rank_holds_half(how, run, one_rank):
    """Half of all matrices; the 9 norms of 128 are whole."""
    norms = 9 * 128
    for outcomes, _ in run.results:
        outcome = outcomes[how]
        assert outcome.extra["total_elements"] == 803_968
        assert outcome.extra["local_elements"] == (803_968 - norms) // 2 + norms == 402_560
        assert outcome.memory["gradients"] == 4 * 402_560
        assert outcome.memory["optimizer_state"] == pytest.approx(8 * 402_560, rel=1e-3)
        assert outcome.memory["activations"] < 0.75 * one_rank.memory["activations"]


def test_sequence_parallelism_keeps_fewer_activations(run):
    for how in ("hand", "dtensor"):
        activations = [run.results[0][0][how, cut].memory["activations"] for cut in (False, True)]
        assert activations[1] < 0.9 * activations[0]


def told(sequence_parallel, layers=4, vocab_parallel=True):
    """(kind, bytes that one of two ranks puts in) -> how many, of the formula."""
    shape = shape_of(tiny_llama(layers=layers, device="meta").config)
    messages = formula(
        shape,
        tp=2,
        micro_batch_size=BATCH,
        seq_len=TOKENS,
        element=4,
        sequence_parallel=sequence_parallel,
        vocab_parallel=vocab_parallel,
    )
    return Counter(
        {(m.collective, m.num_bytes // (2 if m.collective == "all_gather" else 1)): m.count for m in messages}
    )


def of_steps(run, rank):
    """What a rank issued, by setting of training: [(kind, bytes)], and then by model built by hand."""
    log = [c for c in run.collectives if c.rank == rank]
    barriers = [i for i, c in enumerate(log) if c.kind == "barrier"]
    stretches = [log[a + 1 : b] for a, b in zip([-1, *barriers], barriers, strict=False)]
    return [[(c.kind, c.bytes) for c in stretch] for stretch in stretches]


@pytest.mark.parametrize("how", SETTINGS)
def test_collectives_are_those_of_the_formula(how, run):
    expected = told(how[1])
    if how == ("dtensor", True):  # it sums the gradients of the 9 norms one by one, where the formula joins them
        assert expected.pop(("all_reduce", 9 * 512)) == 1
        expected["all_reduce", 512] += 9  # as long as the 3 of the loss: 4 x 32 numbers
    for rank, (outcomes, _) in enumerate(run.results):
        log = of_steps(run, rank)[SETTINGS.index(how)]
        scatters = [entry for entry in log if entry[0] == "scatter"]  # DTensor deals out rank 0's matrices, once
        assert len(scatters) == (4 * 7 + 2 if how[0] == "dtensor" else 0)
        assert Counter(log) - Counter(scatters) == {key: STEPS[how] * count for key, count in expected.items()}
        by_kind = Counter()
        for (kind, size), count in expected.items():
            by_kind[kind] += count * size
        found = outcomes[how].extra["collectives_per_step"]
        assert {kind: size for kind, (_, size) in found.items()} == by_kind
        assert sum(count for count, _ in found.values()) == sum(expected.values())


CASES = [(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)]


@pytest.mark.parametrize(("sequence_parallel", "vocab_parallel", "tied"), CASES)
def test_gradients_are_parts_of_the_whole_s(sequence_parallel, vocab_parallel, tied, run, one_thread):
    whole = tiny_llama(layers=2, tie_embeddings=tied)
    batch = sample_batch(0, global_batch=BATCH, seq_len=TOKENS)
    loss = whole(input_ids=batch, labels=batch).loss
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for rank, (_, by_hand) in enumerate(run.results):
        ours, gradients = by_hand[sequence_parallel, vocab_parallel, tied]
        assert ours == pytest.approx(loss.item(), rel=1e-6)
        assert len(gradients) == len(expected)
        for name, gradient in gradients.items():
            names = name.split(".")
            is_mlp = "mlp" in names
            theirs = expected[".".join(part if is_mlp and part == "mlp" else BY_NAME.get(part, part) for part in names)]
            for dim, (mine, all_of_it) in enumerate(zip(gradient.shape, theirs.shape, strict=True)):
                if mine != all_of_it:
                    theirs = theirs.chunk(2, dim)[rank]
            assert torch.allclose(gradient, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item() + 1e-9), name


def test_collectives_without_the_vocabulary_cut(run):
    log = of_steps(run, 0)[len(SETTINGS) + 1 :]  # one barrier more before
    for (sequence_parallel, vocab_parallel, _), stretch in zip(CASES, log, strict=True):
        assert Counter(stretch) == told(sequence_parallel, layers=2, vocab_parallel=vocab_parallel)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(heads=4, kv_heads=2), "2 kv heads do not divide over 4 .* take one of 1, 2 ranks"),
        (dict(heads=6, kv_heads=2, hidden=96), "6 attention heads do not divide over 4"),
        (dict(heads=4, kv_heads=4, intermediate=354), "354 columns of the MLP"),
        (dict(heads=4, kv_heads=4, vocab=257), "257 tokens .* or pad the vocabulary to 260"),
    ],
)
def test_what_does_not_divide_is_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        check_split(tiny_llama(device="meta", **sizes).config, 4)


def test_bad_calls_are_refused_by_training(private_tmp):
    with pytest.raises(ValueError, match="sequence parallelism cuts the sequence"):
        check_split(tiny_llama(device="meta").config, 2, seq_len=33, sequence_parallel=True)
    with pytest.raises(ValueError, match="tp=0: give a whole number"):
        check_split(tiny_llama(device="meta").config, 0)
    with pytest.raises(RankFailed, match="did you mean 'dtensor'"):
        launch(tensor_parallel.train, implementation="dtensors", ranks=1, quiet=True)
    assert parse(tensor_parallel.train, ["--sequence-parallel", "--layers", "2"])["sequence_parallel"] is True
