"""Pictures of lessons 5 and 6: they show what they are given, carry a text, and refuse nothing to draw."""

import sys

import cloudpickle
import pytest

from course_lib.figures import sharding as drawn
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.observe.held_elements import held_slices

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

MIB = 2**20
ROWS = [
    {"name": "DDP", "measured": {"parameters": 3 * MIB, "gradients": 3 * MIB, "peak": 99 * MIB}, "predicted": 6 * MIB},
    {"name": "ZeRO-3", "predicted": {"parameters": MIB, "master": MIB, "total": 2 * MIB, "padding": 5}},
]


@pytest.fixture
def figures(monkeypatch):
    """The matplotlib figures behind the pictures."""
    seen = []

    def note(figure, alt):
        seen.append(figure)
        return picture(figure, alt)

    picture = drawn.picture
    monkeypatch.setattr(drawn, "picture", note)
    return seen


def lengths(axis):
    return [round(bar.get_width(), 6) for bar in axis.patches]


def test_bytes_by_stage_tells_measured_and_predicted(figures):
    shown = drawn.bytes_by_stage(ROWS, note="2 ranks")
    assert "DDP: measured 6.00 MiB, predicted 6.00 MiB" in shown.alt and "ZeRO-3: predicted 2.00 MiB" in shown.alt
    assert "2 ranks" in shown.alt
    axis = figures[0].axes[0]
    assert lengths(axis) == [3, 3, 6, 1, 1], "peak, total and padding are no parts of the stack"
    outlined = [bar for bar in axis.patches if bar.get_facecolor()[3] == 0]
    assert len(outlined) == 3 and "MiB" in axis.get_xlabel()


def test_traffic_tells_counted_and_formula(figures):
    rows = [{"name": "FSDP2", "counted": {"all_gather": 2 * MIB, "reduce_scatter": MIB}, "formula": 4 * MIB},
            {"name": "DDP", "counted": 3 * MIB}]  # fmt: skip
    shown = drawn.traffic(rows, note="counted by the system")
    assert "FSDP2: counted 3.00 MiB, formula 4.00 MiB; DDP: counted 3.00 MiB" in shown.alt
    axis = figures[0].axes[0]
    assert lengths(axis) == [2, 1, 3] and axis.lines[0].get_xdata()[0] == 4


def hold_both():
    """On a rank: what it holds under DDP, under FSDP2, and under each of ZeRO's stages where DeepSpeed is installed."""
    import importlib.util

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.training.sharded.fsdp_sharding import shard

    torch.set_num_threads(1)
    ids = torch.zeros(1, 4, dtype=torch.long)
    found = {}
    for name, wrap in (("DDP", DistributedDataParallel), ("FSDP2", shard)):
        model = wrap(tiny_llama(layers=1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            found[name] = held_slices(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    stages = (2, 3) if importlib.util.find_spec("deepspeed") else ()
    for stage in stages:
        from course_lib.training.sharded.zero_config import zero_config
        from course_lib.training.sharded.zero_engine import initialize

        ranks = dist.get_world_size()
        config = zero_config(stage, ranks=ranks, global_batch=ranks, bucket_elements=10**6)
        engine = initialize(tiny_llama(layers=1), config)
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            found[f"ZeRO-{stage}"] = held_slices(engine)
            engine.step()
    return found


def covered(slices):
    return sum(end - first for first, end in slices)


def test_real_slices_of_two_ranks(figures, private_tmp):
    found = launch(hold_both, ranks=2, quiet=True, timeout=200).results
    holding = {name: [found[rank][name] for rank in (0, 1)] for name in found[0]}
    whole = sum(p.numel() for p in tiny_llama(layers=1).parameters())
    for rank in (0, 1):
        assert holding["DDP"][rank] == {"elements": whole} | {kind: [(0, whole)] for kind in drawn.HELD}
    for name in set(holding) - {"DDP"}:
        for kind in drawn.HELD:
            mine, theirs = (holding[name][rank][kind] for rank in (0, 1))
            if (name, kind) == ("ZeRO-2", "parameters"):
                assert mine == theirs == [(0, whole)]
                continue
            assert covered(mine) + covered(theirs) == whole, f"{name}: {kind}"
            assert not set(mine) & set(theirs) and len(mine) > 1 or name == "ZeRO-2"
            assert abs(covered(mine) - whole / 2) < 0.01 * whole
    shown = drawn.who_holds_what(holding)
    assert "DDP: parameters 100%, gradients 100%, optimizer 100%" in shown.alt
    assert "FSDP2: parameters 50%, gradients 50%, optimizer 50%" in shown.alt
    assert len(figures[0].axes) >= len(holding)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: drawn.bytes_by_stage([]),
        lambda: drawn.traffic([]),
        lambda: drawn.who_holds_what({}),
        lambda: drawn.who_holds_what({"DDP": []}),
    ],
)
def test_nothing_to_draw_is_a_sentence(draw):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw()


def test_a_row_without_bytes_is_named():
    with pytest.raises(ValueError, match="'ZeRO-9' has no bytes"):
        drawn.bytes_by_stage([*ROWS, {"name": "ZeRO-9", "measured": {"peak": 5}}])
