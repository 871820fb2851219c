"""Expert parallelism: every rank holds all of the attention, some of the experts, and its share of the batch.

Each MLP of the tiny Llama is replaced by a mixture of experts. Ranks are data-parallel for what they all hold, and exchange
tokens for the rest (GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.launch import rank_device
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.training.command_line import run
from course_lib.training.gradients import all_reduce_gradients
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.sequence.expert_parallel_layer import MixtureOfExperts, check_choice, check_spread


def train(
    *,
    experts: int = 4,
    top_k: int = 1,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    layers: int = 4,
    hidden: int = 128,
    intermediate: int = 176,
    lr: float = 1e-3,
) -> Outcome:
    """Train a small mixture-of-experts Llama; the default process group must be up.

    Args:
        experts: in each block, spread over the ranks.
        top_k: experts that see a token.
        layers, hidden: of the tiny model.
        intermediate: width inside an expert.
        steps, global_batch, seq_len, lr: as in ``course_lib.training.ddp``.

    Returns:
        In ``extra``: experts (the numbers of those on this rank), tokens_per_expert (of the last step's whole batch: a
        list a block), tokens_received (of the last step, a list a block: rows that came here, by the rank they came
        from), routed_bytes (one figure a step: what the routing made this rank send to others), local_elements,
        total_elements, expert_elements (numbers on this rank, of the whole model, and of them in experts).
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    check_choice(experts, top_k)
    check_spread(experts, ranks)
    micro_batch_size(steps=steps, global_batch=global_batch, ranks=ranks)
    device = rank_device()
    model = tiny_llama(layers=layers, hidden=hidden, intermediate=intermediate)
    mixtures = give_experts(model, experts=experts, top_k=top_k, seed=0)
    total = sum(p.numel() for p in model.parameters())
    in_experts = sum(p.numel() for mixture in mixtures for p in mixture.experts.parameters())
    for mixture in mixtures:
        mixture.spread(dist.group.WORLD)
    model.to(device).train()
    own = [p for mixture in mixtures for p in mixture.experts.parameters()]
    mine = {id(p) for p in own}
    common = [p for p in model.parameters() if id(p) not in mine]
    update = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    observation = observe(model, update)
    losses, routed = [], []
    for step in range(steps):
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=ranks).to(device)
        with observation.step(tokens=batch.numel()):
            loss = model(input_ids=batch, labels=batch).loss  # two all-to-alls a block in here
            loss.backward()  # and two more
            average(common, own, ranks)
            update.step()
            update.zero_grad()
        routed.append(sum(mixture.routing.bytes_to_others for mixture in mixtures))
        loss = loss.detach()
        dist.all_reduce(loss)  # for the report only
        losses.append(loss.item() / ranks)
    chosen = torch.tensor([mixture.routing.counts for mixture in mixtures], device=device)
    dist.all_reduce(chosen)
    return outcome(
        observation,
        losses,
        type(mixtures[0]).__name__,
        experts=list(mixtures[0].own),
        tokens_per_expert=chosen.tolist(),
        tokens_received=[mixture.routing.received for mixture in mixtures],
        routed_bytes=routed,
        local_elements=sum(p.numel() for p in model.parameters()),
        total_elements=total,
        expert_elements=in_experts,
    )


def give_experts(model: torch.nn.Module, *, experts: int, top_k: int, seed: int) -> list[MixtureOfExperts]:
    """Put a mixture of experts in the place of each block's MLP, equally drawn on every rank; the mixtures come back."""
    mixtures = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in model.model.layers:
            sizes = model.config.hidden_size, model.config.intermediate_size
            block.mlp = MixtureOfExperts(*sizes, experts=experts, top_k=top_k)
            mixtures.append(block.mlp)
    return mixtures


@torch.no_grad()
def average(common: list[torch.nn.Parameter], own: list[torch.nn.Parameter], ranks: int) -> None:
    """Make of every gradient that of the mean of all ranks' losses.

    What all ranks hold has observation its rank's tokens alone, so its gradients are summed over the ranks. An expert has observation
    everyone's tokens already; its gradient is whole, and only the mean's division is left.
    """
    all_reduce_gradients(common, mean=True)
    for parameter in own:
        parameter.grad /= ranks


if __name__ == "__main__":
    run(train)
