"""``beyond convert``: split a checkpoint for a grid of ranks, or merge shards."""

from __future__ import annotations

from collections.abc import Sequence

from course_tools.command_line import ArgumentParser, reports_errors
from course_tools.conversion.pieces import LAYOUTS


def parser() -> ArgumentParser:
    """The options of both commands."""
    parser = ArgumentParser(
        prog="beyond convert",
        description="Split a Hugging Face checkpoint with Llama's tensors (Llama, Mistral, Qwen, SmolLM, Granite, Gemma …) "
        "into shards of TP x PP ranks, or merge them.",
        epilog="Exit code 0: done; 2: it could not be, and the sentence says why; nothing is left half-written.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("split", help="a folder for from_pretrained -> a folder of shards")
    command.add_argument("folder", help="the Hugging Face checkpoint")
    command.add_argument("out", help="the folder to make")
    command.add_argument("--tp", type=int, required=True, metavar="N", help="tensor-parallel ranks")
    command.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline stages")
    command.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="megatron: a checkpoint for its --load, with the names of Transformer Engine's layers, or without "
        "(default: %(default)s)",
    )
    command = commands.add_parser("merge", help="a folder of shards -> a folder for from_pretrained")
    command.add_argument("folder", help="the shards, or Megatron's --save, with config.json")
    command.add_argument("out", help="the folder to make")
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Split or merge, and print one line. Returns 0, or 2 after one sentence on stderr."""
    options = vars(parser().parse_args(argv))
    from course_tools.conversion import folders  # imports PyTorch, which --help does not need

    function = {"split": folders.split, "merge": folders.merge}[options.pop("command")]
    print(f"{function(options.pop('folder'), options.pop('out'), **options)} is written.")
    return 0
