"""Lab 7: its checks against the planted answers; its prices against a simulation; and what it says of its files."""

import random
from pathlib import Path

import mutants
import pytest
from planted import lab07 as planted

from course_checks.lab07 import files, lab
from course_checks.lab07.saving_plan import CLUSTERS, Cluster, dollars
from course_lib.models.data import instructions
from course_tools.axolotl import make_inputs, warm_axolotl
from course_tools.axolotl.check import check


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The first launch of a session imports Axolotl, which is not to count against a check's patience."""
    warm_axolotl()


@pytest.mark.parametrize("exercise", lab.exercises)
def test_wrong_answers_hear_their_word(exercise: str, monkeypatch) -> None:
    monkeypatch.chdir(mutants.ROOT / "solutions")
    assert not (wrong := mutants.misjudged(lab, planted, exercise)), "\n".join(wrong)


@pytest.mark.parametrize("exercise", planted.FILE_MUTANTS)
def test_files_that_do_something_else_hear_their_word(exercise: str, tmp_path: Path) -> None:
    name, wrong = planted.FILE_MUTANTS[exercise]
    file = mutants.ROOT / "solutions" / lab.name / name
    assert not (survivors := mutants.unheard(lab.exercises[exercise], file, wrong, tmp_path)), "\n".join(survivors)


@pytest.mark.parametrize("text", planted.RIGHT_FILES["slurm_job"])
def test_right_jobs_written_another_way_pass(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(text, encoding="utf-8")
    assert (verdict := lab.slurm_job(lambda: tmp_path / "job.sbatch")).status == "passed", verdict


def test_beyond_check_finds_nothing_in_the_four_files_and_what_they_say_of_the_data_holds(
    tmp_path, monkeypatch
) -> None:
    """By the course's own rules; Axolotl's validator takes ten seconds a file, and the exercise's check runs Axolotl."""
    make_inputs(tmp_path / "runs/axolotl")
    monkeypatch.chdir(tmp_path)
    for name in files.CONCERNED:
        assert not check(files.FOLDER / name, gpus="2xcpu", validate=False).findings, name
    assert max(len((pair["question"] + pair["answer"]).encode()) for pair in instructions()) == sum(files.LONGEST)
    longest = max(len(pair["answer"].encode()) for pair in instructions())
    assert longest == files.LONGEST[1] and f"{longest} tokens" in (files.FOLDER / "short.yml").read_text(
        encoding="utf-8"
    )


# Saves and restarts are long and failures are frequent, so that what first order leaves out is large here.
HARSH = Cluster(1024, 4.0, 700, 300, 180, 40, 500, 0.3, 2.0)


def played(cluster: Cluster, way: str, steps: int, failures: int) -> float:
    """Dollars per day of a job that goes on until it has failed so often, at times drawn with one seed."""
    draw, between = random.Random(0), cluster.gpu_hours_between_failures * 3600 / cluster.gpus
    stop, write = (cluster.save_seconds, 0.0) if way == "blocking" else (cluster.copy_seconds, cluster.write_seconds)
    training = steps * cluster.step_seconds
    clock = at = counts = copied = to_write = 0.0  # seconds; at, counts, copied: seconds' worth of steps
    for _ in range(failures):
        left = draw.expovariate(1 / between)
        while True:  # one phase after the other until the failure
            if at >= copied + training:  # the stop for a save; nothing is being written any more
                phase, speed = stop, 0.0
            elif to_write:
                phase, speed = to_write, 1 - cluster.slowdown
            else:
                phase, speed = copied + training - at, 1.0
            if left < phase:
                break
            left, clock = left - phase, clock + phase
            if speed == 0:
                copied, to_write = at, write
                counts = counts if write else copied
            elif to_write:
                at, counts, to_write = at + phase * speed, copied, 0.0
            else:
                at = copied + training
        clock += left + cluster.restart_seconds
        at, copied, to_write = counts, counts, 0.0
    return cluster.gpus * 24 * cluster.dollars_per_gpu_hour * (1 - counts / clock)


@pytest.mark.parametrize(
    ("cluster", "way", "steps"), [(HARSH, "blocking", 170), (HARSH, "async", 150), (CLUSTERS[3], "async", 120)]
)
def test_the_price_is_that_of_a_simulation(cluster: Cluster, way: str, steps: int) -> None:
    # With 6,000 failures the lost share scatters by less than 1 / sqrt(6,000) = 1.3 % of itself; the seed stays the same.
    # A price for async that gives every try the same length is off by 15 % or more.
    assert played(cluster, way, steps, failures=6_000) == pytest.approx(dollars(cluster, way, steps), rel=0.02)
