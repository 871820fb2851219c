"""The limit is real: torch's own allocator refuses, the process goes on, and afterwards it may take what it could."""

import resource
import sys

import pytest
import torch

from course_lib.launch import launch
from course_lib.launch.emulation import memory_limit as room
from course_lib.launch.emulation.memory_limit import CannotEmulate, memory_limit

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")


def refuses(num_bytes: int) -> bool:
    """Whether torch's allocator refuses a tensor of so many bytes."""
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        assert f"can't allocate memory: you tried to allocate {num_bytes} bytes" in str(error)
        return True
    return False


def refuses_in_pieces(num_mib: int) -> bool:
    """Whether torch's allocator refuses one of so many tensors of a MiB, all alive at once."""
    try:
        kept = [torch.ones(MIB, dtype=torch.uint8) for _ in range(num_mib)]
    except RuntimeError as error:
        assert "can't allocate memory" in str(error)
        return True
    del kept
    return False


def in_a_rank() -> dict[str, object]:
    seen: dict[str, object] = {}
    # what the process has freed and kept must not be a way round the limit. glibc keeps up to twice the largest block
    # that was ever freed, so a block of 30 MiB makes it keep these 50 times 1 MiB
    torch.ones(30 * MIB, dtype=torch.uint8)
    low = [torch.ones(MIB, dtype=torch.uint8) for _ in range(50)]
    above = [bytearray(100_000) for _ in range(20)]  # alive above them on the heap: they cannot be given back
    del low
    with memory_limit(16 * MIB):
        seen["kept memory counts"] = refuses_in_pieces(40)
    del above
    before = resource.getrlimit(resource.RLIMIT_DATA)
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    with memory_limit(48 * MIB):
        seen["fits"] = not refuses(40 * MIB)
        seen["too much"] = refuses(56 * MIB)
        filled = torch.ones(40 * MIB, dtype=torch.uint8)
        seen["the rest"] = refuses(34 * MIB)
        del filled
        seen["again"] = not refuses(40 * MIB)  # what is freed can be taken once more
        with memory_limit(8 * MIB):
            seen["tighter"] = refuses(34 * MIB)  # blocks above 32 MiB never come from the heap
        with memory_limit(1000 * MIB):
            seen["not wider"] = refuses(56 * MIB)
        seen["outer is back"] = not refuses(40 * MIB) and refuses(56 * MIB)
    seen["afterwards"] = not refuses(200 * MIB)
    try:
        with memory_limit(48 * MIB):
            raise KeyError("the body's own")
    except KeyError:
        seen["after an error"] = resource.getrlimit(resource.RLIMIT_DATA) == before
    return seen | {"held": held.nbytes}


@linux
def test_the_allocator_refuses_what_is_beyond_the_limit_and_nothing_else():
    for seen in launch(in_a_rank, ranks=2, quiet=True).results:
        assert not [name for name, good in seen.items() if not good]


@pytest.mark.parametrize("nonsense", [0, -1, float("nan"), float("inf"), "1 GB", None, True])
def test_a_limit_that_is_no_number_of_bytes_is_refused(nonsense):
    with pytest.raises(ValueError, match="num_bytes=.*more than 0"), memory_limit(nonsense):
        pass


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"), memory_limit(MIB, device="tpu"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_said():
    with pytest.raises(CannotEmulate, match="no CUDA device"), memory_limit(MIB, device="cuda"):
        pass


def test_where_the_system_keeps_no_limit_it_is_said(monkeypatch):
    monkeypatch.setattr(room.sys, "platform", "darwin")
    with pytest.raises(CannotEmulate, match="darwin keeps no limit"), memory_limit(MIB, device="cpu"):
        pass


def test_on_cuda_the_caching_allocator_keeps_it(monkeypatch):
    """The calls alone: the fraction of the card that gives the bytes beyond those reserved now, and the old one back."""
    fractions = [0.9]
    total, reserved = 1000 * MIB, 100 * MIB
    for name, stand_in in {
        "is_available": lambda: True,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: type("Properties", (), {"total_memory": total}),
        "memory_reserved": lambda: reserved,
        "get_per_process_memory_fraction": lambda: fractions[-1],
        "set_per_process_memory_fraction": fractions.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with memory_limit(50 * MIB, device="cuda"):
        assert fractions[-1] == pytest.approx(0.15)
        with memory_limit(5000 * MIB, device="cuda"):
            assert fractions[-1] == pytest.approx(0.15), "an inner limit is never wider"
    assert fractions[-1] == 0.9
