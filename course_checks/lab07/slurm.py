"""Lab 7, exercise 6: a Slurm script to mend. Bash runs it; Slurm's commands and torchrun are stand-ins that log what happens."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from course_checks.harness import Contract, fresh_seed, scripts
from course_checks.lab07.common import FOLDER, lab

BROKEN = FOLDER / "broken_job.sbatch"
start, holds = partial(scripts.start, BROKEN), Contract().holds
OPTIONS = "rdzv.id rdzv.endpoint master.addr master.port node.rank rdzv.backend nnodes nproc.per.node folder"
LIMIT = 20.0  # seconds for what takes some tenths: every wait ends, and no verdict is about speed
JOB = """mkdir -p bin home/venv/bin scratch disk; touch home/venv/bin/activate train.py; chmod +x stand_in
for name in srun scontrol scancel torchrun date hostname sleep; do ln -sf ../stand_in "bin/$name"; done
export HOME=$PWD/home SCRATCH=$PWD/scratch TMPDIR=$PWD/disk PATH=$PWD/bin:$PATH SIM=$PWD SLURM_SUBMIT_DIR=$PWD USER=you
export SLURM_JOB_ID=$1 SLURM_JOB_NODELIST="gpu[$2-$(($2 + 3))]" SIM_NODES="$(seq -f gpu%.0f -s ' ' $2 $(($2 + 3)))"
export SLURM_JOB_NUM_NODES=4 SLURM_NNODES=4 SLURM_GPUS_ON_NODE=8 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
export SLURMD_NODENAME=gpu$2
export SIM_EACH=$3 SIM_CODE=$4 SIM_SECONDS=$5 ${6:+SLURM_RESTART_COUNT=$6} ${7:+SLURM_CPUS_PER_TASK=$7}
exec bash job.sbatch </dev/null >said 2>&1"""
# As Slurm does: a signal reaches all processes of a task, what a task's first process leaves behind is ended, and srun
# answers SIGTERM by SIGKILL to its tasks. As torchrun does: USR1 ends it, and after SIGTERM it returns 1.
STAND_IN = r"""#!/bin/bash
log() { local line; printf -v line '%q ' "$@"; echo "$line" >>"$SIM/log"; }
tell() { for task in $(sed -n 's/^task //p' "$SIM/log"); do kill -s "$1" -- "-$task" 2>&-; done; }
nodes=($SIM_NODES) each=$SIM_EACH worst=0
case ${0##*/} in
torchrun) trap 'log asked; command -p sleep 0.3; kill -0 $PPID && log saved; exit 1' TERM
  log start "$SLURMD_NODENAME" "${SIM_CORES:-1}" "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-30}" "$@"
  command -p sleep "$SIM_SECONDS" & wait $!; exit "$SIM_CODE" ;;
srun) export SIM_CORES=$SRUN_CPUS_PER_TASK; trap 'log forced; tell KILL' TERM
  while [[ $1 =~ ^(-[a-zA-Z]|--[a-z-]+)=?(.*)$ ]]; do
    option=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}; shift
    [[ -n $value || $option =~ ^(-[KluO]|--(kill-on-bad-exit|label|unbuffered|overlap|exact|exclusive))$ ]] || { value=$1; shift; }
    case $option in -N | --nodes) nodes=("${nodes[@]:0:value}") ;; -w | --nodelist) nodes=(${value//,/ }) ;;
    -n | --ntasks) count=$value ;; --ntasks-per-node) each=$value ;; -c | --cpus-per-task) SIM_CORES=$value ;; esac
  done
  set -m; count=${count:-$((each * ${#nodes[@]}))} most=$((count > ${#nodes[@]} ? count : ${#nodes[@]}))
  for ((i = 0; i < count; i++)); do
    export SLURM_PROCID=$i SLURM_NODEID=$((i * ${#nodes[@]} / most))
    SLURMD_NODENAME=${nodes[SLURM_NODEID]} "$@" & tasks+=($!); log task $!
  done
  for task in "${tasks[@]}"; do
    until wait "$task"; code=$?; ((code <= 128)) || ! kill -0 "$task" 2>&-; do :; done
    ((code == 143)) && log cut; ((code > worst)) && worst=$code
  done; exit $worst ;;
scancel) [[ " $* " =~ \ (-b|-f|--batch|--full|[0-9]+\.batch)\  ]] && { log batch; exit; }
  [[ " $* " =~ \ (--signal[=\ ]|-s\ ?)([A-Za-z0-9]+) ]] && name=${BASH_REMATCH[2]}
  [[ " $* " == *" $SLURM_JOB_ID"[.\ ]* ]] && { log scancel "$name"; tell "${name:-KILL}"; } ;;
scontrol) if [[ $1 == show ]]; then command -p cat <<<"$(printf '%s\n' "${nodes[@]}")"; else log "$@"; command -p sleep 60; fi ;;
hostname) echo "$SLURMD_NODENAME" ;;
sleep) command -p sleep "0.00${1%%.*}" ;;
date) command -p date -d "${SLURM_RESTART_COUNT:-0} days" "$@" 2>&- || command -p date "$@" ;;
esac"""
Run = tuple[int | None, list[list[str]], Path]  # exit code (None: it was ended), events in their order, folder


def _option(line: str, long: str, short: str = "(?!)") -> str:
    found = re.findall(rf"(?<!\S)(?:{long}(?:=|\s+)|{short}\s*(?=\w))(\S+)", line)
    return found[-1].strip("\"'") if found else ""  # the last one counts


def _whole(text: str, what: str) -> int:
    holds(text.isdigit(), f"{what} is {text!r}, and no whole number")
    return int(text)


def _tasks(header: str) -> tuple[int, int]:
    """Tasks per node, and cores of each."""
    each = _option(header, "--ntasks-per-node")
    tasks = _whole(_option(header, "--ntasks", "-n") or str(4 * _whole(each or "1", "--ntasks-per-node")), "--ntasks")
    return tasks // 4, _whole(_option(header, "--cpus-per-task", "-c") or "1", "--cpus-per-task")


def _run(home: Path, header: str, job: int, restarts: object = "", code: int = 0, notice: tuple | None = None) -> Run:
    first, each, cores = fresh_seed() % 800 + 100, *_tasks(header)
    facts = (job, first, each, code, 60 if notice else 0, restarts, cores)
    (home / "log").write_text("")
    words, env = ["bash", "-c", JOB, "job", *map(str, facts)], {"PATH": os.environ["PATH"]}
    bash = subprocess.Popen(words, cwd=home, env=env, start_new_session=True)

    def seen(kind: str, least: int = 0) -> list[list[str]]:
        until = time.monotonic() + LIMIT
        while True:
            lines = map(shlex.split, (home / "log").read_text().rpartition("\n")[0].splitlines())
            events = [line for line in lines if kind in ("", line[0])]
            if len(events) >= least or bash.poll() is not None or time.monotonic() > until:
                return events
            time.sleep(0.02)

    try:
        if notice and seen("start", 4):
            time.sleep(0.2)  # until the script is at its `wait`: a real notice comes hours later
            for pid in [bash.pid] if notice[0] else [-int(task) for _, task in seen("task")]:
                with suppress(OSError):
                    os.kill(pid, notice[1])
        seen("requeue", 1)
        return bash.poll(), seen(""), home
    finally:
        for _ in range(2):  # the script's session: once more for what had just been started
            listed = os.listdir("/proc") if os.path.isdir("/proc") else os.popen("ps -A -o pid=").read().split()
            for pid in map(int, filter(str.isdigit, listed)):
                with suppress(OSError):
                    _ = (os.getsid(pid) == bash.pid or _mine(pid, home)) and os.kill(pid, signal.SIGKILL)
        bash.wait()


def _mine(pid: int, home: Path) -> bool:
    """Whether a process that left the session has this simulation's environment."""
    environ = Path(f"/proc/{pid}/environ")
    return environ.exists() and f"SIM={home}\0".encode() in environ.read_bytes()


def _trained(run: Run) -> tuple[str, str]:
    """Where the torchruns of a run meet, and their folder, if together they train the job."""
    code, events, home = run
    starts = [event[1:] for event in events if event[0] == "start"]
    holds(bool(starts), f"no torchrun starts, exit code {code}. {(home / 'said').read_text().strip()[-200:]}")
    nodes, cores, patience = zip(*(start[:3] for start in starts), strict=True)
    told = [[_option(" ".join(words), f"--{name}") for _, _, _, *words in starts] for name in OPTIONS.split()]
    names, ends, hosts, ports, ranks, backends, sizes, each, folders = told
    meet = [end or f"{host}:{port}" for end, host, port in zip(ends, hosts, ports, strict=True)]
    first, folder, c10d = meet[0].partition(":")[0], folders[0].replace(str(home), ""), {*backends} == {"c10d"}
    holds(len({*nodes}) == 4, f"torchrun starts on {len({*nodes})} of the job's 4 nodes: srun starts a task on each")
    holds(len(nodes) == 4, f"{len(nodes)} torchruns on 4 nodes, and each starts 8 ranks: one task per node will do")
    holds({*sizes} == {"4"} and {*each} == {"8"}, "each torchrun should get --nnodes=4 and --nproc_per_node=8")
    holds(len({*meet}) == 1 and first in nodes, f"torchrun should meet at one of the job's nodes, not at {meet[0]}")
    holds(len({*names}) == 1, f"each torchrun has an --rdzv_id of its own, {names[0]}: they never meet")
    holds(c10d or all(ranks), "torchrun has neither --node_rank nor --rdzv_backend=c10d")
    known = c10d or {*ranks} == {*"0123"}
    holds(known, f"the node ranks are {', '.join(ranks)}, not 0 to 3: which process expands $SLURM_NODEID?")
    holds(c10d or nodes[ranks.index("0")] == first, "--master_addr should be the node whose --node_rank is 0")
    holds({*cores} == {"96"}, f"torchrun gets {cores[0]} of its node's 96 cores: --cpus-per-task is for srun, too")
    holds(
        min(_whole(each, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT") for each in patience) >= 240,
        f"ranks get {patience[0]} s after SIGTERM, and a save may take 240",
    )
    holds(all("train.py" in start for start in starts), "torchrun should start train.py")
    shared = len({*folders}) == 1 and folder.startswith("/scratch/")
    holds(shared, f"train.py gets --folder={folder}: it should be one folder below $SCRATCH, for all nodes")
    return meet[0], folder


@lab.exercise("Stretch: a Slurm script to mend", importance=4, difficulty=4, minutes=20)
def slurm_job(path: Callable[[], object]) -> str:
    """By what it does in a simulated Slurm: undisturbed, with a bug in the training, and twice at its time limit."""
    script, job = scripts.script_of(path()), fresh_seed() % 90_000 + 10_000
    syntax = subprocess.run(["bash", "-n", script.name], cwd=script.parent, capture_output=True, text=True)
    holds(not syntax.returncode, f"bash cannot read it: {syntax.stderr.strip()}")
    leading = re.match(r"(?:[ \t]*(?:#.*)?\n)*", script.read_text(errors="replace"))[0]
    header = "\n".join(re.findall(r"^#SBATCH(.*?)(?: #.*)?$", leading, re.M))
    asked = re.fullmatch(r"(R?B:R?)?R?(?:SIG)?(USR1|USR2|TERM|INT|HUP|\d+)(?:@(\d+))?", _option(header, "--signal"))
    nodes, (each, cores) = _option(header, "--nodes", "-N"), _tasks(header)
    holds(asked and nodes in ("4", "4-4"), "#SBATCH lines should ask for 4 nodes and a --signal")
    holds("--no-requeue" not in header, "#SBATCH --no-requeue: Slurm refuses to queue the job again")
    told = f"the job asks for {each} x {cores} cores of a node, which has 96"
    holds(each * cores == 96 or "--exclusive" in header, told)
    batch, number = asked[1], int(asked[2]) if asked[2].isdigit() else signal.Signals["SIG" + asked[2]]
    holds(int(asked[3] or 60) >= 240, f"the notice comes {asked[3] or 60} s before the end, and a save may take 240")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        (home / "stand_in").write_text(STAND_IN)
        (home / "job.sbatch").write_bytes(script.read_bytes())
        ended = f"the script had not ended {LIMIT:.0f} seconds after its torchruns"
        meet, first = _trained(run := _run(home, header, job))
        holds(run[0] is not None, ended)
        holds(run[0] == 0, f"training ended well, and the script's exit code is {run[0]}")
        code, events, _ = _run(home, header, job, code=1)
        holds(
            "requeue" not in [event[0] for event in events],
            "training failed, and no notice came: a bug is queued again",
        )
        holds(code is not None, ended)
        holds(code, "training failed, and the script returned 0: Slurm calls that completed")
        for restarts in ("", 2):
            code, events, _ = run = _run(home, header, job, restarts, notice=(batch, number))
            kinds = [event[0] for event in events]
            saved = kinds[: kinds.index("requeue") if "requeue" in kinds else None].count("saved")
            for right, sentence in (
                ("forced" not in kinds, "srun answers SIGTERM by SIGKILL to its tasks; scancel --signal asks them"),
                (["scancel", ""] not in events, "scancel without --signal cancels the job"),
                ("batch" not in kinds, "scancel --batch or --full: the signal reaches this script, and ends it"),
                ("cut" not in kinds, "SIGTERM ended the shell around torchrun, and so the task: exec torchrun"),
                (saved == 4 or "requeue" not in kinds, f"requeue came when {saved} of 4 had saved, and ended all"),
                (batch or "asked" in kinds, "without B: the signal goes to the tasks, and ends torchrun"),
                (code != -number, "the notice ended the script: no trap was set for it"),
                ("asked" in kinds, "torchrun heard no SIGTERM: a trap waits for the command in the foreground"),
                (saved == 4, f"the script ended when {saved} of 4 nodes had saved: a signal ends `wait`, too"),
                (["requeue", str(job)] in events, "every node saved, and nothing put the job back: scontrol requeue"),
                (_trained(run)[1] == first, "queued again, the job gets another --folder: nothing to resume from"),
            ):
                holds(right, sentence)
    return f"in a simulated Slurm 4 torchruns meet at {meet}, all save before requeue, and a bug is not queued again"
