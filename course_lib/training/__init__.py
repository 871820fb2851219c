"""The course's training programs, one per file. Each runs from a notebook (``launch(ddp.train, ranks=2)``) and from a
shell (``torchrun --nproc_per_node 2 -m course_lib.training.ddp``)."""
