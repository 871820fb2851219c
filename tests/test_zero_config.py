"""DeepSpeed configurations: what is written for each stage, and that each way to get one wrong is named."""

from __future__ import annotations

import copy
import json

from refusals import assert_refused

from course_lib.training.sharded.zero_config import (
    batch_sizes,
    check_config,
    host_bytes,
    read_config,
    without_compiling,
    zero_config,
)
from course_lib.training.sharded.zero_keys import check_keys

GOOD = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
}


def test_what_is_written_for_a_stage():
    for stage in range(4):
        config = zero_config(stage, ranks=2, global_batch=24, gradient_accumulation_steps=3, lr=0.5, max_grad_norm=2.0)
        check_config(json.loads(json.dumps(config)), ranks=2)  # plain JSON
        check_keys(config)
        assert batch_sizes(config, ranks=2) == (24, 4, 3), stage
        assert config["gradient_clipping"] == 2.0 and config["zero_optimization"]["stage"] == stage
        assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.01, "torch_adam": True}}
        assert ("reduce_bucket_size" in config["zero_optimization"]) == (stage > 0), stage
        assert ("stage3_param_persistence_threshold" in config["zero_optimization"]) == (stage == 3), stage
    assert zero_config(2, ranks=1)["gradient_clipping"] == 0.0  # said aloud: DeepSpeed's default is to clip


def test_offload_and_precision_and_buckets_arrive():
    config = zero_config(3, ranks=1, offload="all", precision="bf16", bucket_elements=7, prefetch_elements=5)
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (7, 5)
    assert config["bf16"] == {"enabled": True} and config["zero_force_ds_cpu_optimizer"] is False
    compiled = zero_config(1, ranks=1, offload="optimizer", compiled=True)
    assert compiled["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}  # page-locked, as DeepSpeed has it
    assert "torch_adam" not in compiled["optimizer"]["params"]
    disk = zero_config(3, ranks=1, offload="nvme", nvme_path="/swap")["zero_optimization"]["offload_param"]
    assert (disk["device"], disk["nvme_path"]) == ("nvme", "/swap")


def changed(zero=None, **changes):
    """GOOD with other values; `zero` goes into its zero_optimization."""
    config = copy.deepcopy(GOOD)
    config["zero_optimization"] |= zero or {}
    return config | changes


def test_a_good_configuration_passes_and_each_mistake_is_named():
    config = copy.deepcopy(GOOD)
    check_config(config, ranks=4)
    assert config == GOOD
    nvme = {"device": "nvme", "nvme_path": "/x"}
    mistakes = [
        ("17", changed(train_batch_size=17)),
        ("needs one", changed(train_batch_size=None, train_micro_batch_size_per_gpu=None)),
        ("train_batch_size is 'auto'", changed(train_batch_size="auto")),
        ("train_micro_batch_size_per_gpu is 0", changed(train_micro_batch_size_per_gpu=0)),
        ("4", changed({"stage": 4})),
        ("True", changed({"stage": True})),
        ("zero_optimization", changed(zero_optimization=True)),
        ('"bf16" is True', changed(bf16=True)),
        ("fp16 and bf16", changed(fp16={"enabled": True})),
        ("'gradient_clipping'", changed(gradient_cliping=1.0)),
        ("into 'zero_optimization'", changed(stage=2)),
        ("'gradient_clipping'", changed({"gradient_clipping": 1})),
        ("'xyzzy'", changed(xyzzy=1)),
        ("'ssd'", changed({"offload_param": {"device": "ssd"}})),
        ("offload_param needs", changed({"stage": 2, "offload_param": {"device": "cpu"}})),
        ("nvme_path", changed({"offload_optimizer": {"device": "nvme"}})),
        ("stage 3", changed({"stage": 1, "offload_optimizer": nvme})),
        ("list", [GOOD]),
    ]
    rows = [(lambda config=config: check_config(config, ranks=4), ValueError, word) for word, config in mistakes]
    arguments = {
        "offload='disk'": dict(offload="disk"),
        "precision='fp8'": dict(precision="fp8"),
        "global_batch=7": dict(global_batch=7),
        "bucket_elements=0": dict(bucket_elements=0),
        "prefetch_elements=-1": dict(prefetch_elements=-1),
        "max_grad_norm=-1.0": dict(max_grad_norm=-1.0),
    }
    rows += [(lambda how=how: zero_config(2, ranks=2, **how), ValueError, word) for word, how in arguments.items()]
    assert_refused(rows)


def test_batch_sizes_follow_from_each_other_as_in_deepspeed():
    assert batch_sizes({"train_batch_size": 12}, ranks=3) == (12, 4, 1)
    assert batch_sizes({"train_micro_batch_size_per_gpu": 4}, ranks=3) == (12, 4, 1)
    assert batch_sizes({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, ranks=3) == (24, 4, 2)
    assert batch_sizes({"train_batch_size": 24, "gradient_accumulation_steps": 4}, ranks=3) == (24, 2, 4)


def test_offloading_asks_for_memory():
    optimizer = {"train_batch_size": 4, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    weights = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert host_bytes(optimizer, parameters=1000, ranks=4) == 250 * (4 + 8 + 4 + 4)
    assert host_bytes(weights | {"bf16": {"enabled": True}}, parameters=1001, ranks=4) == 251 * 2
    check_config(optimizer, ranks=4, parameters=2**30, free=20 * 2**30)
    check_config({"train_batch_size": 4, "zero_optimization": {"stage": 3}}, ranks=4, parameters=10**15)
    too_little = dict(ranks=4, parameters=2**30, free=19 * 2**30)
    assert_refused([(lambda: check_config(optimizer, **too_little), ValueError, "20.0 GiB")])


def test_nothing_is_compiled_for_cpu_ranks():
    config = {"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    before = copy.deepcopy(config)
    plain = without_compiling(config)
    assert config == before
    assert plain["optimizer"]["params"]["torch_adam"] and plain["zero_force_ds_cpu_optimizer"] is False
    assert plain["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert_refused([(lambda: without_compiling({"optimizer": {"type": "OneBitAdam"}}), ValueError, "OneBitAdam")])


def test_a_file_is_read_and_what_is_none_is_refused(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(GOOD))
    assert read_config(str(path)) == GOOD
    contents = {b'{"a": 1,\n "b": }': "line 2", b"[1, 2]": "list", b'{"a": 1, "a": 2}': "'a'", b"\xff\xfe\x00": "text"}
    for content, word in contents.items():
        path.write_bytes(content)
        assert_refused([(lambda: read_config(path), ValueError, word)])
    path.unlink()
    assert_refused(
        [(lambda: read_config(path), ValueError, path.name), (lambda: read_config(tmp_path), ValueError, "read")]
    )
