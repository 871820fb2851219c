"""The capstones of labs 2, 4, 5 and 6: their checks against scripts that train something else."""

import importlib
from pathlib import Path
from types import ModuleType

import mutants
import pytest
from planted import lab02, lab04, lab05, lab06

from course_lib.launch import warm_on_cpu
from course_lib.on_cpu.deepspeed import SLOW

CAPSTONES = {"fits": lab02, "many_gpus": lab04, "sharded": lab05, "fully_sharded": lab06}


@pytest.mark.parametrize(("name", "planted"), CAPSTONES.items(), ids=CAPSTONES)
def test_scripts_that_train_something_else_hear_their_word(name: str, planted: ModuleType, tmp_path: Path) -> None:
    warm_on_cpu(*SLOW, "peft", "bitsandbytes")
    check = importlib.import_module(f"course_checks.{planted.__name__[-5:]}").lab.exercises[name]
    script = mutants.ROOT / "solutions" / check.lab.name / f"{name}.py"
    assert not (wrong := mutants.unheard(check, script, planted.SCRIPT_MUTANTS, tmp_path)), "\n".join(wrong)
