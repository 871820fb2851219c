"""Lab 7, exercise 3: four files that `beyond check` passes, and that train something else than was meant."""

from __future__ import annotations

import json
import random
import re
import string
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from course_checks.harness import Contract, NotYet, fresh_seed, in_bytes, plain, returned, without_limit
from course_checks.lab07.common import FOLDER, lab
from course_lib.launch import RankFailed
from course_lib.observe import Collective
from course_tools.axolotl import make_inputs, merged, preprocess, train

ROOM = 768  # tokens that a row may have on the card of short.yml
CONCERNED = {  # the keys that somebody may try who has understood what was seen; some of them mend nothing
    "endless.yml": "special_tokens eot_tokens train_on_eos train_on_eot train_on_inputs",
    "parrot.yml": "train_on_inputs roles_to_train",
    "short.yml": "sequence_len excess_length_strategy",
    "wide.yml": "fsdp_config auto_wrap_policy transformer_layer_cls_to_wrap min_num_params reshard_after_forward",
}
LONGEST = 94, 301  # tokens of a question and its answer: the longest row of runs/axolotl/instructions.jsonl
ANSWER = re.compile(rb"(?:\xfeassistant\n|### Response:\n|$)([^\xff]*)")  # ids are bytes; \xff is <|im_end|>


@lab.exercise("Four files that are quietly wrong", importance=5, difficulty=3, minutes=25)
def mended_files(mended: Callable[[], Any]) -> str:
    """Runs each file with its changes: the labels in the prepared data, and what two ranks gather."""
    changes, rng, told = _changes(mended()), random.Random(fresh_seed()), []
    with tempfile.TemporaryDirectory(prefix="lab07-files-") as place:
        layers, data = rng.choice((2, 3)), Path(place, "rows.jsonl")
        tiny, answers = str(make_inputs(place, layers=layers) / "tiny"), _write(rng, data)
        for name in CONCERNED:
            contract, given = Contract(about=name), {"base_model": tiny, "tokenizer_config": tiny}
            config = merged(FOLDER / name, changes.get(name, {}), given, output_dir=f"{place}/out")
            config["datasets"][0]["path"], config["dataset_prepared_path"] = str(data), f"{place}/{name}"
            try:
                with without_limit():  # the ranks have a limit of their own
                    _gathered(contract, config, layers) if name == "wide.yml" else _labelled(contract, config, answers)
            except RankFailed as error:
                raise contract.broken(f"Axolotl stops: {' '.join(error.cause_message.split())[:300]}") from None
            told.append(contract.evidence())
    return "; ".join(told)


def _changes(answer: Any) -> dict[str, dict[str, Any]]:
    """The answer in plain values; NotYet where it changes what it need not."""
    answer = json.loads(json.dumps(returned(answer, dict, "{file: changes}"), default=plain))
    for name, changes in answer.items():
        if name not in CONCERNED:
            raise NotYet(f"{name!r} is none of the files {', '.join(CONCERNED)}")
        both = returned(changes, dict, f"a mapping for {name}"), merged(FOLDER / name)
        new, old = (each | (each.get("fsdp_config") or {}) for each in both)
        for key in new:
            if key not in CONCERNED[name].split() and (key not in old or new[key] != old[key]):
                raise NotYet(f"{name}: {key} has nothing to do with what was seen: change as little as you can")
    return answer


def _write(rng: random.Random, path: Path) -> set[str]:
    """Random letters, as alpaca and as chat; returns the answers."""
    sizes = [LONGEST, *((rng.randint(10, LONGEST[0]), rng.randint(20, LONGEST[1])) for _ in range(39))]
    pairs = [["".join(rng.choices(string.ascii_letters, k=size)) for size in both] for both in sizes]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    rows = [{"instruction": q["content"], "output": a["content"], "messages": [q, a]} for q, a in chats]
    path.write_text("\n".join(map(json.dumps, rows)))
    return {answer for _, answer in pairs}


def _labelled(contract: Contract, config: dict[str, Any], answers: set[str]) -> None:
    """Which tokens of the prepared data have a label."""
    from datasets import load_from_disk

    whole, texts, ends, others = [], 0, 0, 0
    for row in (row for part in preprocess(config).glob("*/") for row in load_from_disk(str(part))):
        labels, answer = [label != -100 for label in row["labels"]], ANSWER.search(bytes(row["input_ids"]))
        whole.append(answer[1].decode() in answers)
        text, end = sum(labels[slice(*answer.span(1))]), sum(labels[answer.end() : answer.end() + 1])
        texts, ends, others = texts + text, ends + end, others + sum(labels) - text - end
    total, letters, length = len(answers), sum(map(len, answers)), int(config.get("sequence_len", 0))
    contract.holds(len(whole) == total, f"{total - len(whole)} of {total} answers are not in the prepared data")
    contract.holds(all(whole), f"{whole.count(False)} of {total} answers are cut")
    contract.holds(length <= ROOM, f"rows of {length} tokens, and the card has room for {ROOM}")
    contract.holds(not others, f"{others} tokens that are not the assistant's have a label")
    contract.holds(texts == letters, f"{letters - texts} of the answers' {letters} tokens have no label")
    contract.holds(ends == total, f"the end token of {total - ends} of {total} answers has no label")
    contract.say(f"{texts} tokens of {total} answers and {ends} ends have a label, and nothing else")


def until_backward_ends(collectives: Sequence[Collective]) -> list[Collective]:
    """Rank 0's collectives in their order, up to the last reduce-scatter; all of them where there is none."""
    calls = sorted((call for call in collectives if call.rank == 0), key=lambda call: call.start)
    ends = [number for number, call in enumerate(calls, 1) if call.kind == "reduce_scatter"]
    return calls[: max(ends, default=len(calls))]


def _gathered(contract: Contract, config: dict[str, Any], layers: int) -> None:
    """What two ranks gather of the weights in a step."""
    from course_lib.models import tiny_llama

    run = train(merged(config, max_steps=1, gradient_accumulation_steps=1, pad_to_sequence_len=False), ranks=2)
    calls, whole = until_backward_ends(run.run.collectives), 4 * run.witness[0]["total_elements"]
    block = 4 * sum(p.numel() for p in tiny_llama(layers=layers).model.layers[0].parameters())  # bytes, in fp32
    gathers = [2 * call.bytes for call in calls if call.kind == "all_gather"]
    largest, times = max(gathers, default=0), sum(gathers) / whole
    contract.holds(
        {"all_gather", "reduce_scatter"} <= {call.kind for call in calls},
        "no weights are gathered: they are not sharded, and each rank holds all of them",
    )
    told = f"the largest gather brings {in_bytes(largest)} of the weights' {in_bytes(whole)}"
    contract.holds(largest <= block, f"{told}, and a block has {in_bytes(block)}")
    contract.holds(times >= 2, f"a step gathers {times:.1f} times the weights: forward's stay until backward")
    contract.say(f"{told}, and a step gathers them {times:.1f} times")
