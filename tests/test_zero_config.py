"""DeepSpeed configurations: what is written for each stage, and a sentence for each way to get one wrong."""

from __future__ import annotations

import copy
import json

import pytest

from course_lib.training.sharded.zero_config import (
    batch_sizes,
    check_config,
    host_bytes,
    read_config,
    without_compiling,
    zero_config,
)
from course_lib.training.sharded.zero_keys import KNOWN, check_keys

GOOD = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
}


def changed(**changes):
    """GOOD with other values; `zero` goes into its zero_optimization."""
    config = copy.deepcopy(GOOD)
    config["zero_optimization"] |= changes.pop("zero", {})
    return config | changes


def test_a_good_one_passes_and_is_left_as_it_was():
    config = copy.deepcopy(GOOD)
    check_config(config, ranks=4)
    assert config == GOOD


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_written_for_a_stage(stage):
    config = zero_config(stage, ranks=2, global_batch=24, gradient_accumulation_steps=3, lr=0.5, max_grad_norm=2.0)
    check_config(json.loads(json.dumps(config)), ranks=2)  # plain JSON
    assert batch_sizes(config, ranks=2) == (24, 4, 3)
    assert config["gradient_clipping"] == 2.0 and config["zero_optimization"]["stage"] == stage
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.01, "torch_adam": True}}
    assert ("reduce_bucket_size" in config["zero_optimization"]) == (stage > 0)
    assert ("stage3_param_persistence_threshold" in config["zero_optimization"]) == (stage == 3)
    assert "bf16" not in config and "fp16" not in config


def test_no_clipping_is_said_since_deepspeed_s_default_is_to_clip():
    assert zero_config(2, ranks=1)["gradient_clipping"] == 0.0


def test_offload_and_precision_and_buckets_arrive():
    config = zero_config(3, ranks=1, offload="all", precision="bf16", bucket_elements=7, prefetch_elements=5)
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (7, 5)
    assert config["bf16"] == {"enabled": True} and config["zero_force_ds_cpu_optimizer"] is False
    only = zero_config(1, ranks=1, offload="optimizer", compiled=True)
    assert only["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}  # page-locked, as DeepSpeed has it
    assert "offload_param" not in only["zero_optimization"] and "torch_adam" not in only["optimizer"]["params"]
    disk = zero_config(3, ranks=1, offload="nvme", nvme_path="/swap")["zero_optimization"]["offload_param"]
    assert (disk["device"], disk["nvme_path"]) == ("nvme", "/swap")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(stage=4), "ZeRO has the stages 0, 1, 2 and 3, as whole numbers; 4 is none of them"),
        (dict(stage=2, offload="disk"), "offload='disk' is no choice"),
        (dict(stage=2, precision="fp8"), "precision='fp8' is no choice"),
        (dict(stage=0, offload="optimizer"), "offload_optimizer needs stage 1 or above, and this is stage 0"),
        (dict(stage=2, offload="all"), "offload_param needs stage 3 or above, and this is stage 2"),
        (dict(stage=3, offload="nvme"), "needs an nvme_path"),
        (dict(stage=2, offload="nvme", nvme_path="/swap"), "needs stage 3, and this is stage 2"),
        (dict(stage=2, global_batch=7), "global_batch=7 does not divide into 2 ranks"),
        (dict(stage=2, bucket_elements=0), "bucket_elements=0: give a whole number of at least 1"),
        (dict(stage=3, prefetch_elements=-1), "prefetch_elements=-1: give a whole number of at least 0"),
        (dict(stage=1, max_grad_norm=-1.0), "max_grad_norm=-1.0: give the longest"),
    ],
)
def test_arguments_that_cannot_be(arguments, words):
    with pytest.raises(ValueError) as refused:
        zero_config(**{"ranks": 2, **arguments})
    assert words in str(refused.value)


BAD = {
    "batch sizes": (
        changed(train_batch_size=17),
        "disagree: train_batch_size 17 is not 2 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps) x 4 "
        "ranks = 16",
    ),
    "a batch that does not divide": (changed(train_micro_batch_size_per_gpu=None, train_batch_size=15), "disagree"),
    "no batch size": (changed(train_batch_size=None, train_micro_batch_size_per_gpu=None), "needs one of them"),
    "batch auto": (changed(train_batch_size="auto"), "train_batch_size is 'auto': give a whole number"),
    "batch 0": (changed(train_micro_batch_size_per_gpu=0), "train_micro_batch_size_per_gpu is 0"),
    "stage 4": (changed(zero={"stage": 4}), "stages 0, 1, 2 and 3, as whole numbers; 4 is none of them"),
    "stage as text": (changed(zero={"stage": "2"}), "'2' is none of them"),
    "stage true": (changed(zero={"stage": True}), "True is none of them"),
    "the old form": (changed(zero_optimization=True), 'names a stage, {"stage": 2}'),
    "no object": (changed(zero_optimization=[3]), '"zero_optimization" is [3]: give an object'),
    "precision no object": (changed(bf16=True), '"bf16" is True: give an object'),
    "both precisions": (changed(fp16={"enabled": True}), "fp16 and bf16 are both enabled"),
    "unknown key": (changed(gradient_cliping=1.0), "no key 'gradient_cliping': did you mean 'gradient_clipping'?"),
    "unknown key inside": (
        changed(zero={"reduce_bucket": 5}),
        "no key 'reduce_bucket' in 'zero_optimization': did you mean 'reduce_bucket_size'?",
    ),
    "key in the wrong place": (changed(stage=2), "no key 'stage': it belongs into 'zero_optimization'"),
    "key too deep": (changed(zero={"gradient_clipping": 1}), "it belongs to the top of the configuration"),
    "nothing near": (changed(xyzzy=1), "no key 'xyzzy': leave it out"),
    "unknown device": (changed(zero={"offload_param": {"device": "ssd"}}), "offload_param: there is no device 'ssd'"),
    "offload at stage 0": (changed(zero={"stage": 0}), "offload_optimizer needs stage 1 or above, and this is stage 0"),
    "weights at stage 2": (
        changed(zero={"stage": 2, "offload_param": {"device": "cpu"}}),
        "offload_param needs stage 3 or above, and this is stage 2, which does not shard the weights",
    ),
    "nvme without a path": (changed(zero={"offload_optimizer": {"device": "nvme"}}), "needs an nvme_path"),
    "nvme below 3": (
        changed(zero={"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}),
        "needs stage 3, and this is stage 1",
    ),
    "a list": ([GOOD], "is an object, {...}; this is a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_mistake_gets_its_sentence(name):
    config, words = BAD[name]
    with pytest.raises(ValueError) as refused:
        check_config(config, ranks=4)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_batch_sizes_follow_from_each_other_as_in_deepspeed():
    assert batch_sizes({"train_batch_size": 12}, ranks=3) == (12, 4, 1)
    assert batch_sizes({"train_micro_batch_size_per_gpu": 4}, ranks=3) == (12, 4, 1)
    assert batch_sizes({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, ranks=3) == (24, 4, 2)
    assert batch_sizes({"train_batch_size": 24, "gradient_accumulation_steps": 4}, ranks=3) == (24, 2, 4)
    with pytest.raises(ValueError, match="disagree: train_batch_size 2 is not 0"):
        batch_sizes({"train_batch_size": 2}, ranks=3)


def test_offloading_asks_for_memory():
    optimizer = {"train_batch_size": 4, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    weights = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert host_bytes(optimizer, parameters=1000, ranks=4) == 250 * (4 + 8 + 4 + 4)
    assert host_bytes(weights | {"bf16": {"enabled": True}}, parameters=1001, ranks=4) == 251 * 2
    check_config(optimizer, ranks=4, parameters=2**30, free=20 * 2**30)
    with pytest.raises(ValueError, match=r"takes 20.0 GiB of host memory for 4 ranks and 19.0 GiB are free"):
        check_config(optimizer, ranks=4, parameters=2**30, free=19 * 2**30)
    with pytest.raises(ValueError, match="of host memory"):  # asks the system
        check_config(optimizer, ranks=4, parameters=10**15)
    check_config({"train_batch_size": 4, "zero_optimization": {"stage": 3}}, ranks=4, parameters=10**15)


def test_nothing_is_compiled_for_cpu_ranks():
    config = {"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    before = copy.deepcopy(config)
    plain = without_compiling(config)
    assert config == before
    assert plain["optimizer"]["params"]["torch_adam"] and plain["zero_force_ds_cpu_optimizer"] is False
    assert plain["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    with pytest.raises(ValueError, match="optimizer 'OneBitAdam' needs parts that DeepSpeed compiles"):
        without_compiling({"optimizer": {"type": "OneBitAdam"}})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1,\n "b": }', "is not JSON: line 2, column 7: Expecting value."),
        ("[1, 2]", "holds a list; a DeepSpeed configuration is an object"),
        ('"stage 2"', "holds a string"),
        ("", "is not JSON: line 1, column 1"),
        ('{"steps_per_print": 1, "steps_per_print": 2}', "'steps_per_print' stands in the configuration twice"),
    ],
)
def test_files_that_are_none(content, words, tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(content)
    with pytest.raises(ValueError) as refused:
        read_config(path)
    assert words in str(refused.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="zero.json cannot be read: No such file"):
        read_config(tmp_path / "zero.json")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_config(tmp_path)
    (tmp_path / "zero.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is no text file"):
        read_config(tmp_path / "zero.json")


def test_a_file_is_read(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps(GOOD))
    assert read_config(str(tmp_path / "zero.json")) == GOOD


def test_every_key_that_is_written_is_known():
    for stage in range(4):
        check_keys(zero_config(stage, ranks=1, offload="all" if stage == 3 else "none"))
    assert "bf16" in KNOWN[""] and "stage" in KNOWN["zero_optimization"]
