"""What this process may use of the machine: cores, memory, disks, files, names."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

from course_lib.units import GIB, MIB
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding

ROOT = Path(__file__).resolve().parents[2]


def cores_here(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the cores that this process may use: its affinity, or the container's quota if that is less."""
    number = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _first_line(groups / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_first_line(groups / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return min(number, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else number


def memory_here(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, or the container's limit if that is less."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = [_first_line(groups / path) for path in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([size, *(int(limit) for limit in given if limit.isdigit())])


def _first_line(path: Path) -> str:
    """Read a file of the kernel; empty if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cores() -> Finding:
    """Count the cores that the ranks share."""
    number = cores_here()
    says = f"{number:g} core{'s' * (number != 1)}"
    if number < 2:
        return Finding(
            NOTE, "cores", says, "All ranks share them: every run works and takes two to four times as long."
        )
    return Finding(OK, "cores", says)


def threads() -> Finding:
    """Compare the threads that a process computes in with the cores that it may use."""
    asked = [(os.environ[name], name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name)]
    number, source = asked[0] if asked else (str(os.cpu_count()), "the machine's cores")
    says = f"{number} per process, by {source}"
    if number.isdigit() and int(number) > cores_here():
        means = f"{cores_here():g} cores are there for them, and threads that wait for each other are slow."
        return Finding(NOTE, "threads", says, means, f"export OMP_NUM_THREADS={max(1, int(cores_here()))}")
    return Finding(OK, "threads", says)


def memory() -> Finding:
    """Check the memory of the machine, or of the container."""
    size = memory_here()
    says = f"{size / GIB:.1f} GiB of memory"
    if size < 6 * GIB:
        means = "Eight ranks (lesson 8) and Axolotl (lesson 7) need about 6 GiB; they may be killed."
        return Finding(PROBLEM, "memory", says, means, "Close other programs, or take 8 GiB.")
    return Finding(OK, "memory", says)


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Check the size of shared memory, which is often small in containers."""
    if not os.path.isdir(folder):
        return Finding(OK, "shared memory", "this system has no /dev/shm, and needs none")
    size = shutil.disk_usage(folder).total
    says = f"{size / MIB:,.0f} MiB in {folder}"
    if size < 256 * MIB:
        means = "Loaders with workers and NCCL use it: on GPUs a run may die with a bus error (lessons 4 to 8)."
        return Finding(NOTE, "shared memory", says, means, "In Docker: --shm-size=1g, or --ipc=host")
    return Finding(OK, "shared memory", says)


def disk() -> Finding:
    """Check that lessons can save: beside the notebooks, temporary files, the learner's progress, SmolLM2's weights."""
    try:
        from platformdirs import user_cache_dir, user_data_dir
    except ImportError:  # on a bare Python
        user_cache_dir = user_data_dir = lambda _: "~"
    places = {"the course's folder": str(ROOT), "TMPDIR": tempfile.gettempdir()}
    places["BEYOND_ONE_GPU_HOME"] = os.environ.get("BEYOND_ONE_GPU_HOME") or user_data_dir("beyond-one-gpu")
    places["BEYOND_ONE_GPU_CACHE"] = os.environ.get("BEYOND_ONE_GPU_CACHE") or user_cache_dir("beyond-one-gpu")
    free = {}
    for name, place in places.items():
        try:
            os.makedirs(os.path.expanduser(place), exist_ok=True)
            tempfile.TemporaryFile(dir=os.path.expanduser(place)).close()
            free[name] = shutil.disk_usage(os.path.expanduser(place)).free
        except OSError as error:
            says = f"{place} cannot be written: {error.strerror}"
            return Finding(PROBLEM, "disk", says, "Saving will fail.", f"Move {name} to where you can write.")
        if free[name] < GIB:
            mend = f"Free some space (runs/ beside the notebooks may be deleted), or move {name} to another disk."
            says = f"{free[name] / GIB:.1f} GiB free in {place}"
            return Finding(PROBLEM, "disk", says, "1 GiB is needed there: saving will fail.", mend)
    return Finding(OK, "disk", f"{min(free.values()) / GIB:.1f} GiB free or more, and all can be written")


def open_files() -> Finding:
    """Check how many files and connections a process may have open."""
    import resource

    number = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    says = "no limit" if number == resource.RLIM_INFINITY else f"{number:,} at once"
    if 0 <= number < 512:
        means = "Loaders with workers, and many ranks, may end with 'Too many open files'."
        return Finding(NOTE, "open files", says, means, "ulimit -n 4096")
    return Finding(OK, "open files", says)


def port(number: int = 29500) -> Finding:
    """Check that torchrun's usual port is free."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", number))
        except OSError as error:
            means = "torchrun without --standalone meets there, and ends at once: another run may use it."
            return Finding(
                NOTE, "port", f"{number}: {error.strerror}", means, "torchrun --standalone, or --master-port"
            )
    return Finding(OK, "port", f"{number} is free")


def host_name() -> Finding:
    """Check that this machine's name leads to an address of its own: gloo takes the interface that has it."""
    name = socket.gethostname()
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as sock:
            sock.bind(address)
    except OSError as error:
        means = "Lessons run, for launch takes the loopback interface; torchrun over several machines may hang."
        mend = "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface (ip addr lists them)."
        return Finding(NOTE, "host name", f"{name} leads to no address here: {error.strerror}", means, mend)
    return Finding(OK, "host name", f"{name} is {address[0]}")
