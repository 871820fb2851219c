"""The command that starts one machine's ranks: torchrun's, and Accelerate's as Azure ML's own examples have it.

One agent runs on every machine. The agents meet at one endpoint (a c10d rendezvous, a TCP store on the first machine),
agree on who is which, and each starts its ranks. When a rank dies, they meet again and all ranks start again, up to
`max_restarts` times. PyTorch's documentation: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from course_tools.clusters.job import Job
from course_tools.clusters.shell import Shell, option, substitute

# Seconds. Machines of one job start minutes apart where each one pulls its image first; torchrun's own figures are 60
# for the first machine to open its port and 600 for the last one to come.
RENDEZVOUS_TIMEOUTS = "read_timeout=300,join_timeout=1800"


def training_program(job: Job, config: str | None, output_dir: str) -> list[str]:
    """Return what the launcher starts: Axolotl on `config`, resuming whatever lies in `output_dir`, or the job's command."""
    if job.command is not None:
        return [substitute(word, "{output_dir}", output_dir) for word in job.command]
    return [
        "-m",
        "axolotl.cli.train",
        config,
        "--auto-resume-from-checkpoints=True",  # the first attempt finds none and begins; every later one continues
        option("--output-dir", output_dir),
    ]


def torchrun(job: Job, *, endpoint: str, program: list[str], run_id: str = "", ranked: bool = False) -> list[str]:
    """Return the command of one machine's agent.

    Args:
        endpoint: HOST:PORT of the first machine, the same word on all of them.
        program: what each rank runs, from `training_program`.
        run_id: the same on all machines; the job's name if empty.
        ranked: the line of `shell.is_host` stands before it in the script, so the agent need not compare its
            machine's addresses with the endpoint's to know whether it is the one that opens the port.
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
        *program,
    ]


def accelerate(job: Job, *, host: Shell, port: Shell, machine: Shell, program: list[str]) -> list[str]:
    """Return the same for Accelerate's launcher; its --num_processes counts the ranks of *all* machines.

    The line of `shell.is_host` stands before it in the script.
    """
    several = ["--multi_gpu"] if job.world_size > 1 else []  # left out, it may start one process and say nothing
    return [
        "accelerate",
        "launch",
        *several,
        f"--num_machines={job.num_nodes}",
        f"--num_processes={job.world_size}",
        option("--machine_rank", machine),
        option("--main_process_ip", host),
        option("--main_process_port", port),
        "--rdzv_backend=c10d",  # Accelerate's own is "static", which cannot start again over several machines
        Shell(f"--rdzv_conf={RENDEZVOUS_TIMEOUTS},is_host=$is_host"),
        f"--max_restarts={job.max_restarts}",
        "--mixed_precision=no",  # the training's own settings decide; said here so that no default of the launcher does
        "--dynamo_backend=no",
        *program,
    ]
