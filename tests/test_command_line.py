"""`beyond` and what its commands share: fast starts without torch, one sentence for an error, quiet pipes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence

import pytest

from course_tools.__main__ import COMMANDS, main
from course_tools.command_line import ArgumentParser, reports_errors

# What a terminal should show without delay. The aim is 0.4 s on an idle machine; they need 0.05 to 0.3 s of CPU time,
# which, unlike the time on the clock, hardly depends on what else runs there.
WITHOUT_TORCH = [
    ["--help"],
    ["memory", "--model", "llama-3.1-8b"],
    ["plan", "--help"],
    ["check", "--help"],
    ["cluster", "options", "--target", "slurm"],
    ["convert", "--help"],
    ["watch", "--help"],
    ["doctor", "--help"],
    ["proof", "--help"],
    ["progress", "--help"],
    ["class", "--help"],
]
CPU_SECONDS = 1.0


@pytest.mark.parametrize("argv", WITHOUT_TORCH, ids=lambda argv: argv[0])
def test_a_command_starts_fast_and_without_torch(argv: Sequence[str]) -> None:
    code = (
        "import sys, time\nfrom course_tools.__main__ import main\n"
        f"try: main({argv!r})\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\nprint(time.process_time())"
    )
    best = float("inf")
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        best = min(best, float(done.stdout.splitlines()[-1]))
        if best < CPU_SECONDS:
            break
    assert best < CPU_SECONDS, f"{best:.2f} s of CPU time"


def test_the_first_word_must_be_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memroy"]) == 2
    assert capsys.readouterr().err == "beyond has no command 'memroy': did you mean 'memory'?\n"
    assert main(["xyzzy"]) == 2
    assert "choose one of memory, plan, check" in capsys.readouterr().err
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_does_not_understand_gets_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--no-such-option"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith("(--help lists the options).\n")


def test_bad_input_and_files_that_cannot_be_used_end_in_one_sentence(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    @reports_errors
    def read(argv: Sequence[str]) -> int:
        parser = ArgumentParser(prog="read")
        parser.add_argument("path")
        parser.add_argument("--steps", type=int)
        open(parser.parse_args(argv).path).close()
        return 0

    assert read([str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'absent'}: No such file or directory.\n"
    assert read(["x", "--steps", "two"]) == 2
    assert capsys.readouterr().err == "Argument --steps: invalid int value: 'two' (--help lists the options).\n"
    assert read(["x", "--step", "2"]) == 2, "an abbreviation would change its meaning with the next option"


@pytest.mark.parametrize("argv", [["--help"], ["cluster", "options", "--target", "slurm"]])
def test_a_reader_that_goes_away_gets_no_traceback(argv: Sequence[str]) -> None:
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()  # gone before the first line is written
    done = subprocess.run(
        [sys.executable, "-m", "course_tools", *argv], stdout=reader.stdin, stderr=subprocess.PIPE, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 141 or "--help" in argv  # argparse itself ignores the closed pipe if stdout is unbuffered


def test_every_command_has_a_main_and_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    page = capsys.readouterr().out
    assert end.value.code == 0
    for name, (module, text) in COMMANDS.items():
        assert name in page and text.split()[0] in page
        assert callable(importlib.import_module(module).main)
