"""Megatron-core on CPU ranks, for the tests that hold our layout and our counts of messages against it."""

from __future__ import annotations

import importlib.util
import sys
import typing
import warnings
from types import ModuleType

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not find the tests

NEEDS_TRITON = "megatron.core.transformer.moe.ops.paged_stash"
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"
)


def megatron_core() -> ModuleType:
    """Import megatron.core, on a machine without triton too. Import it in ranks: it changes how torch loads storages.

    On the way to the linear layers Megatron imports everything, and one file of it imports triton (1 GB, of use on GPUs
    only) with no way around: the kernels that page a mixture of experts' activations out. Without triton an empty module
    stands in for that one file; triton itself stays missing, so that everything else takes its own way without it.
    """
    if importlib.util.find_spec("triton") is None and NEEDS_TRITON not in sys.modules:
        kernels = ModuleType(NEEDS_TRITON, "Empty: these kernels need triton.")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules[NEEDS_TRITON] = kernels
    if not hasattr(typing, "override"):  # Python 3.11, which Megatron does not declare
        typing.override = lambda method: method
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Transformer Engine and Apex are missing: true, and nothing to act on
        import megatron.core
    return megatron.core
