"""The arithmetic of splitting a model over ranks: the rank grid, pipeline schedules, bytes sent. Nothing needs torch."""
