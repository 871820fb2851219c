"""``beyond convert``: split a checkpoint for a grid of ranks, merge shards, seal the shards of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_tools.command_line import ArgumentParser, reports_errors
from course_tools.conversion.pieces import LAYOUTS


def parser() -> ArgumentParser:
    """The options of the three commands."""
    parser = ArgumentParser(
        prog="beyond convert",
        description="Split a Hugging Face checkpoint (Llama, Qwen2, Qwen3) into shards of TP x PP ranks, or merge them.",
        epilog="Exit code 0: done; 2: it could not be, and the sentence says why; nothing is left half-written.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("split", help="a folder for from_pretrained -> a folder of shards")
    _add_grid(command, "the Hugging Face checkpoint")
    command.add_argument("out", help="the folder to make")
    command.add_argument(
        "--pad-vocab", action="store_true", help="megatron: pad the vocabulary to a multiple of 128 * tp"
    )
    command = commands.add_parser("merge", help="a folder of shards -> a folder for from_pretrained")
    command.add_argument("folder", help="the shards, with config.json and manifest.json")
    command.add_argument("out", help="the folder to make")
    command = commands.add_parser("seal", help="write manifest.json for shards that training wrote")
    _add_grid(command, "the shards, with config.json")
    return parser


def _add_grid(command: Any, folder: str) -> None:
    command.add_argument("folder", help=folder)
    command.add_argument("--tp", type=int, required=True, metavar="N", help="tensor-parallel ranks")
    command.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline stages")
    command.add_argument(
        "--layout", choices=LAYOUTS, default=LAYOUTS[0], help="names and fusions of the shards (default: %(default)s)"
    )


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Split, merge or seal, and print one line. Returns 0, or 2 after one sentence on stderr."""
    options = vars(parser().parse_args(argv))
    from course_tools.conversion import folders  # imports PyTorch, which --help does not need

    function = {"split": folders.split, "merge": folders.merge, "seal": folders.seal}[options.pop("command")]
    paths = [options.pop(name) for name in ("folder", "out") if name in options]
    print(f"{function(*paths, **options)} is written.")
    return 0
