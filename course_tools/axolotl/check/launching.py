"""The command that starts the run that a YAML describes."""

from __future__ import annotations

import shlex

from course_tools.axolotl.check.settings import Settings


def launch_command(settings: Settings) -> str:
    """``axolotl train`` for these cards; on several machines the command of each of them, with its rank to fill in."""
    name = shlex.quote(str(settings.document.path or "run.yml"))
    cluster = settings.cluster
    if cluster is None or cluster.ranks == 1:
        return f"axolotl train {name} --launcher python"
    if cluster.nodes == 1:
        return f"axolotl train {name} --launcher torchrun -- --nproc_per_node={cluster.per_node}"
    return (
        f"axolotl train {name} --launcher torchrun -- --nnodes={cluster.nodes} --nproc_per_node={cluster.per_node} "
        "--rdzv_endpoint=$HEAD:29500 --rdzv_backend=c10d --rdzv_id=run"
    )
