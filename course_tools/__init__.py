"""Programs for real work, each with a command: memory, plan, check, cluster, convert, watch, doctor."""
