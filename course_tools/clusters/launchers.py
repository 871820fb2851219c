"""The torchrun command that starts one machine's ranks.

One agent runs on every machine. The agents meet at one endpoint (a c10d rendezvous, a TCP store on the first machine),
agree on who is which, and each starts its ranks. When a rank dies, they meet again and all ranks start again, up to
`max_restarts` times. PyTorch's documentation: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from course_tools.clusters.job import Job
from course_tools.clusters.shell import Shell, option, quoted, script, substitute, wrapped

# Seconds. Machines of one job start minutes apart where each one pulls its image first; torchrun's own figures are 60
# for the first machine to open its port and 600 for the last one to come.
RENDEZVOUS_TIMEOUTS = "read_timeout=300,join_timeout=1800"


def training_program(job: Job, config: str | None, output_dir: str) -> list[str]:
    """Return what torchrun starts: Axolotl on `config`, resuming whatever lies in `output_dir`, or the job's command."""
    if job.command is not None:
        return [substitute(word, "{output_dir}", output_dir) for word in job.command]
    return [
        "-m",
        "axolotl.cli.train",
        config,
        "--auto-resume-from-checkpoints=True",  # the first attempt finds none and begins; every later one continues
        option("--output-dir", output_dir),
    ]


def torchrun(
    job: Job, *, endpoint: str, config: str | None, output_dir: str, run_id: str = "", ranked: bool = False
) -> list[str]:
    """Return the command of one machine's agent.

    Args:
        endpoint: HOST:PORT of the first machine, the same word on all of them.
        config: path of the Axolotl YAML on the machine, if the job has one.
        output_dir: output folder on the machine.
        run_id: the same on all machines; the job's name if empty.
        ranked: the line of `is_host` stands before it in the script, so the agent need not compare its machine's
            addresses with the endpoint's to know whether it is the one that opens the port.
    """
    # Given alone, --rdzv_endpoint has Axolotl's own launcher draw a random rdzv_id on each machine, and they never meet
    conf = f"--rdzv_conf={RENDEZVOUS_TIMEOUTS}"
    return [
        "torchrun",
        f"--nnodes={job.num_nodes}",
        f"--nproc_per_node={job.gpus_per_node}",
        f"--max_restarts={job.max_restarts}",
        "--rdzv_backend=c10d",
        option("--rdzv_endpoint", endpoint),
        option("--rdzv_id", run_id or job.name),
        Shell(f"{conf},is_host=$is_host") if ranked else conf,
        *training_program(job, config, output_dir),
    ]


def is_host(variable: str) -> str:
    """Return a line that sets is_host to 1 on the machine whose number in `variable` is 0, to 0 on the others."""
    return f'[ "${variable}" = 0 ] && is_host=1 || is_host=0'


def machine_script(
    job: Job, *, first: str = "", endpoint: str, rank_variable: str, config: str | None, output_dir: str
) -> str:
    """Return what bash runs on one machine whose number the cluster puts into `rank_variable`."""
    agent = torchrun(job, endpoint=Shell(endpoint), ranked=True, config=config, output_dir=output_dir)
    mkdir = quoted(["mkdir", "-p", output_dir])
    return script("set -euo pipefail", first, *job.setup, mkdir, is_host(rank_variable), f"exec {wrapped(agent)}")
