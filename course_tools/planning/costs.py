"""Seconds of an optimizer step, part by part, of many settings at once.

Compute: `block_seconds`. Bytes sent: `course_lib.parallel.traffic`. Links: `Network`. The bubble:
`course_lib.parallel.schedules.ideal_bubble`. What data sheets do not say stands in `Constants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from course_lib.choices import STRATEGIES
from course_lib.memory import flops_per_token
from course_lib.memory.parameters import count, held
from course_lib.parallel import traffic
from course_lib.parallel.grid import Grid
from course_tools.planning.compute import block_seconds, head_seconds
from course_tools.planning.network import Network
from course_tools.planning.question import Question
from course_tools.planning.table import Table, Way

MFU_DEFINITION = (
    "MFU: 6 FLOPs (4 where the weights are frozen) x parameters that multiply, output layer included, attention over the "
    "keys in sight, recomputation not counted, over the card's dense 16-bit peak"
)


def step_parts(question: Question, table: Table) -> dict[str, np.ndarray]:
    """Seconds by part, a row's step takes their sum."""
    shape, k = question.shape, question.constants
    network = Network(question.machines, k)
    dp, tp, pp, cp = (table.axis(name).astype(float) for name in ("dp", "tp", "pp", "cp"))
    tokens = table.b * (question.seq_len / cp)
    block = block_seconds(question, table, tp, tokens)
    head, logits = head_seconds(question, table, tp, tokens)
    layers = shape.layers

    # The fullest stage sets the pace; the last one has the output layer, and fewer blocks where they do not divide.
    fullest = np.ceil(layers / pp)
    chunk = np.ceil(layers / (pp * table.v))
    last = np.maximum(fullest - (pp * fullest - layers), 1)
    each = block.total
    pace = np.maximum(fullest * each, last * each + head + logits)
    even = (layers * each + head + logits) / pp

    again = np.where(table.kept == 2, 1.5, 1.0)  # a block that runs forward again sends again
    tensor = _sent(question, table, _tensor, network) * again * fullest / layers
    # Nothing hides it: Llama 3 gathers keys and values first (arXiv:2407.21783, section 3.3.2).
    context = _sent(question, table, _context, network) * fullest / layers
    sends = table.v * _sent(question, table, _sends, network) * k.exposed_sends
    experts = _sent(question, table, _experts, network) * again * fullest / layers
    passes = pace + tensor + context + experts + sends  # of one micro-batch through one stage, there and back
    data, streamed = _data(question, table, network, passes)
    optimizer, moved = _optimizer(question, table)
    m, share = table.m, layers / pp
    return {
        "matrix products": m * (share * block.products + head / pp),
        "attention": m * share * block.attention * block.attention_passes,
        "element-wise layers": m * (share * block.elementwise + logits / pp),
        "recomputation": m * share * block.recomputed,
        "dequantization": m * share * block.dequantized,
        "kernel launches": m * share * block.waiting,
        "uneven stages": m * (pace - even),
        "pipeline bubble": passes * (pp - 1) * chunk / fullest,
        "pipeline sends": m * sends,
        "tensor parallelism": m * tensor,
        "context parallelism": m * context,
        "expert parallelism": m * experts,
        "data parallelism": data,
        "optimizer": optimizer,
        "offload": moved + streamed,
    }


def model_flops(question: Question, method: str) -> float:
    """FLOPs of a step that MFU_DEFINITION counts."""
    frozen = method != "full"
    each = flops_per_token(question.shape, question.seq_len, causal=True, frozen=frozen)
    return each * question.global_batch * question.seq_len


def _sent(
    question: Question,
    table: Table,
    of_grid: Callable[[Question, Grid, bool, Network], Iterator[tuple]],
    network: Network,
) -> np.ndarray:
    """Seconds that one micro-batch sends, for each row. `of_grid` gives messages of one sequence: (number, bytes, wire)."""
    # Latency of all, seconds for each sequence; without and with split norms
    values = np.zeros((len(table.grids), 2, 2))
    for index, grid in enumerate(table.grids):
        for split in (0, 1):
            if split and (grid.tp == 1 or question.seq_len // grid.cp % grid.tp):
                continue
            for number, num_bytes, wire in of_grid(question, grid, bool(split), network):
                values[index, split] += number * wire.latency, num_bytes * wire.each
    latency, each = values[table.grid, table.split.astype(int)].T
    return latency + each * table.b


def _tensor(question: Question, grid: Grid, split: bool, network: Network) -> Iterator[tuple]:
    """All layers."""
    length = question.seq_len // grid.cp
    asked = {"element": question.element, "sequence_parallel": split}
    for sent in traffic.tensor_parallel(question.shape, tp=grid.tp, micro_batch_size=1, seq_len=length, **asked):
        if sent.every == "micro_batch":
            yield sent.count, sent.total_bytes, network.wire(sent.collective, 1, grid.tp)


def _context(question: Question, grid: Grid, split: bool, network: Network) -> Iterator[tuple]:
    """All layers."""
    asked = {"seq_len": question.seq_len, "tp": grid.tp, "element": question.element}
    for sent in traffic.context_parallel(question.shape, cp=grid.cp, micro_batch_size=1, **asked):
        yield sent.count, sent.total_bytes, network.wire(sent.collective, grid.tp, grid.cp)


def _experts(question: Question, grid: Grid, split: bool, network: Network) -> Iterator[tuple]:
    """All layers: tokens to their experts and back, and their gradients the same way."""
    e = question.shape.experts
    if e is not None:
        row = (e.rows or e.active) * question.shape.hidden * question.element  # bytes of a token's copies
        sends = 4 * (question.shape.layers - len(e.dense))
        yield sends, sends * row * question.seq_len / grid.cp, network.wire("all_to_all", grid.tp * grid.cp, grid.ep)


def _sends(question: Question, grid: Grid, split: bool, network: Network) -> Iterator[tuple]:
    """What a stage in the middle sends for one of its chunks: forward and backward."""
    asked = {"seq_len": question.seq_len, "element": question.element, "sequence_parallel": split}
    for sent in traffic.pipeline(question.shape, pp=grid.pp, micro_batch_size=1, tp=grid.tp, cp=grid.cp, **asked):
        yield 2, 2 * sent.num_bytes, network.wire("send", grid.tp * grid.cp * grid.dp, grid.pp)


def _data(question: Question, table: Table, network: Network, passes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What of a step's data-parallel traffic nothing hides; and weights that come from the host, where they lie there."""
    k, here = question.constants, stage_parameters(question, table.grids)
    shape = (len(table.grids), len(table.ways))
    often, once, late = np.zeros((*shape, 2)), np.zeros(shape), np.zeros(shape)
    streamed = np.zeros(shape)
    each_way = [way_bytes(question, way) for way in table.ways]
    for index, grid in enumerate(table.grids):
        tp, pp = grid.tp, grid.pp
        for number, way in enumerate(table.ways):
            held, trained, weight, gradient = each_way[number]
            copies = way.copies(grid)
            ranks = grid.dp * grid.cp // copies
            if copies > 1:  # each machine has its gradients; now they meet those of the others
                wire = network.wire("all_reduce", tp * ranks, copies)
                once[index, number] += wire.seconds(1, trained * gradient * here[index] / ranks)
            if way.offload == "all":
                streamed[index, number] = 2 * here[index] * held * weight / max(ranks, 1) / k.pcie
            if ranks == 1 or way.strategy == "single":
                continue
            units = -(-question.shape.layers // pp) + 1
            for full in (0, 1):
                for sent in traffic.data_parallel(
                    1.0, dp=ranks, strategy=way.strategy, element=1, grad_element=1, activation_checkpointing=bool(full)
                ):
                    wire = network.wire(sent.collective, tp, ranks)
                    gathers = sent.collective == "all_gather"
                    sharded = "weights" in STRATEGIES[way.strategy].shards
                    each = (held * weight if sharded else trained * weight) if gathers else trained * gradient
                    seconds = wire.seconds(sent.count * (units if sharded else 1), sent.count * each * here[index])
                    # under a pipeline fsdp's gradients are whole until the last micro-batch
                    if sent.every == "micro_batch" and not (way.strategy == "fsdp" and not gathers and pp > 1):
                        often[index, number, full] += seconds
                    elif full == 0 and gathers:
                        late[index, number] += seconds
                    elif full == 0:
                        once[index, number] += seconds
    full = (table.kept == 2).astype(int)
    often, once = often[table.grid, table.way, full], once[table.grid, table.way]
    backward = passes * 2 / 3
    hidden = np.minimum(k.overlap * often, passes)
    data = table.m * (often - hidden) + once - np.minimum(k.overlap * once, backward) + late[table.grid, table.way]
    return data, table.m * streamed[table.grid, table.way]


def stage_parameters(question: Question, grids: list[Grid]) -> np.ndarray:
    """Parameters of the base model on one GPU of the fullest stage, sharding left out."""
    shape = question.shape
    embedding, head = shape.embedding_parameters, shape.head_parameters
    experts = count(held(shape, 1, shape.layers, True, True, 0).experts) / shape.layers  # a layer's, in the mean
    return np.array(
        [
            (
                -(-shape.layers // grid.pp) * (shape.block_parameters - experts * (1 - 1 / grid.ep))
                + (max(embedding, head) if grid.pp > 1 else embedding + head)
            )
            / grid.tp
            for grid in grids
        ]
    )


def way_bytes(question: Question, way: Way) -> tuple[float, float, float, float]:
    """(parameters held, parameters trained) over the model's, and bytes of a weight and of a gradient as they travel."""
    shape = question.shape
    factors = held(shape, 1, shape.layers, True, True, question.lora_rank, 1, question.lora_targets).factors
    adapters = count(factors) / shape.parameters
    weight: float = question.element
    gradient: float = 4 if question.precision.endswith("mixed") and not STRATEGIES[way.strategy].zero_stage else weight
    if way.method == "full":
        return 1.0, 1.0, weight, gradient
    if way.method == "qlora" and "weights" in STRATEGIES[way.strategy].shards:
        weight = 0.52
    return 1.0 + adapters, adapters, weight, gradient


def _optimizer(question: Question, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """The step on the GPU, or on the host together with what travels there and back."""
    k, here = question.constants, stage_parameters(question, table.grids)
    gpu, host = np.zeros((len(table.grids), len(table.ways))), np.zeros((len(table.grids), len(table.ways)))
    rate = question.machines.card.bandwidth * k.memory
    moved = k.optimizer_bytes * (0.5 if question.precision == "bf16" else 1.0)
    each_way = [way_bytes(question, way) for way in table.ways]
    for index, grid in enumerate(table.grids):
        for number, way in enumerate(table.ways):
            _, trained, weight, gradient = each_way[number]
            shards = grid.dp * grid.cp // way.copies(grid) if STRATEGIES[way.strategy].shards else 1
            mine = here[index] * trained / shards
            if way.offload == "none":
                gpu[index, number] = mine * moved / rate
            else:
                on_host = mine * question.machines.per_node * k.optimizer_bytes / k.host
                host[index, number] = mine * (weight + gradient) / k.pcie + on_host
    return gpu[table.grid, table.way], host[table.grid, table.way]
