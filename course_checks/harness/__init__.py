"""What all checks share: the contract, comparisons, and running a learner's code on ranks."""
