"""Lab 7: its checks against the planted answers, and what Axolotl itself says of the lab's YAMLs and bins."""

import pytest
import yaml
from planted import lab07 as planted
from planted.contract import Contract

from course_checks.lab07 import broken_runs, lab, packing, runs
from course_lib.launch import launch
from course_tools.axolotl import warm_axolotl


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first launch of a session imports Axolotl, which is not to count against a check's patience."""
    warm_axolotl()


class TestChecks(Contract):
    lab, planted = lab, planted


def _with_axolotl(texts: dict[str, str], mended: dict, lengths: list[int], capacity: int) -> tuple[dict, list, set]:
    """By Axolotl's own code: whether it refuses each YAML, as it is and mended; its packer's bins; the keys it knows."""
    import numpy as np
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.samplers.multipack import pack_group
    from axolotl.utils.schemas.config import AxolotlInputConfig

    def refused(config: dict, old_card: bool) -> bool:
        cards = {"bf16": not old_card, "fp8": False, "tf32": not old_card, "n_gpu": 8, "n_node": 1}
        cards["compute_capability"] = "sm_75" if old_card else "sm_90"
        try:
            validate_config(DictDefault(config), capabilities=cards, env_capabilities={"torch_version": "2.13.0"})
        except ValueError:
            return True
        return False

    refusals = {}
    for name, text in texts.items():
        config, old_card = yaml.safe_load(text), name == "colab.yml"
        good = {key: value for key, value in {**config, **mended[name]}.items() if value is not None}
        refusals[name] = refused(config, old_card), refused(good, old_card)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    bins = pack_group(np.array([lengths[i] for i in order]), 0, capacity, len(lengths), len(lengths))
    return refusals, [[order[i] for i in each] for each in bins], set(AxolotlInputConfig.model_fields)


def test_axolotl_refuses_one_of_the_five_packs_as_we_do_and_knows_our_keys():
    lengths, capacity = packing.BINS[-1]
    arguments = broken_runs.BROKEN, planted.MENDED, list(lengths), capacity
    refusals, bins, keys = launch(_with_axolotl, *arguments, ranks=1, quiet=True, timeout=120).results[0]
    assert set(runs.KNOWN) <= keys and "gradient_acumulation_steps" not in keys
    assert bins == packing.true_pack(lengths, capacity)
    assert {name for name, (broken, _) in refusals.items() if broken} == {"shards.yml"}
    assert not any(good for _, good in refusals.values())
