"""Lessons 1 and 2 as a Colab reader runs them: in bf16, and in fp16 on a card cut down to a T4's memory.

Nothing is written into the checkout; the executed notebooks lie beside the results. A cell that fails is a result: those
after it run all the same.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.running import ROOT, Part, Piece, Row
from course_lib.memory import CARDS

LESSONS = ("lessons/01_gpu_memory.ipynb", "lessons/02_single_gpu.ipynb")
# A T4 has 15 GiB, and no bf16 of its own.
AS_A_T4 = f"""\
import torch

if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(min(1.0, {CARDS["t4"].memory} / torch.cuda.get_device_properties(0).total_memory))
    torch.cuda.is_bf16_supported = lambda including_emulation=True: False
"""
WHAT_IT_TOOK = """\
import json, torch

used = torch.cuda.is_initialized()
print("took:", json.dumps({"used_cuda": used, "reserved": torch.cuda.max_memory_reserved() if used else 0}))
"""


def pieces(part: Part) -> Iterator[Piece]:
    for precision in ("fp16 on 15 GiB",) if part.small else ("bf16", "fp16 on 15 GiB"):
        for name in LESSONS[:1] if part.small else LESSONS:
            yield f"{name}, {precision}", lambda name=name, precision=precision: lesson(part, name, precision)


def lesson(part: Part, name: str, precision: str) -> Iterable[Row]:
    """Execute a lesson; in a small run only its first cell."""
    for package in ("nbclient", "ipykernel", "ipywidgets", "matplotlib", "cloudpickle"):
        importlib.import_module(package)  # what the kernel lacks shows in its cells only
    import nbformat

    notebook = nbformat.read(ROOT / name, as_version=4)
    if part.small:
        notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:1]
    before = [AS_A_T4] if precision.startswith("fp16") else []
    notebook.cells = [*cells_of(before).cells, *notebook.cells, *cells_of([WHAT_IT_TOOK]).cells]
    with weights(part) as (variables, which):
        began = time.monotonic()
        done, errors = execute(notebook, ROOT / "lessons", part, **variables)
    kept = part.folder / f"{Path(name).stem}_{precision.split()[0]}.ipynb"
    part.folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(done, kept)
    took = re.findall(r"^took: (.*)$", text_of(done), re.MULTILINE)
    values = {"seconds": time.monotonic() - began, "errors": errors, "weights": which} | json.loads(
        took[0] if took else "{}"
    )
    yield "failed" if errors else "lesson", f"{name}, {precision}", values | {"why": errors[0]} if errors else values


def cells_of(sources: Sequence[str]) -> Any:
    """A notebook of these cells of code."""
    import nbformat

    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def text_of(notebook: Any) -> str:
    """What the cells printed."""
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))


def execute(notebook: Any, folder: str | os.PathLike[str], part: Part, **variables: str) -> tuple[Any, list[str]]:
    """(the notebook with its outputs, its cells' errors). This Python is the kernel, with a learner's files of its own."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    notebook.metadata.pop("kernelspec", None)
    errors = []
    with tempfile.TemporaryDirectory() as own:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "BEYOND_ONE_GPU_HOME": own, "IPYTHONDIR": own}
        client = NotebookClient(
            notebook,
            timeout_func=lambda cell: int(part.seconds_left),
            allow_errors=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute(env=os.environ | environment | variables)
        except (CellTimeoutError, DeadKernelError) as error:
            errors.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:300])
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return notebook, errors + [f"{o.ename}: {o.evalue}"[:300] for o in outputs if o.output_type == "error"]


@contextlib.contextmanager
def weights(part: Part) -> Iterator[tuple[dict[str, str], str]]:
    """(environment in which `smollm2()` finds a model, which weights that are).

    Where the packaged ones are missing, weights drawn at random, laid out as the hub's cache: memory and speed are
    SmolLM2's, losses and answers mean nothing.
    """
    from course_lib.models.loading import SMOLLM2_HUB_ID, byte_tokenizer
    from course_lib.models.smollm2_weights import COPY_NAME, cache_dir, packaged_gguf

    if part.small or packaged_gguf() is not None or (cache_dir() / COPY_NAME).is_dir():
        yield {}, "SmolLM2's"
        return
    from benchmarks.gpu.models import llama

    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, f"models--{SMOLLM2_HUB_ID.replace('/', '--')}")
        snapshot = repository / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0")
        llama("smollm2-135m", device="cpu", precision="fp32").save_pretrained(snapshot)
        byte_tokenizer().save_pretrained(snapshot)
        yield {"HF_HUB_CACHE": folder}, "drawn at random in SmolLM2's shape"
