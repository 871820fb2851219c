"""What a page shows: a program's source, a table, and widgets that answer what the library answers."""

from __future__ import annotations

import functools
import html
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import assert_refused

from course_lib import notebook
from course_lib.memory import CARDS, estimate
from course_lib.notebook import show, start_jupyterlab, table
from course_lib.notebook.widgets.all_reduces import all_reduce_explorer
from course_lib.notebook.widgets.buckets import bucket_explorer
from course_lib.notebook.widgets.memory import answer, calculator, timeline_explorer
from course_lib.notebook.widgets.ring_stepper import ring_stepper
from course_lib.notebook.widgets.save_interval import save_interval_explorer
from course_lib.notebook.widgets.schedules import schedule_explorer
from course_lib.notebook.widgets.units import units_player
from course_lib.notebook.widgets.zero import zero_explorer
from course_lib.observe.units import Moment, UnitTimeline


def text(page: str) -> str:
    return html.unescape(re.sub("<[^>]+>", "", page))


class Wiggly:
    """A class whose source holds <b>tags</b>, "quotes" & an ampersand."""

    def grow(self, x: int) -> bool:
        return 1 < x and x > 2


def test_the_source_of_a_module_a_function_or_a_class_is_shown_folded():
    for thing, name in ((notebook, "course_lib.notebook"), (Wiggly, "Wiggly"), (Wiggly.grow, "grow")):
        shown, source = show(thing), inspect.getsource(thing)
        page = shown._repr_html_()
        assert repr(shown) == source and source.strip("\n") in text(page) and name in text(page).split("(")[0]
        assert page.startswith("<details>")  # folded
    shown = show(Path(__file__).parents[1] / "lessons" / "07_axolotl" / "base.yml")
    assert "micro_batch_size" in text(shown._repr_html_()) and shown._repr_html_().startswith("<details>")
    without = (3, "text", None, len, dict, Wiggly(), functools.partial(Wiggly.grow, 1), [Wiggly])
    assert_refused((lambda thing=thing: show(thing), ValueError, "no source") for thing in without)


def test_a_table_says_the_same_as_text_and_on_the_page():
    rows = [
        {"link": "NVLink <b> & co", "bytes": 1234567, "speed-up": 1.97654, "on": True, 2: np.int64(16384)},
        {"link": "Ethernet", "bytes": 4, "speed-up": 123456.7, "on": False, 2: "many"},
    ]
    shown = table(rows, caption="a <b> c")
    expected = ["link", "bytes", "speed-up", "on", "2"]
    expected += ["NVLink <b> & co", "1,234,567", "1.977", "True", "16,384", "Ethernet", "4", "123,457", "False", "many"]
    page = shown._repr_html_()
    assert text(page) == "a <b> c" + "".join(expected)
    caption, *lines = repr(shown).splitlines()
    assert caption == "a <b> c" and [cell for line in lines for cell in re.split(r"\s{2,}", line)] == expected
    sides = re.findall(r"<t[hd][^>]*text-align:(\w+)", page)
    assert sides == ["left", "right", "right", "left", "left"] * 3  # numbers to the right
    assert repr(table([{"name": "a", "n": 1}, {"name": "b"}])).splitlines()[-1] == "b"
    assert_refused([(lambda: table([]), ValueError, "one row")])


# ------------------------------------------------------------------------------------------------------------- widgets
def controls(widget):
    return {control.description: control for column in widget.children[0].children for control in column.children}


def test_the_calculator_answers_what_the_estimate_says_and_follows_its_sliders():
    need, words = answer("llama-3.1-8b", "t4", method="qlora", precision="fp16-mixed")
    assert need == estimate("llama-3.1-8b", method="qlora", precision="fp16-mixed")
    assert need.fits(CARDS["t4"].memory) is False and "does not fit" in words
    for widget, name, value, expected in (
        (calculator(), "card", "h200", "on h200: fits"),
        (calculator(), "card", "t4", "no bf16"),  # a T4 wants fp16: the sentence says so
        (timeline_explorer(), "tokens each", 1024, "2 x 1,024 tokens"),
        (timeline_explorer(), "loss", "fused", "in a block"),
    ):
        before = widget.children[1].value
        assert expected not in before and widget._repr_mimebundle_()["text/html"] == before
        controls(widget)[name].value = value
        assert expected in widget.children[1].value, name


def test_the_schedule_explorer_answers_also_where_a_choice_does_not_fit():
    """The idle shares and the micro-batches kept that lesson 8 quotes."""
    widget = schedule_explorer()
    shown, chosen = widget.children[1], controls(widget)
    assert widget._repr_mimebundle_()["text/html"] == shown.value and "alt=" in shown.value
    for settings, expected in (
        ({"stages": 8, "micro-batches": 32}, "17.9% of the time"),
        ({"schedule": "interleaved 1F1B", "virtual stages": 4}, "5.2% of the time"),
        ({}, "9.75 micro-batches"),
        ({"micro-batches": 12}, "Does not fit"),
        ({"schedule": "zero bubble (ZB-H1)"}, "16.3% of the time"),
    ):
        for name, value in settings.items():
            chosen[name].value = value
        assert expected in shown.value, settings
    assert_refused([(lambda: ring_stepper(9), ValueError, "ranks=9")])


def test_the_save_interval_and_what_a_week_loses_follow_the_sliders():
    """By hand: the interval is √(2 · save · time between failures); the loss here is the share of saves."""
    widget = save_interval_explorer(lambda every, save, between, restart: save / (every + save), gpu_hours=50_000)
    shown = controls(widget)
    for gpus, save, expected in (
        (1024, 60, "every 77 minutes, loses 1.3%: 2,218 of 172,032"),
        (64, 5, "every 88 minutes"),
    ):
        shown["GPUs"].value, shown["a save, s"].value = gpus, save
        assert expected in widget.children[1].value, (gpus, save)


def test_a_larger_bucket_pays_fewer_latencies_and_one_gpu_sends_nothing():
    """Seconds of a step, from the figure's title, which the lesson's answers quote."""
    widget = bucket_explorer()
    shown = controls(widget)
    shown["tokens per GPU"].value = 8192
    for gpus, mib, expected in ((64, 25, 2.04), (64, 400, 1.05), (1, 400, 6 * 8.03e9 * 8192 / 400e12)):
        shown["GPUs"].value, shown["bucket, MiB"].value = gpus, mib
        seconds = float(re.search(r"([\d.]+) s a step", widget.children[1].value)[1])
        assert seconds == pytest.approx(expected, abs=0.006), (gpus, mib)


def test_doubling_gives_way_at_the_size_where_the_times_are_equal():
    widget = all_reduce_explorer()
    shown = controls(widget)
    for ranks, link, first in (  # log2 n α · bandwidth / (log2 n - 2 (n - 1) / n), up to a power of two
        (64, "infiniband-ndr", "1.00 MiB"),  # 1.04 MB
        (8, "infiniband-ndr", "2.00 MiB"),  # 1.68 MB
        (8, "ethernet-10", "128.00 KiB"),  # 90 KB
    ):
        shown["ranks"].value, shown["link"].value = ranks, link
        told = f"doubling from 1.00 KiB on, halving and doubling from {first} on."
        assert told in widget.children[1].value, (ranks, link)


def test_stages_divide_what_they_shard_and_offloading_moves_it():
    widget = zero_explorer()
    shown = controls(widget)
    for name, value, expected in (
        (
            "GPUs",
            8,
            ("DDP: computed 128 GB", "stage 1: computed 44 GB", "stage 2: computed 30 GB", "stage 3: computed 16 GB"),
        ),
        ("precision", "bf16, bf16 masters", ("DDP: computed 80 GB", "stage 3: computed 10 GB")),
        ("offload", "all", ("(host: 8 GB): computed 16 GB", "(host: 10 GB): computed 0 GB")),  # 6 + 2 bytes, of 8 ranks
    ):
        shown[name].value = value
        for part in expected:
            assert part in widget.children[1].value, (name, part)


def test_a_recorded_step_is_played_for_each_choice_of_units():
    moments = [Moment(0, "between steps", {"a": 0.0}), Moment(1, "forward of a ends", {"a": 1.0})]
    moments.append(Moment(2, "backward is over", {"a": 0.0}))
    widget = units_player({name: UnitTimeline([0, top, 0], moments, 0.5) for name, top in (("small", 2), ("large", 3))})
    shown = controls(widget)
    shown["moment"].value = 1
    assert "gathered: a." in widget.children[1].value and "Units: small" in widget.children[1].value
    shown["units"].value, shown["moment"].value = "large", 2
    assert "gathered: nothing." in widget.children[1].value and "Units: large" in widget.children[1].value
    page = widget._repr_mimebundle_()
    assert (page[0] if isinstance(page, tuple) else page)["text/html"].count("<img") == 2  # both, without a kernel


def test_jupyterlab_ends_kernels_of_closed_notebooks_after_half_an_hour_and_says_so(monkeypatch, capsys):
    labapp = pytest.importorskip("jupyterlab.labapp")
    monkeypatch.setattr(labapp, "main", lambda: None)
    for typed, expected in (([], 1800), (["--MappingKernelManager.cull_idle_timeout=0"], 0)):
        monkeypatch.setattr(sys, "argv", ["lab", *typed])
        monkeypatch.setitem(sys.modules, "rfc3987_syntax", None)  # put back afterwards
        start_jupyterlab.main()
        timeouts = [word for word in sys.argv if "cull_idle_timeout" in word]
        assert timeouts == [f"--MappingKernelManager.cull_idle_timeout={expected}"]
        assert (str(start_jupyterlab.IDLE_MINUTES) in capsys.readouterr().out) == (not typed)
