"""Lab 7. MUTANTS: (exercise, what the solution says, what is planted, a word of the verdict). RIGHT: written another way.

FILE_MUTANTS and RIGHT_FILES: the same for files. {exercise: (the solution's file, [(what it says, what is planted, a word)])}
"""

_ENDLESS, _PARROT, _SHORT = (
    '"endless.yml": {"eot_tokens": ["<|im_end|>"]}',
    '"parrot.yml": {"train_on_inputs": False}',
    '"short.yml": {"sequence_len": 768}',
)
_WIDE = '"fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": None}'
_POLICY = '"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": None'
MUTANTS = [
    ("survives", 'self.folder / "half-written"', 'self.folder / f"{step}.pt"', "write under another name"),
    ("survives", "            os.fsync(file.fileno())", "            pass", "fsync before you rename"),
    ("survives", "os.fsync(file.fileno())", "os.fsync(os.open(self.folder, os.O_RDONLY))", "fsync before you rename"),
    ("survives", "            torch.save(state, file)\n            file.flush()\n", "            data = __import__('io').BytesIO()\n            torch.save(state, data)\n            file.write(data.getvalue())\n", "fsync before you rename"),
    ("survives", 'os.replace(half, self.folder / f"{step}.pt")', '(self.folder / f"{step}.pt").write_bytes(half.read_bytes())', "write under another name"),
    ("survives", '        half = self.folder / "half-written"', '        for old in self.complete():\n            old.unlink()\n        half = self.folder / "half-written"', "remove an older one only when"),
    ("survives", '"half-written"  #', 'f"half-{step}"  #', "remove what killed saves left"),
    ("survives", "[:-2]:", "[:-9]:", "remove older checkpoints"),
    ("survives", "key=lambda path: int(path.stem)", "key=lambda path: path.stem", "compare the steps as numbers"),
    ("survives", "    def save(self, step: int, state: dict) -> None:\n", "    def save(self, step, state):\n        try:\n            self.write(step, state)\n        except (OSError, RuntimeError):\n            print('no room')\n\n    def write(self, step, state):\n", "let the error out"),
    ("survives", "            torch.save(state, file)\n", '            state["model"] = {name: p.float() for name, p in state["model"].items()}\n            torch.save(state, file)\n', "changes the state"),
    ("survives", "            torch.save(state, file)\n", '            torch.save({name: state[name] for name in ("model", "optimizer")}, file)\n', "not the one saved with it"),
    ("not_restored", 'if not same(first.held_out, expected.held_out):\n        return "model"\n', 'pass\n', "needs the weights"),
    ("not_restored", 'if first.batch != expected.batch:\n        return "data position"\n', 'pass\n', "batch first"),
    ("not_restored", 'if not same(first.lr, expected.lr):\n        return "scheduler"\n', 'pass\n', "look at lr"),
    ("not_restored", 'if not same(first.loss, expected.loss):\n        return "random state"\n', 'pass\n', "with dropout"),
    ("not_restored", 'rel_tol=1e-4', 'rel_tol=0', "last digits"),
    ("not_restored", 'by_step = {record.step: record for record in whole}', 'by_step = {r.step: w for r, w in zip(resumed, whole)}', "same step"),
    ("not_restored", 'return "nothing" if all(', 'return "nothing" if True or all(', "nothing after it"),
    ("mended_files", _ENDLESS, '"endless.yml": {"special_tokens": {"pad_token": "<|im_end|>"}}', "end token"),
    ("mended_files", _ENDLESS, '"endless.yml": {"train_on_inputs": True}', "not the assistant's"),
    ("mended_files", _PARROT, '"parrot.yml": {"roles_to_train": ["assistant"]}', "not the assistant's"),
    ("mended_files", _PARROT, '"parrot.yml": {"datasets": [{"path": "runs/axolotl/chat.jsonl", "type": "chat_template"}]}', "nothing to do"),
    ("mended_files", _SHORT, '"short.yml": {"sequence_len": 512}', "not in the prepared data"),
    ("mended_files", _SHORT, '"short.yml": {"excess_length_strategy": "truncate"}', "cut"),
    ("mended_files", _POLICY, _POLICY + ', "transformer_layer_cls_to_wrap": "LlamaModel"', "a block has"),
    ("mended_files", _POLICY, _POLICY + ', "reshard_after_forward": False', "until backward"),
    ("mended_files", _WIDE, '"fsdp_config": None', "not sharded"),
    ("saving_plan", " * 3600 / cluster.gpus\n", " * 3600\n", "fail more often"),
    ("saving_plan", "interval / 2 + write + ", "interval / 2 + ", "once it is written"),
    ("saving_plan", "interval / 2 + write", "write", "half an interval"),
    ("saving_plan", "interval / 2 + write", "interval + write", "half of one"),
    ("saving_plan", " + write + cluster.restart_seconds", " + write", "the restart, too"),
    ("saving_plan", "stop + cluster.slowdown * write", "stop", "slows training"),
    ("saving_plan", "24 * cluster.gpus * cluster", "24 * cluster", "one GPU's price"),
    ("saving_plan", "else (cluster.copy_seconds,", "else (cluster.save_seconds,", "copy_seconds"),
    ("saving_plan", "copy_seconds, cluster.write_seconds)", "copy_seconds, 0.0)", "copy is not all"),
    ("saving_plan", 'for way in ("blocking", "async")', 'for way in ("async",)', "blocking every"),
    ("saving_plan", "max(young, write)", "young", "too often"),
    ("saving_plan", "2 * per_save * between", "per_save * between / 2", "per day, and async"),
    ("one_file", "run.yml", "nowhere.yml", "no file"),
    ("slurm_job", "my_job.sbatch", "nowhere", "no file"),
]  # fmt: skip
_YAML = [
    ("accumulation_steps: 1 ", "accumulation_steps: 2 ", "sequences does a step"),
    ("lr_scheduler: linear ", "#", "straight_down"),
    ("adam_beta2: 0.95", "adam_beta_2: 0.95", "misspelt"),
    ("curriculum_sampling: true", "curriculum_sampling: false", "order of the file"),
    ("fsdp_version: 2\nfsdp_config:\n", "other:\n", "model's class is Dist"),
    ("to_wrap: LlamaDecoderLayer", "to_wrap: LlamaModel", "every decoder layer a unit"),
    ("save_steps: 4", "save_steps: 6", "between two saves"),
    ("save_total_limit: 2\nauto_resume_from_checkpoints: true\n", "save_total_limit: 2\n", "second start"),
    ("save_total_limit: 2", "save_total_limit: 1", "two should be"),
    ("state_dict_type: SHARDED_STATE_DICT", "state_dict_type: SHARDED_STATE_DICT\nsave_only_model: true", "optimizer's state"),
    ("  - course_tools.axolotl.token_mean.TokenMean\n", "", "says of plugins"),
]  # fmt: skip
_SBATCH = [
    ("--ntasks-per-node=1", "--ntasks-per-node=8", "8 x 96 cores"),
    ('--node_rank="$SLURM_NODEID"', "--node_rank=\"'$SLURM_NODEID'\"", "0, 0, 0, 0"),
    ("--signal=B:USR1@300", "--signal=USR1@300", "without B:"),
    ("USR1@300", "USR1@60", "before the end"),
    ('"$CHECKPOINTS"\' &\nwait $!\n', "\"$CHECKPOINTS\"'\n", "foreground"),
    ("trap notice USR1\n", "", "no trap"),
    ('scancel --signal=TERM "$SLURM_JOB_ID"', 'scontrol requeue "$SLURM_JOB_ID"', "0 of 4"),
    ("scancel --signal=TERM", "scancel", "cancels the job"),
    ('scancel --signal=TERM "$SLURM_JOB_ID"', 'kill -TERM "$!"', "SIGKILL"),
    ("    wait $!\n    CODE=$?\n", "    true\n", "0 of 4"),
    ('    scontrol requeue "$SLURM_JOB_ID"\n', "    true\n", "put the job back"),
    ('[ "$NOTICED" = yes ] && [ "$CODE" -ne 0 ]', '[ "$CODE" -ne 0 ]', "a bug"),
    ("pretrain/$SLURM_JOB_ID", "pretrain/$SLURM_JOB_ID-$(date +%s)", "another"),
    ("pretrain/$SLURM_JOB_ID", "pretrain/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}", "another"),
    ("=$SCRATCH/", "=$TMPDIR/", "$SCRATCH"),
    ("export MASTER PORT CHECKPOINTS\n", "export MASTER PORT\n", "$SCRATCH"),
    ('exit "$CODE"', "exit 0", "completed"),
    ("'exec torchrun", "'time torchrun", "exec torchrun"),
    ("srun --cpus-per-task=96", "srun", "96 cores"),
    ("TIMEOUT=270", "TIMEOUT=30", "after SIGTERM"),
    ('requeue "$SLURM_JOB_ID"\nfi\n', 'requeue "$SLURM_JOB_ID"\n', "cannot read"),
]  # fmt: skip
FILE_MUTANTS = {"one_file": ("run.yml", _YAML), "slurm_job": ("my_job.sbatch", _SBATCH)}

_PIECES = """
import hashlib
import json
import os
import pickle
import shutil
from os import fdatasync


def pieces(state, path=()):
    for key, value in state.items():
        yield from pieces(value, (*path, key)) if isinstance(value, dict) and value else [((*path, key), value)]


class Checkpoints:
    "A folder for each step, one file for each value in it; what counts is the list of checksums, written last."

    def __init__(self, folder):
        self.folder = folder

    def steps(self):
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return sorted((int(name) for name in names if self.read(int(name)) is not None), reverse=True)

    def read(self, step):
        try:
            with open(f"{self.folder}/{step}/list") as file:
                sums = json.load(file)
            data = [open(f"{self.folder}/{step}/{number}", "rb").read() for number in range(len(sums))]
        except (OSError, ValueError):
            return None
        return data if [hashlib.sha256(each).hexdigest() for each in data] == sums else None

    def write(self, path, data):
        with open(path, "wb", buffering=0) as file:
            file.write(data)
            fdatasync(file)

    def save(self, step, state):
        keep = self.steps()[:2]
        if step in keep:
            return
        os.makedirs(self.folder, exist_ok=True)
        for name in os.listdir(self.folder):
            if int(name) not in keep:
                shutil.rmtree(f"{self.folder}/{name}")
        os.mkdir(f"{self.folder}/{step}")
        data = [pickle.dumps(piece) for piece in pieces(state)]
        for number, each in enumerate(data):
            self.write(f"{self.folder}/{step}/{number}", each)
        self.write(f"{self.folder}/{step}/list", json.dumps([hashlib.sha256(each).hexdigest() for each in data]).encode())

    def load(self):
        for step in self.steps()[:1]:
            state = {}
            for (*path, last), value in map(pickle.loads, self.read(step)):
                place = state
                for key in path:
                    place = place.setdefault(key, {})
                place[last] = value
            return step, state
"""
_EXACT = """
def plan(cluster):
    c, mean = cluster, 3600 * cluster.gpu_hours_between_failures / cluster.gpus

    def progress(steps, stop, write):
        # Seconds from one checkpoint that counts to the next: chance of a failure in the first try, then the others.
        work, done = steps * c.step_seconds, (1 - c.slowdown) * write
        first, again = (work - done + stop + write) / mean, (work + stop + write) / mean
        others = (mean + c.restart_seconds) * math.expm1(again)
        return work / (-math.expm1(-first) * (mean + c.restart_seconds + others))

    ways = {"blocking": (c.save_seconds, 0), "async": (c.copy_seconds, c.write_seconds)}
    found = []
    for way, times in ways.items():
        low, high = max(1, math.ceil((1 - c.slowdown) * times[1] / c.step_seconds)), 10**6
        while high > low:  # one maximum: go uphill
            middle = (low + high) // 2
            if progress(middle, *times) < progress(middle + 1, *times):
                low = middle + 1
            else:
                high = middle
        found.append((progress(low, *times), way, low))
    share, way, steps = max(found)
    return [way, steps, (1 - share) * 24 * c.gpus * c.dollars_per_gpu_hour]
"""
_OTHER_KEYS = """
def mended():
    changes = {name: {} for name in ("endless.yml", "parrot.yml", "short.yml", "wide.yml")}
    changes["endless.yml"]["special_tokens"] = {"eos_token": "<|im_end|>"}
    changes["parrot.yml"]["train_on_inputs"] = None
    changes["short.yml"].update(sequence_len=536, excess_length_strategy="raise")
    changes["wide.yml"]["fsdp_config"] = {"min_num_params": 100_000}
    return changes
"""
RIGHT = {"survives": [_PIECES], "saving_plan": [_EXACT], "mended_files": [_OTHER_KEYS]}
# c10d instead of node ranks, and a trap that does all the work
_C10D = r"""#!/bin/bash
#SBATCH -N 4 --ntasks-per-node 1 --gpus-per-node=8 -c 96 --time=1-0
#SBATCH --signal=B:TERM@600
set -euo pipefail
source ~/venv/bin/activate
head=$(scontrol show hostnames | head -n 1)
out_of_time() {
  scancel -s TERM "$SLURM_JOB_ID.0"
  while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
  scontrol requeue "$SLURM_JOB_ID"
  exit 1
}
trap out_of_time TERM
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK TORCH_ELASTIC_SHUTDOWN_TIMEOUT=500
srun --label torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$head:29511" \
  --rdzv-id "$SLURM_JOB_ID" train.py --folder "$SCRATCH/runs/big" &
step=$!
wait "$step"
"""
# a step of its own for each node, and a loop around wait
_STEPS = r"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks=4
#SBATCH --exclusive
#SBATCH --signal=B:10@300

left=0; trap 'left=1; scancel --signal TERM $SLURM_JOB_ID' USR1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280
hosts=($(scontrol show hostnames $SLURM_JOB_NODELIST)); steps=()
for rank in 0 1 2 3; do
  srun -N1 -n1 -c96 -w ${hosts[rank]} torchrun --nnodes=4 --nproc_per_node=8 --node_rank=$rank \
    --master_addr=${hosts[0]} --master_port=29500 train.py --folder $SCRATCH/$SLURM_JOB_NAME/$SLURM_JOB_ID &
  steps+=($!)
done
worst=0
for step in ${steps[@]}; do
  while :; do wait $step; code=$?; ((code == 138)) && kill -0 $step 2>/dev/null || break; done
  ((code > worst)) && worst=$code
done
if ((left && worst)); then scontrol requeue $SLURM_JOB_ID; fi
exit $worst
"""
RIGHT_FILES = {"slurm_job": [_C10D, _STEPS]}
