"""The papers' formulas for model states under ZeRO, as the lessons teach them; `estimate` counts tensor by tensor."""

from __future__ import annotations

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

    Source: Rajbhandari et al., arXiv:1910.02054, figure 1 and table 1.
    """
    positive(parameters=parameters, ranks=ranks)
    pick("stage", stage, (0, 1, 2, 3))
    shares = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks if stage >= 1 else 1)
    return sum(
        -(-each * int(parameters) // share) for each, share in zip((weights, gradients, states), shares, strict=True)
    )
