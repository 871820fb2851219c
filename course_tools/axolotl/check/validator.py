"""Axolotl's own verdict on a YAML, from a process that loads Axolotl once and then answers in a fraction of a second."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from course_lib.launch.checkout import python_path
from course_lib.memory.cards import Cards
from course_lib.validation import did_you_mean
from course_tools.axolotl.check.document import Document, KeyPath, Renamed, written_number
from course_tools.axolotl.check.findings import Finding, finding

AXOLOTL = "0.21.0"  # as requirements-no-deps.txt pins it
MISSING = Finding(
    "note",
    "",
    None,
    "Axolotl is not installed, so its validator was not asked, and misspelt keys and wrong types were not looked for.",
    f"pip install --no-deps --ignore-requires-python axolotl=={AXOLOTL}",
)
QUIET = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
SURE = 0.85  # how alike a key and its likely name must be for `--fix`
PATIENCE = 180.0  # seconds: on a busy machine the import alone takes a minute
ASSUMED = (8, 0)  # compute capability where a card is known by its memory alone

_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None


def findings(document: Document, cluster: Cards | None, folder: Path) -> list[Finding]:
    """What Axolotl refuses, warns of, and reads past. Starts its process on the first call, and says so on stderr."""
    if importlib.util.find_spec("axolotl") is None:
        return [MISSING]
    try:
        answer = ask(document.values, pretended(cluster), folder)
    except RuntimeError as error:
        return [Finding("note", "", None, f"Axolotl's validator was not asked: {error}")]
    return [
        *_refusals(document, answer),
        *_plugins(document, answer),
        *_unknown(document, answer),
        *_rest(document, answer),
    ]


def pretended(cluster: Cards | None) -> dict[str, Any]:
    """The capabilities that Axolotl would read off the cards."""
    major, minor = (cluster.card.capability if cluster and cluster.card else None) or ASSUMED
    return {
        "bf16": (major, minor) >= (8, 0),
        "fp8": (major, minor) >= (9, 0),
        "tf32": (major, minor) >= (8, 0),
        "n_gpu": cluster.per_node if cluster else 1,
        "n_node": cluster.nodes if cluster else 1,
        "compute_capability": f"sm_{major}{minor}",
    }


def ask(values: dict[str, Any], capabilities: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The answer of `axolotl_process.answer`.

    Raises:
        RuntimeError: Axolotl cannot be imported, or its process ended or did not answer; the sentence says which.
    """
    global _process
    question = {"values": values, "capabilities": capabilities, "folder": os.path.abspath(folder)}
    try:
        line = json.dumps(question, default=str).encode() + b"\n"
    except (TypeError, ValueError) as error:  # a date as a key, a list inside itself
        raise RuntimeError(f"the YAML holds what no JSON can hold ({error}).") from None
    with _lock:
        try:
            if _process is None or _process.poll() is not None:
                _process = _start()
                ready = _answer(_process)
                if "failed" in ready:
                    raise RuntimeError(f"{ready['failed'].rstrip('.')}.")
            assert _process.stdin is not None
            _process.stdin.write(line)
            _process.stdin.flush()
            return _answer(_process)
        except BaseException as error:  # an answer that was not waited for must not be taken for the next one's
            close()
            if isinstance(error, BrokenPipeError):
                raise RuntimeError("its process ended.") from None
            raise


def close() -> None:
    """End the process, if there is one."""
    global _process
    ended, _process = _process, None
    if ended is not None:
        ended.kill()
        for pipe in (ended.stdin, ended.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        ended.wait()


atexit.register(close)


def _start() -> subprocess.Popen[bytes]:
    if sys.stderr.isatty():  # a notebook says by itself that a cell takes long
        print("Reading Axolotl's schema once: about ten seconds.", file=sys.stderr, flush=True)
    return subprocess.Popen(
        [sys.executable, "-m", "course_tools.axolotl.check.axolotl_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | QUIET | {"PYTHONPATH": python_path()},
        start_new_session=True,  # Ctrl-C in a terminal is for the program that asks; it ends this one
    )


def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], PATIENCE)[0]:
        raise RuntimeError(f"it gave no answer within {PATIENCE:.0f} s.")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"its process ended with exit code {process.wait()}.")
    return json.loads(line)


def _refusals(document: Document, answer: dict[str, Any]) -> Iterator[Finding]:
    found: dict[tuple[Any, ...], list[str]] = {}  # pydantic words one refusal for each type that a key may have
    for one in answer["refusals"]:
        words = " ".join(one["words"].removeprefix("Value error, ").split()).rstrip(".")
        path = _path_in(one["path"], document.values)
        if not path:
            keys = [word for word in re.findall(r"[a-z][a-z0-9_]+", words) if word in document.values]
            keys = keys or re.findall(r"cfg\.(\w+)", words)
            path = (max(keys, key=len),) if keys else ()
        found.setdefault(path, []).append(words)
    for path, words in found.items():
        if words[0].startswith(("ImportError", "ModuleNotFoundError")):
            sentence = f"Axolotl's validator stopped for want of a package here: “{words[0]}”."
            yield finding(document, "note", (), sentence, "install it where the run starts")
            continue
        sentence = f"Axolotl refuses it: “{'; or '.join(dict.fromkeys(words))}”."
        yield finding(document, "error", path, sentence, _mended(document, path, sentence))


def _path_in(steps: list[Any], values: Any) -> tuple[Any, ...]:
    """The steps that lead into the values; pydantic names classes between them."""
    path: list[Any] = []
    for step in steps:
        if (isinstance(values, dict) and step in values) or (isinstance(values, list) and step in range(len(values))):
            path.append(step)
            values = values[step]
        elif not path and isinstance(step, str):
            return (step,)  # a key that is missing
    return tuple(path)


def _mended(document: Document, path: tuple[Any, ...], sentence: str) -> str:
    """What to write where YAML itself is the trap."""
    value = document.value(*path)
    if path == ("resume_from_checkpoint",) and value is True:
        return "write auto_resume_from_checkpoints: true"
    if path in document.texts_like_numbers:
        return f"YAML 1.1 reads {value} as text: write {written_number(value)}"
    if "valid string" in sentence and isinstance(value, bool):
        words = ("no", "off", "false") if value is False else ("yes", "on", "true")
        return f'YAML reads a bare {", ".join(words)} as {words[2]}: write {path[-1]}: "{words[0]}"'
    if "valid string" in sentence and isinstance(value, int | float):
        return f'write {path[-1]}: "{value}"'
    near = did_you_mean(value, re.findall(r"'([\w.]+)'", sentence)) if isinstance(value, str) else []
    return f"write {near[0]}" if near else f"add {path[-1]}: …" if "Field required" in sentence else ""


def _plugins(document: Document, answer: dict[str, Any]) -> Iterator[Finding]:
    for name, reason in answer["plugins"].items():
        sentence = f"{name} cannot be loaded here, so its keys were not checked ({' '.join(reason.split())})."
        yield finding(document, "note", ("plugins",), sentence, "install what it needs where the run starts")


def _unknown(document: Document, answer: dict[str, Any]) -> Iterator[Finding]:
    heard = " ".join([*(one["words"] for one in answer["refusals"]), *answer["warnings"]])
    for one in answer["unknown"]:
        path, near = tuple(one["path"]), one["near"]
        key, here = str(path[-1]), " here" if len(path) > 1 else ""
        if re.search(rf"[`'.]{re.escape(key)}\b", heard) or (path[0] == "fsdp_config" and "FSDP1" in heard):
            continue  # Axolotl speaks of it itself
        mend: dict[KeyPath, Any] = {}
        if near:
            fix = f"write {near}"
            mend = {path: Renamed(near)} if SequenceMatcher(None, key, near).ratio() > SURE else {}
        elif one["section"] is None:
            fix = "leave it out, or name the plugin that brings it in plugins"
        else:
            fix = f"put it into {one['section']}" if one["section"] else "put it at the top level"
            if not isinstance(document.values.get(one["section"]), list):
                mend = {path: None, (*filter(None, [one["section"]]), key): document.value(*path)}
        # a plugin that cannot be loaded here may bring it
        level = "note" if one["null"] or answer["plugins"] else "error"
        sentence = f"Axolotl knows no such key{here} and reads past it without a word."
        yield finding(document, level, path, sentence, fix, mend)


def _rest(document: Document, answer: dict[str, Any]) -> Iterator[Finding]:
    for one in answer["names"]:
        key, value = one["key"], document.values[one["key"]]
        what = key.replace("lr_", "").replace("_", " ")
        sentence = f"Neither Axolotl nor transformers has the {what} {value!r}; only the trainer will say so."
        fix, mend = (f"write {one['near']}", {(key,): one["near"]}) if one["near"] else ("look its name up", {})
        yield finding(document, "warning", (key,), sentence, fix, mend)
    folded: dict[str, list[str]] = {}  # one sentence for each key that is meant is said once
    for line in answer["warnings"]:
        if "load required plugin" not in line and "LoRA kernel optimizations" not in line:
            folded.setdefault(re.sub(r"`[^`]*`|'[^']*'|\b\w*_\w+\b", "…", line), []).append(" ".join(line.split()))
    for same in folded.values():
        more = f" (and {len(same) - 1} more like it)" if same[1:] else ""
        yield Finding("note", "", None, f"Axolotl: “{same[0]}”{more}")
