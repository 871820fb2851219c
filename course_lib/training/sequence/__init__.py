"""Context parallelism (ring attention) and expert parallelism."""
