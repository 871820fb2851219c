"""What holds a plan back, in words: the part of a step that takes longest beside multiplying matrices and attention."""

from __future__ import annotations

from course_lib.choices import STRATEGIES
from course_tools.planning.answer import Settings
from course_tools.planning.network import Network
from course_tools.planning.question import Question

COMPUTE = ("matrix products", "attention")


def limit_of(asked: Question, chosen: Settings, parts: dict[str, float]) -> str:
    """The part that takes longest beyond COMPUTE, with its link where it has one, and its share of the step."""
    rest = {name: seconds for name, seconds in parts.items() if name not in COMPUTE}
    if not rest or max(rest.values()) <= 0:
        return "matrix products"
    name = max(rest, key=rest.__getitem__)
    share = 100 * rest[name] / sum(parts.values())
    return f"{said(asked, chosen, name)} ({share:.0f} % of the step)"


def said(asked: Question, chosen: Settings, name: str) -> str:
    """A part as a reader would name what it waits for."""
    network = Network(asked.machines, asked.constants)
    tp, cp, dp, pp = chosen.tp, chosen.cp, chosen.dp, chosen.pp
    sends = "all-gathers and reduce-scatters" if chosen.sequence_parallel else "all-reduces"
    data = "reduce-scatters of gradients and all-gathers of weights"
    if chosen.strategy == "ddp":
        data = "all-reduces of gradients"
    elif "weights" in STRATEGIES[chosen.strategy].shards:
        data = "all-gathers of weights and reduce-scatters of gradients"
    return {
        "element-wise layers": "memory bandwidth of norms, activations and the loss",
        "recomputation": "recomputing activations for the backward pass",
        "dequantization": "unpacking NF4 weights",
        "kernel launches": "launching kernels: the matrices are too small for the card",
        "uneven stages": "uneven pipeline stages: layers and output layer do not divide",
        "pipeline bubble": f"pipeline bubble of {pp} stages and {chosen.num_microbatches} micro-batches",
        "pipeline sends": f"pipeline sends over {network.link_name(tp * cp * dp, pp)}",
        "tensor parallelism": f"tensor-parallel {sends} over {network.link_name(1, tp)}",
        "context parallelism": f"context-parallel sends of keys and values over {network.link_name(tp, cp)}",
        "expert parallelism": f"all-to-alls of tokens over {network.link_name(tp * cp, chosen.ep)}",
        "data parallelism": f"data-parallel {data} over {network.link_name(tp, dp * cp)}",
        "optimizer": "memory bandwidth of the optimizer step",
        "offload": "moving states to the host and stepping them there",
    }[name]
