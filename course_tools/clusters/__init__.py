"""One description of a run, and the launch file that each of five kinds of cluster wants of it.

    job = Job(name="llama-lora", config="run.yml", num_nodes=2, gpus_per_node=8, gpu="h100-80gb", hours=12)
    launch_files(job, "slurm", "launch")  # {"job.sbatch": its text}
    start_command(job, "slurm", "launch")  # "sbatch launch/job.sbatch"

Nothing is scheduled here: the command is yours to type.
"""

from course_tools.clusters.job import Job
from course_tools.clusters.targets import TARGETS
from course_tools.clusters.writing import launch_files, options_of, start_command

__all__ = ["TARGETS", "Job", "launch_files", "options_of", "start_command"]
