"""Split the global batch of an optimizer step into equal micro-batches."""

from course_lib.validation import check_counts


def micro_batch_size(steps: int, global_batch: int, ranks: int = 1, gradient_accumulation_steps: int = 1) -> int:
    """Sequences that one rank trains on at a time."""
    check_counts(
        steps=steps,
        global_batch=global_batch,
        ranks=ranks,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    if global_batch % (ranks * gradient_accumulation_steps):
        raise ValueError(
            f"global_batch={global_batch} does not divide into {ranks} ranks x {gradient_accumulation_steps} micro-batches: the average "
            "over unequal parts would weigh sequences unequally."
        )
    return global_batch // (ranks * gradient_accumulation_steps)
