"""How an optimizer step's batch is cut into equal micro-batches; every training program of the course asks here."""


def micro_batch_size(*, steps: int, global_batch: int, ranks: int = 1, accumulate: int = 1) -> int:
    """Sequences that one rank trains on at a time.

    Raises:
        ValueError: no steps, or a batch that does not divide into ranks times micro-batches.
    """
    for name, value in (("steps", steps), ("global_batch", global_batch), ("ranks", ranks), ("accumulate", accumulate)):
        if value < 1:
            raise ValueError(f"{name}={value}: give a whole number of at least 1.")
    if global_batch % (ranks * accumulate):
        raise ValueError(
            f"global_batch={global_batch} does not divide into {ranks} ranks x {accumulate} micro-batches: the average "
            "over unequal parts would weigh sequences unequally."
        )
    return global_batch // (ranks * accumulate)
