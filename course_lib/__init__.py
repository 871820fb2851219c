"""Beyond One GPU: the small library that the lessons call."""

import logging

# On CPUs with bf16 instructions bitsandbytes warns that it lacks a package, for products that this course never computes.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
