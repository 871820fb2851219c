"""One description of a run, and the launch files that five kinds of cluster want of it.

    job = Job(name="llama-lora", config="run.yml", num_nodes=2, gpus_per_node=8, gpu="h100-80gb", hours=12)
    write(job, "slurm", "launch").command  # "sbatch launch/job.sbatch"

Nothing is scheduled here: the files are written, and the command is yours to type.
"""

from course_tools.clusters.job import Job
from course_tools.clusters.writing import TARGETS, Written, launch_files, options_of, start_command, write

__all__ = ["TARGETS", "Job", "Written", "launch_files", "options_of", "start_command", "write"]
