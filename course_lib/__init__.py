"""Beyond One GPU: the small library that the lessons call."""

import logging

# On CPUs with bf16 instructions bitsandbytes misses a package for products that nothing here computes, and warns about it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
