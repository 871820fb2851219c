"""Closed forms from the papers: model states under ZeRO and offload, and single terms of the activations.

`estimate` counts tensor by tensor; these are the formulas it can be held against, and the ones that lessons teach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from course_lib.validation import pick, positive

# Bytes a parameter of mixed-precision Adam: 16-bit weights and gradients; fp32 master copy, momentum, variance.
WEIGHTS, GRADIENTS, STATES = 2, 2, 12


def state_bytes(
    parameters: int,
    *,
    ranks: int = 1,
    stage: int = 0,
    weights: int = WEIGHTS,
    gradients: int = GRADIENTS,
    states: int = STATES,
) -> int:
    """Bytes on each GPU for weights, gradients and optimizer states, no buffers and no activations.

    Args:
        parameters: of the model (Psi).
        ranks: data-parallel GPUs that share (N_d).
        stage: ZeRO's: 0 shares nothing, 1 the states, 2 the gradients too, 3 the weights too.
        weights, gradients, states: bytes a parameter; 2, 2, 12 is the paper's mixed-precision Adam.

    Raises:
        ValueError: a stage other than 0 to 3, a count below 1.

    Source: Rajbhandari et al., arXiv:1910.02054, figure 1 and table 1.
    """
    positive(parameters=parameters, ranks=ranks)
    pick("stage", stage, (0, 1, 2, 3))
    shares = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks if stage >= 1 else 1)
    return sum(
        -(-each * int(parameters) // share) for each, share in zip((weights, gradients, states), shares, strict=True)
    )


def offload_bytes_per_parameter(on_host: Iterable[str] = ()) -> int:
    """Bytes a parameter that stay on the GPU when parts of mixed-precision Adam lie on the host.

    `on_host`: any of "gradients" (2 bytes), "states" (12 bytes; the step then runs on the CPU). Nothing: 16, gradients:
    14, states: 4, both: 2, which is what ZeRO-Offload does.

    Raises:
        ValueError: another part.

    Source: Ren et al., arXiv:2101.06840, table 1.
    """
    parts = {"gradients": GRADIENTS, "states": STATES}
    for part in (there := set(on_host)):
        pick("on_host", part, tuple(parts))
    return WEIGHTS + sum(each for part, each in parts.items() if part not in there)


def fsdp_peak_parameters(units: Sequence[int], shards: int) -> float:
    """Elements on one GPU when the largest unit is gathered: sum(units) / shards + max(units).

    `units`: elements of each FSDP unit. Prefetching a second unit comes on top.

    Source: Zhao et al., arXiv:2304.11277, section 3.2.1.
    """
    if not units:
        raise ValueError("units is empty: give the number of elements of each FSDP unit.")
    positive(shards=shards, **{f"units[{i}]": unit for i, unit in enumerate(units)})
    return sum(units) / shards + max(units)


def attention_coefficient(heads: int, seq_len: int, hidden: int) -> float:
    """5 a s / h: what eager attention keeps of its scores, in units of s b h bytes a layer (16-bit, with dropout).

    Softmax's output and dropout's output at 2 bytes and dropout's mask at 1, each (a s s b) elements. The rest of the
    layer keeps 34 of these units. Selective recomputation and flash attention drop this term.

    Source: Korthikanti et al., arXiv:2205.05198, equation 1 and section 5.
    """
    positive(heads=heads, seq_len=seq_len, hidden=hidden)
    return 5 * heads * seq_len / hidden


def pipeline_output_bytes(
    hidden: int, seq_len: int, micro_batch: int, pipeline_parallel: int, *, element: int = 2
) -> int:
    """2 s b h p: bytes of the stage outputs that the first stage would keep for nothing, one a micro-batch in flight.

    They were sent on and are not needed for backward; freeing their data saves this much on the first stage.

    Args:
        element: bytes an element.

    Source: Korthikanti et al., arXiv:2205.05198, appendix B.
    """
    positive(hidden=hidden, seq_len=seq_len, micro_batch=micro_batch, pipeline_parallel=pipeline_parallel)
    return element * seq_len * micro_batch * hidden * pipeline_parallel


def bert_parameters(
    layers: int,
    hidden: int,
    vocab: int,
    *,
    intermediate: int = 0,
    positions: int = 512,
    types: int = 2,
    labels: int = 2,
) -> int:
    """Parameters of a BERT with a classifier on top, every one: bert-large is (24, 1024, 30522).

    Tables of tokens, positions and segments with one norm; blocks of 12 h^2 + 13 h if `intermediate` is 0 (4 x hidden);
    pooler; classifier. Source: Devlin et al., arXiv:1810.04805, as transformers' BertForSequenceClassification builds it.
    """
    positive(layers=layers, hidden=hidden, vocab=vocab, positions=positions, types=types, labels=labels)
    h, m = hidden, intermediate or 4 * hidden
    block = 4 * (h * h + h) + (h * m + m) + (m * h + h) + 2 * 2 * h
    return (vocab + positions + types) * h + 2 * h + layers * block + (h * h + h) + (h * labels + labels)
