"""`beyond` and what its commands share: fast starts without torch, one sentence for an error, quiet pipes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from course_tools.__main__ import COMMANDS, main
from course_tools.command_line import ArgumentParser, reports_errors

WITHOUT_TORCH = [
    ["--help"],
    ["memory", "--model", "llama-3.1-8b"],
    ["cluster", "options", "--target", "slurm"],
    *([name, "--help"] for name in ("plan", "check", "convert", "watch", "doctor", "proof", "progress", "class")),
]


def test_commands_that_a_terminal_should_show_without_delay_do_not_import_torch() -> None:
    code = f"""if True:
        import sys
        from course_tools.__main__ import main
        for argv in {WITHOUT_TORCH!r}:
            try:
                assert not main(argv), argv
            except SystemExit as end:
                assert not end.code, argv
            assert "torch" not in sys.modules, argv"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_bad_input_ends_in_one_line_that_names_it_and_exit_code_2(tmp_path, capsys) -> None:
    @reports_errors
    def read(argv: Sequence[str]) -> int:
        parser = ArgumentParser(prog="read")
        parser.add_argument("path")
        parser.add_argument("--steps", type=int)
        open(parser.parse_args(argv).path).close()
        return 0

    rows = [
        (main, ["memroy"], "'memory'"),
        (main, ["xyzzy"], "memory, plan, check"),
        (main, [], "COMMAND"),
        *((main, [name, "--no-such-option"], "--help") for name in COMMANDS),
        (read, [str(tmp_path / "absent")], str(tmp_path / "absent")),
        (read, ["x", "--steps", "two"], "'two'"),
        (read, ["x", "--step", "2"], "--step"),  # an abbreviation would change its meaning with the next option
    ]
    for command, argv, fragment in rows:
        assert command(argv) == 2, argv
        error = capsys.readouterr().err
        assert fragment in error and error.count("\n") == 1, (argv, error)


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()  # gone before the first line is written
    command = [sys.executable, "-m", "course_tools", "cluster", "options", "--target", "slurm"]
    done = subprocess.run(command, stdout=reader.stdin, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")
