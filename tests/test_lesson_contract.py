"""What every lesson keeps: a budget, an opening and a closing, the API it types, guesses, and a lab it does not solve.

`python tests/test_lesson_contract.py [NOTEBOOK…]` shows an author the counts and what is wrong. Reads files only.
"""

from __future__ import annotations

import ast
import builtins
import copy
import fnmatch
import functools
import json
import keyword
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from classroom.authoring.labs import BEGIN, END
from course_lib.notebook.contents import ABOUT_MINUTES
from course_lib.notebook.guesses import Measurement
from course_lib.notebook.page import table

ROOT = Path(__file__).resolve().parents[1]

BUDGET = {  # what: at most (in a lesson, in a deeper notebook)
    "words": (2000, 900),  # of prose and tables, without HTML and the addresses of links
    "cells": (25, 12),  # of code
    "lines": (250, 120),  # of code, not empty
    "longest_cell": (25, 25),  # its lines that are not empty
    "figures": (6, 3),  # figures, widgets and tables of two rows or more, except what `ask` and `measured` show
    "seconds": (60, 20),  # as `takes(seconds=…)` declares them: no test looks at a measured time
    "longest_wait": (15, 15),  # the seconds that one cell declares
}
ABOUT = {"words": 1.1, "lines": 1.1}  # these limits are meant as "about"
EXTRA = {("07_axolotl", "seconds"): 90, ("deeper/claims", "lines"): 290}  # an answer to each of 31 statements

# Notebook -> the rules that it does not keep yet. The list only gets shorter: a rule that is kept must leave it.
EXCEPTIONS: dict[str, str] = {}

# Lesson -> the names it is about, as fnmatch patterns over full names: aliases are resolved, so `dist.broadcast` is
# torch.distributed.broadcast. A leading dot: a method of anything. "$ ": a shell command. A bar: one of them is enough.
MUST_TYPE = {
    1: ["torch.autograd.graph.saved_tensors_hooks", "torch.cuda.memory._record_memory_history"],
    2: ["torch.utils.checkpoint.checkpoint", ".activation_checkpointing_enable", "torch.amp.GradScaler|torch.GradScaler",
        "torch.autocast|torch.amp.autocast", "bitsandbytes.optim.*8bit", "peft.get_peft_model", "peft.LoraConfig",
        "peft.prepare_model_for_kbit_training", "transformers.BitsAndBytesConfig"],
    3: ["torch.distributed.broadcast", "torch.distributed.all_reduce", "torch.distributed.reduce_scatter_tensor",
        "torch.distributed.all_gather_into_tensor", "torch.distributed.isend|torch.distributed.batch_isend_irecv"],
    4: ["torch.nn.parallel.DistributedDataParallel", "accelerate.Accelerator", ".prepare", ".accumulate", ".save_state"],
    5: ["deepspeed.initialize"],
    6: ["torch.distributed.fsdp.fully_shard", "torch.distributed.fsdp.MixedPrecisionPolicy", ".full_tensor",
        ".set_requires_gradient_sync", ".to_empty", "torch.distributed.checkpoint.load"],
    7: ["torch.utils.tensorboard.*SummaryWriter", "$ axolotl train|$ beyond check"],
    8: ["torch.distributed.device_mesh.init_device_mesh", "torch.distributed.tensor.parallel.parallelize_module",
        "torch.distributed.tensor.parallel.ColwiseParallel", "torch.distributed.tensor.parallel.RowwiseParallel",
        "torch.distributed.pipelining.*PipelineStage", "torch.distributed.pipelining.*Schedule*",
        "torch.distributed.fsdp.fully_shard"],
}  # fmt: skip
ADDRESS = re.compile(r"(?<=\])\([^)]*\)")  # of a link
CREATORS = re.compile(r"torch\.(tensor|ones|zeros|empty|full|randn?|randint|arange|linspace|eye)")
EVERY_LOOP = {"_.backward()", "_.step()", "_.zero_grad()", "_.item()"}  # statements that tell no exercise from another
SHELLS = ("shell", "Background", "system", "getoutput", "run", "Popen", "check_output")

# Lesson -> modules of course_lib/training whose `train` stands in one of its cells: what readers type is what runs.
TAUGHT = {2: ["qlora"], 4: ["ddp", "accelerate_ddp"], 5: ["zero"], 6: ["fsdp"], 8: ["tensor_parallel", "pipeline", "three_d"]}  # fmt: skip


class Cell:
    def __init__(self, number: int, stored: dict[str, Any]) -> None:
        self.number, self.kind, self.source = number, stored["cell_type"], "".join(stored["source"])
        self.outputs = stored.get("outputs", [])

    def __str__(self) -> str:
        return f"cell {self.number} ({self.source.strip().partition(chr(10))[0][:50]})"

    @functools.cached_property
    def tree(self) -> ast.Module:
        """A shell command is a call in it, and a program that `%%writefile` writes is code."""
        source = re.sub(r"\A%%writefile .*\.py *\n", "", self.source)
        if source.startswith("%%"):
            source = f"system({source!r})"
        source = re.sub(r"^( *)[!%](.+)", lambda line: f"{line[1]}system({line[2]!r})", source, flags=re.MULTILINE)
        return ast.parse(source, filename=str(self))

    def nodes(self, *kinds: type) -> list[Any]:
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of functions or methods with one of these names."""
        return [call for call in self.nodes(ast.Call) if full_name(call.func).split(".")[-1] in names]


class Notebook:
    def __init__(self, path: Path) -> None:
        path = path.resolve()
        self.is_deeper = path.parent.name == "deeper"
        self.root = path.parents[2 if self.is_deeper else 1]
        self.name = f"deeper/{path.stem}" if self.is_deeper else path.stem
        self.number = int(path.stem[:2]) if path.stem[:2].isdigit() else 0
        cells = enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"])
        self.cells = [Cell(n, cell) for n, cell in cells if "colab" not in cell["metadata"].get("tags", ())]
        self.code = [cell for cell in self.cells if cell.kind == "code"]
        self.prose = "\n\n".join(cell.source for cell in self.cells if cell.kind == "markdown")
        self.imports: dict[str, str] = {}  # name in the notebook -> full name
        for node in self.nodes(ast.Import, ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                self.imports[name] = prefix + (alias.name if alias.asname else name)

    def nodes(self, *kinds: type) -> list[Any]:
        return [node for cell in self.code for node in cell.nodes(*kinds)]


read = functools.cache(Notebook)


def notebooks(root: Path = ROOT) -> list[Path]:
    return [*sorted(root.glob("lessons/0[1-9]_*.ipynb")), *sorted(root.glob("lessons/deeper/*.ipynb"))]


def full_name(node: ast.AST, imports: dict[str, str] | None = None) -> str:
    """'torch.distributed.all_reduce' for `dist.all_reduce`; '.step' for a method of something without a name."""
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, imports)}.{node.attr}"
    return (imports or {}).get(node.id, node.id) if isinstance(node, ast.Name) else ""


def counts(notebook: Notebook) -> dict[str, float]:
    prose = re.sub(r"!\[[^\]]*\]\([./]*pictures/[^)]*\)|\[Open in Colab\]", " ", notebook.prose)  # what each opens with
    text = re.sub(r"<!--.*?-->|</?\w[^>]*>", " ", ADDRESS.sub("", prose))
    lines = [sum(bool(line.strip()) for line in cell.source.splitlines()) for cell in notebook.code]
    takes = [word for cell in notebook.code for call in cell.calls("takes") for word in call.keywords]
    seconds = [getattr(word.value, "value", float("inf")) for word in takes]  # an author can only declare a number
    own = [n for cell, n in zip(notebook.code, lines, strict=True) if not is_taught(cell, notebook)]
    drawn = re.findall(r"^\|[ :|-]*-[ :|-]*\| *\n\|.*\n\||!\[[^\]]*\]\(|<img\b", prose, re.MULTILINE)
    shown = [output.get("data", {}) for cell in notebook.code if not cell.calls("ask") for output in cell.outputs]
    return {
        "words": sum(bool(re.search(r"\w", word)) for word in text.split()),
        "cells": len(notebook.code),
        "lines": sum(lines),
        "longest_cell": max(own, default=0),
        "figures": len(drawn) + sum(map(is_figure, shown)),
        "seconds": sum(seconds),
        "longest_wait": max(seconds, default=0),
    }


def is_figure(data: dict[str, Any]) -> bool:
    page = "".join(data.get("text/html", ""))
    has_rows = sum("<td" in row for row in page.split("<tr")) > 1
    is_drawn = any(kind.startswith("image/") or "widget-view" in kind for kind in data)
    is_drawn |= bool(re.search(r"<(img|svg|canvas|iframe|video)\b", page))
    return (has_rows or is_drawn) and "<summary>Guess first" not in page  # `measured`


def limit(notebook: Notebook, what: str) -> float:
    as_lesson = not notebook.is_deeper or notebook.name == "deeper/claims"  # what all lessons' texts say, in one place
    return EXTRA.get((notebook.name, what), round(BUDGET[what][not as_lesson] * ABOUT.get(what, 1)))


def within(what: str, notebook: Notebook) -> list[str]:
    count, most = counts(notebook)[what], limit(notebook, what)
    return [f"{count:,}, and at most {most:,}"] if count > most else []


def opening(notebook: Notebook) -> list[str]:
    wanted = {
        "question in bold": r"\*\*(?:(?!\*\*).)+\?[”\"]?\*\*",
        "'about N minutes'": ABOUT_MINUTES,
        "picture": r"!\[.+\]\(.+\.svg\)",
    }
    if not notebook.is_deeper:
        wanted |= {
            "'you can' or 'you will be able to' with a list": r"\b(?:can|be able to)\b[^\n]*\n+(?:[-*] |1\. )",
            "word on what the reader needs to know": r"(?i)need to know|what you need|before you (?:start|begin)",
        }
    first = re.split(r"^## ", notebook.prose, maxsplit=1, flags=re.MULTILINE)[0]
    return [f"no {what}" for what, pattern in wanted.items() if not re.search(pattern, first)]


def closing(notebook: Notebook) -> list[str]:
    sections = re.split(r"^## ", notebook.prose, flags=re.MULTILINE)
    heading, _, sources = sections[-1].partition("\n")
    items = re.findall(r"^[-*] .*(?:\n(?![-*] |\n).*)*", sources, re.MULTILINE)
    wrong = [] if heading.strip() == "Sources" and items else ["the last section is not '## Sources' with a list"]
    for item in items:  # an arXiv number is no title
        title = re.findall(r"\w+", re.sub(r"arXiv:[\d.]+", "", ADDRESS.sub("", item)))
        if len(title) < 2 or not re.search(r"\]\(https?://[^)\s]+\)", item):
            wrong.append(f"no title with a link: {item[:60]}")
    if not notebook.is_deeper:
        end = "\n## ".join(sections[-4:])
        remember = ADDRESS.sub("", end.partition("to remember")[2]).partition("\n## ")[0]
        wrong += [] if "you can now" in end.lower() else ["no 'you can now'"]
        wrong += [] if len(re.findall(r"\d+", remember)) > 1 else ["no two numbers 'to remember'"]
        wrong += [] if f"](../labs/{notebook.name}.ipynb)" in end else ["no link to its lab"]
    return wrong


def typed(notebook: Notebook) -> list[str]:
    """A name counts where code uses it, not where it is imported or stands in a string."""
    names = {full_name(node, notebook.imports) for node in notebook.nodes(ast.Name, ast.Attribute)}
    for call in (call for cell in notebook.code for call in cell.calls(*SHELLS)):
        words = [part.value for part in ast.walk(call) if isinstance(getattr(part, "value", None), str)]
        names.add(f"$ {' '.join(words)}")
    wrong = []
    for wanted in [] if notebook.is_deeper else MUST_TYPE.get(notebook.number, []):
        patterns = [re.sub(r"^\$ (.*)", r"$ *\1*", re.sub(r"^\.", "*.", one)) for one in wanted.split("|")]
        wrong += [] if any(fnmatch.filter(names, pattern) for pattern in patterns) else [f"no cell uses {wanted}"]
    return wrong


def guesses(notebook: Notebook) -> list[str]:
    measuring = {"measured"}  # and the lesson's own functions that call it
    for function in 2 * notebook.nodes(ast.FunctionDef):
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        measuring |= {function.name for call in calls if full_name(call.func) in measuring}
    wrong, asked, answered, questions = [], {}, set(), []
    for before, cell in zip([None, *notebook.cells], notebook.cells, strict=False):
        if cell.kind != "code":
            continue
        loops = cell.nodes(ast.For)  # over guesses, perhaps
        for call in cell.calls(*measuring):
            given = [*call.args, *(word.value for word in call.keywords)]
            given += [loop.iter for loop in loops if call in ast.walk(loop)]
            answered |= {node.id for part in given for node in ast.walk(part) if isinstance(node, ast.Name)}
        if cell.calls("ask"):
            matches = [re.match(r"(\w+) = (?:\w+\.)*ask\(", ast.unparse(line)) for line in cell.tree.body]
            asked |= {match[1]: cell for match in matches if match}
            wrong += [] if all(matches) else [f"{cell}: a cell that asks has only `name = ask(…)`"]
            above = before.source if before and before.kind == "markdown" else ""
            goes_on = bool(before) and before.kind == "code" and bool(before.calls("ask"))
            wrong += [] if "?" in above or goes_on else [f"{cell}: no question in prose above it"]
            questions += [ast.unparse(call.args[0]) for call in cell.calls("ask") if call.args]
        predicts = any(isinstance(call.func, ast.Name) for call in cell.calls("predict"))
        wrong += [f"{cell}: predicts for the reader"] if predicts else []
    stores = [node for node in notebook.nodes(ast.Name, ast.Attribute) if isinstance(node.ctx, ast.Store)]
    bound = Counter(full_name(node) for node in stores)
    filled = {full_name(node.value) for node in stores if isinstance(node, ast.Attribute)}
    wrong += [f"asked twice: {question}" for question, times in Counter(questions).items() if times > 1]
    for name, cell in asked.items():
        wrong += [] if name in answered else [f"{cell}: {name} is never measured"]
        wrong += [f"{cell}: {name} is bound {bound[name]} times"] if bound[name] > 1 else []
        wrong += [f"{cell}: {name} is filled in"] if name in filled else []
    return wrong if asked or notebook.is_deeper else [*wrong, "asks nothing"]


def stderr(notebook: Notebook) -> list[str]:
    return [str(cell) for cell in notebook.code if any(output.get("name") == "stderr" for output in cell.outputs)]


def devices(notebook: Notebook) -> list[str]:
    """Ranks on GPUs use NCCL and keep their tensors on their own GPU. Nobody here has two, so the code is read.

    `launch` sets a rank's CUDA device but not torch's default device: without `device=` a new tensor lies on the CPU.
    """
    if notebook.number in (1, 2):
        return []
    launched = {full_name(call.args[0]) for cell in notebook.code for call in cell.calls("launch") if call.args}
    wrong = []
    for cell in notebook.code:
        texts = [node.value for node in cell.nodes(ast.Constant) if isinstance(node.value, str)]
        wrong += [f"{cell}: names gloo" for text in texts if text == "gloo" or text.startswith("cpu:gloo")]
        for function in cell.nodes(ast.FunctionDef):
            calls = {n: full_name(n.func, notebook.imports) for n in ast.walk(function) if isinstance(n, ast.Call)}
            runs_in_ranks = any(name.startswith("torch.distributed.") for name in calls.values())
            if not (runs_in_ranks or function.name in launched) or "torch.set_default_device" in calls.values():
                continue
            movers = [call.func.value for call, name in calls.items() if name.endswith((".to", ".cuda"))]
            placed = {node for mover in movers for node in ast.walk(mover)}
            placed |= {call for call in calls if any(word.arg == "device" for word in call.keywords)}
            new = [call for call, name in calls.items() if CREATORS.fullmatch(name) and call not in placed]
            wrong += [f"{cell}: no device in {ast.unparse(call)[:60]}" for call in new]
    return list(dict.fromkeys(wrong))


def bare(function: ast.FunctionDef) -> str:
    """Its code without its name, docstrings, annotations and imports."""
    tree = copy.deepcopy(function)
    tree.name = "_"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
        for field in {"annotation", "returns"} & set(node._fields):
            setattr(node, field, ast.Name("_") if isinstance(node, ast.AnnAssign) else None)
    lines = ast.unparse(tree).splitlines()
    return "\n".join(line.replace(": _ =", " =") for line in lines if not re.match(r" *(pass$|import |from )", line))


def library(notebook: Notebook) -> dict[str, list[ast.FunctionDef]]:
    """{module: its functions} of what this lesson teaches."""
    result = {}
    for name in [] if notebook.is_deeper else TAUGHT.get(notebook.number, []):
        files = notebook.root.glob(f"course_lib/training/**/{name}.py")
        lines = [line for file in files for line in ast.parse(file.read_text(encoding="utf-8")).body]
        result[name] = [line for line in lines if isinstance(line, ast.FunctionDef)]
    return result


def trainings(notebook: Notebook) -> dict[str, list[str]]:
    """{module: its functions `train`}; there should be one each."""
    return {name: [bare(f) for f in functions if f.name == "train"] for name, functions in library(notebook).items()}


def is_taught(cell: Cell, notebook: Notebook) -> bool:
    """Whether the cell is a training function and nothing else: it is shown in full, however long."""
    return (
        len(cell.tree.body) == 1
        and [bare(node) for node in cell.nodes(ast.FunctionDef)[:1]] in trainings(notebook).values()
    )


def taught(notebook: Notebook) -> list[str]:
    shown = {bare(function) for function in notebook.nodes(ast.FunctionDef)}
    wrong = []
    for name, functions in trainings(notebook).items():
        if len(functions) != 1:
            wrong.append(f"course_lib/training has {len(functions)} functions {name}.train")
        elif functions[0] not in shown:
            wrong.append(f"no cell has the function {name}.train")
    here = {function.name: bare(function) for function in notebook.nodes(ast.FunctionDef)}
    for function in (f for functions in library(notebook).values() for f in functions if f.name != "train"):
        if here.get(function.name, bare(function)) != bare(function):
            wrong.append(f"{function.name} is another one than the library's")
    return wrong


@functools.cache
def statements(cell: Cell, notebook: Notebook, lines: frozenset[int] | None = None) -> Counter[str]:
    """The statements that still say something when names and constants are `_`; of a compound statement the head.

    What is imported keeps its full name, and what Python names its own.
    """
    skipped = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    heads = [copy.copy(node) for node in cell.nodes(ast.stmt) if not isinstance(node, skipped)]
    kept = {name: name for name in (*keyword.kwlist, *dir(builtins))} | notebook.imports
    result: Counter[str] = Counter()
    for head in heads:
        for block in {"body", "orelse", "finalbody", "handlers", "cases"} & set(head._fields):
            setattr(head, block, [])
        text = re.sub(r"f?(['\"])(?:\\.|(?!\1).)*\1|\b\d[\w.]*", "_", ast.unparse(head))
        text = re.sub(r"(?<![\w.])[A-Za-z_]\w*\b(?!=)", lambda name: kept.get(name[0], "_"), text)
        text = re.sub(r"^_: [^=]* = ", "_ = ", text)  # an annotation
        says = set(re.findall(r"\w+|[-+*/%@<>&|]", text)) - {"_", *keyword.kwlist}
        if says and (lines is None or head.lineno in lines) and text not in EVERY_LOOP:
            result[text] += 1
    return result


def transfer(notebook: Notebook) -> list[str]:
    """No solution to "build" or "debug" shares more than half of its statements with one cell of any lesson.

    An exercise that does not say its kind counts. Under three statements chance decides.
    """
    path = notebook.root / "solutions" / f"{notebook.name}.ipynb"
    wrong, counted = [], True
    for cell in read(path).cells if path.is_file() else ():
        if cell.kind == "markdown":
            for kind in re.findall(r"\*difficulty .* minutes\*(.*)", cell.source):
                counted = bool(re.search("build|debug", kind)) or not re.search(r"\w", kind)
        elif counted:
            marks = [(line.strip() == BEGIN) - (line.strip() == END) for line in cell.source.splitlines()]
            inside = frozenset(number for number in range(1, len(marks) + 1) if sum(marks[:number]))
            solution = statements(cell, read(path), inside)
            for other in map(read, notebooks(notebook.root)):
                for there in other.code:
                    shared, total = (solution & statements(there, other)).total(), solution.total()
                    if total >= 3 and shared > total / 2:
                        wrong.append(f"{shared} of {total} statements of its {cell} stand in {other.name}, {there}")
    return wrong


RULES: dict[str, Callable[[Notebook], list[str]]] = {
    **{what: functools.partial(within, what) for what in BUDGET},
    **{rule.__name__: rule for rule in (opening, closing, typed, guesses, stderr, devices, taught, transfer)},
}


def findings(notebook: Notebook) -> dict[str, list[str]]:
    """{rule: what is wrong}, without the rules that the notebook keeps."""
    return {name: wrong for name, rule in RULES.items() if (wrong := rule(notebook))}


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_keeps_the_contract(path: Path) -> None:
    allowed = EXCEPTIONS.get(read(path).name, "").split()
    wrong = {rule: wrong for rule, wrong in findings(read(path)).items() if rule not in allowed}
    assert not wrong, "\n".join(f"{rule}: {sentence}" for rule in wrong for sentence in wrong[rule])


def test_the_list_of_exceptions_names_nothing_that_is_kept() -> None:
    broken = {(notebook.name, rule) for notebook in map(read, notebooks()) for rule in findings(notebook)}
    assert not {(name, rule) for name, rules in EXCEPTIONS.items() for rule in rules.split()} - broken


# ------------------------------------------------------------------------------------------- each rule, seen red
# A small course that keeps every rule. In a notebook "%% markdown" and "%% code" begin a cell, "%% output" what it shows.
TRAIN = """\
    engine, *_ = ds.initialize(model=build())
    engine.backward(engine(batch(steps)))
    total = torch.zeros(1, device=engine.device)
    dist.all_reduce(total)
"""
SOLUTION = """\
    mine = [p for i, p in enumerate(model.parameters()) if i % ranks == 0]
    flat = torch.cat([p.grad.flatten() for p in mine])
    if ranks > 1:
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    flat -= flat.mean()
    adam.step()
    adam.zero_grad()
    whole = flat
    return whole
"""
COPIED = SOLUTION.replace("mine", "own").replace("flat =", "flat: Any =").replace("/=", "+=").replace("dist.", "wire.")
COPIED = f"%% code\nimport torch.distributed as wire\ndef spread(net, ranks):\n{COPIED}"
COURSE = {
    "lessons/05_planted.ipynb": f"""
%% markdown
# Lesson 5: planted
![A picture](pictures/05_planted.svg)
**"Does it *fit*?"** At the end you can
- say so.

You need to know lesson 4. About 40 minutes.
%% code colab
predict("gloo")
%% markdown
## 1. Held
| one row | is no table |
| --- | --- |
| 1 | 2 |

How much?
%% code
held_guess = ask("Held by a rank", unit="bytes")
%% output application/vnd.jupyter.widget-view+json
%% code
import deepspeed as ds, torch, torch.distributed as dist
def zero_run(*, steps=2):
    import torch
{TRAIN}
%% code
takes(seconds=5)
held = launch(zero_run, ranks=2)
fitted.predict(held)
measured(held_guess, held)
%% output text/html
{Measurement("Held", "bytes", 9.0, formula=4.0).page(folded=True, asked=False)._repr_html_()}
%% output text/html
{table([{"one": "row"}])._repr_html_()}
%% markdown
## What you can now do
Say so. Two numbers to remember: 2 and 16. The [lab](../labs/05_planted.ipynb) goes on.
## Sources
- Rajbhandari et al., *ZeRO* ([arXiv:1910.02054](https://arxiv.org/abs/1910.02054)): the stages.
- [DeepSpeed's configuration](https://www.deepspeed.ai/docs/config-json/)

---
[course map](00_start_here.ipynb)
""",
    "lessons/deeper/05_more.ipynb": """
%% markdown
# Deeper
![A picture](../pictures/05_planted.svg)
**Why?** About 15 minutes.
%% code
import torch, torch.distributed as dist
%% markdown
## Sources
- [Notes by the translator](https://example.org/notes), 1843
""",
    "solutions/05_planted.ipynb": f"""
%% markdown
*difficulty 4 of 5 · importance 5 of 5 · 30 minutes* · build
%% code
import deepspeed as ds, torch, torch.distributed as dist
def stage(model, ranks):
    sizes = [p.numel() for p in model.parameters()]
    assert max(sizes) < sum(sizes)
    ### BEGIN SOLUTION
{SOLUTION}
    ### END SOLUTION
%% markdown
*difficulty 2 of 5 · importance 5 of 5 · 20 minutes* · use
%% code
def the_real_one(steps):
    ### BEGIN SOLUTION
{TRAIN}
    ### END SOLUTION
""",
    "course_lib/training/zero.py": f'def train(*, steps: int = 2) -> None:\n    """Train."""\n{TRAIN}',
}
LESSON_END, DEEPER_END = "%% markdown\n## What you can now do", "%% markdown\n## Sources\n- [Notes"
ASK, MEASURED = 'held_guess = ask("Held by a rank", unit="bytes")', "measured(held_guess, held)"
FUNCTION = "%% code\ndef f():\n    return torch.ones(2)\n"
IMG, PNG = "%% code\n1\n%% output text/html\n<img src='x'>\n", "%% code\n1\n%% output image/png\nx\n"
TABLE = IMG.replace("<img src='x'>", table([{"a": 1}, {"a": 2}])._repr_html_())

# (the rule that breaks, or none; what is replaced wherever it stands; by what)
CHANGES = [
    ("words", "At the end you can", "word " * 2200 + "\n\nAt the end you can"),
    ("cells", DEEPER_END, "%% code\n1\n" * 12 + DEEPER_END),
    ("lines", LESSON_END, ("%% code\n" + "1\n" * 25) * 11 + LESSON_END),
    ("longest_cell", LESSON_END, "%% code\n" + "1\n\n" * 26 + LESSON_END),
    ("figures", LESSON_END, TABLE * 2 + PNG * 2 + IMG * 3 + LESSON_END),
    ("seconds", LESSON_END, "%% code\ntakes(seconds=14)\n" * 4 + LESSON_END),
    ("longest_wait", "takes(seconds=5)", "takes(seconds=16)"),
    ("seconds longest_wait", "takes(seconds=5)", "takes(seconds=N)"),
    ("opening", '*fit*?"**', '*fit*"**'),
    ("opening", "15 minutes", "A while"),
    ("opening", "About 40 minutes", "40 minutes"),
    ("opening", "![A picture](pictures/05_planted.svg)\n", ""),
    ("opening", "At the end you can", "You learn to"),
    ("opening", "You need to know lesson 4.", ""),
    ("closing", "What you can now do", "The end"),
    ("closing", "2 and 16", "two and 16"),
    ("closing", "../labs/05_planted", "../labs/06_fsdp"),
    ("closing", "## Sources\n- [Notes", "## See also\n- [Notes"),
    ("closing", "([arXiv:1910.02054](https://arxiv.org/abs/1910.02054))", "2020"),
    ("closing", "- [DeepSpeed's configuration]", "- [link]"),
    ("typed", "ds.initialize(model=build())", "build('ds.initialize')"),
    ("guesses", ASK, f"1\n{ASK}"),
    ("guesses", "How much?", "How much?\n%% code\n1"),
    ("guesses", ASK, f"{ASK}\n{ASK}"),
    ("guesses", ASK, ""),
    ("guesses", "How much?", "How much."),
    ("guesses", ASK, f'{ASK}\nanother_guess = ask("Held by a rank")'),
    ("guesses", MEASURED, "measured(held, 4)\nprint(held_guess)"),
    ("guesses", MEASURED, "print(held_guess)"),
    ("guesses", MEASURED, f"held_guess.value = 4\n{MEASURED}"),
    ("guesses", DEEPER_END, f"%% markdown\nHow much?\n%% code\nmore_guess = ask()\n{DEEPER_END}"),
    ("stderr", "%% output application/vnd.jupyter.widget-view+json", "%% output stderr"),
    ("devices", "ranks=2)", "ranks=2, backend='gloo')"),
    ("devices", ", device=engine.device", ""),
    ("devices", DEEPER_END, f"{FUNCTION}launch(f, 2)\n{DEEPER_END}"),
    ("taught", "def zero_run(*, steps=2)", "def zero_run(*, steps=3)"),
    ("taught", "def train(", "def run("),
    ("transfer", DEEPER_END, COPIED + DEEPER_END),
    ("transfer", DEEPER_END, COPIED.replace("op=", "group=") + DEEPER_END),
    ("transfer", "20 minutes* · use", "20 minutes* · debug"),
    ("", "At the end you can", "[<b id='b'>word</b>](a b) " * 2000 + "\n\nAt the end you can"),  # 2,100 are still about 2,000
    ("", LESSON_END, TABLE * 6 + LESSON_END),
    ("", MEASURED, "def reveal(guess):\n    measured(guess, 4)\n%% code\nreveal(held_guess)"),
    ("", ", device=engine.device)", ").to(engine.device)"),
    ("", "    total = torch.zeros(1, device=engine.device)", "    torch.set_default_device(0)\n    total = torch.zeros(1)"),
    ("", DEEPER_END, FUNCTION + DEEPER_END),  # no rank calls it
    ("", LESSON_END, COPIED.replace("flatten", "ravel").replace("op=", "group=") + LESSON_END),  # half of the solution
    ("", SOLUTION, "".join(TRAIN.splitlines(keepends=True)[1:3])),  # all of it, but two statements only
]  # fmt: skip


def as_notebook(text: str) -> str:
    cells: list[Any] = []
    for block in re.split(r"^%% ", text, flags=re.MULTILINE)[1:]:
        head, _, body = block.strip().partition("\n")
        kind, *tags = head.split()
        if kind == "code":
            cells.append(nbformat.v4.new_code_cell(body, metadata={"tags": tags}))
        elif kind == "markdown":
            cells.append(nbformat.v4.new_markdown_cell(body))
        elif tags == ["stderr"]:
            cells[-1].outputs.append(nbformat.v4.new_output("stream", name="stderr", text="FutureWarning"))
        else:
            cells[-1].outputs.append(nbformat.v4.new_output("display_data", {tags[0]: body}))
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells))


def broken_in(folder: Path, old: str, new: str) -> dict[str, list[str]]:
    """What is wrong with the lessons of COURSE, with `new` in the place of `old`."""
    assert any(old in text for text in COURSE.values())
    for name, text in COURSE.items():
        changed = text.replace(old, new)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(as_notebook(changed) if name.endswith(".ipynb") else changed, encoding="utf-8")
    return {rule: wrong for path in notebooks(folder) for rule, wrong in findings(read(path)).items()}


@pytest.mark.parametrize(("rule", "old", "new"), CHANGES, ids=[f"{rule}-{n}" for n, (rule, *_) in enumerate(CHANGES)])
def test_a_change_breaks_exactly_this_rule(tmp_path: Path, rule: str, old: str, new: str) -> None:
    wrong = broken_in(tmp_path, old, new)
    assert set(wrong) == set(rule.split()), wrong


def test_every_rule_has_a_change_that_breaks_it() -> None:
    assert {rule for rules, *_ in CHANGES for rule in rules.split()} == set(RULES)


def test_a_command_is_typed_where_a_shell_gets_it(tmp_path: Path) -> None:
    cells = "!axolotl train run.yml", "%%bash\naxolotl train", "run(['beyond', 'check'])", "print('axolotl train')"
    for number, cell in enumerate(cells):
        path = tmp_path / f"07_{number}.ipynb"
        path.write_text(as_notebook(f"%% code\n{cell}"), encoding="utf-8")
        assert any("axolotl" in sentence for sentence in typed(read(path))) == (number == 3), cell


def main() -> None:
    for notebook in map(read, map(Path, sys.argv[1:]) if sys.argv[1:] else notebooks()):
        has, wrong = counts(notebook), findings(notebook)
        print(f"{notebook.name}: " + ", ".join(f"{what} {has[what]:,}/{limit(notebook, what):,}" for what in BUDGET))
        print("".join(f"  {rule}: {sentence}\n" for rule in wrong for sentence in wrong[rule]), end="")
        print(f'  exceptions: "{notebook.name}": "{" ".join(wrong)}",\n' if wrong else "", end="")


if __name__ == "__main__":
    main()
