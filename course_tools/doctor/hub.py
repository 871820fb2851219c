"""The Hugging Face hub, which the course does without and a learner's own models may need."""

from __future__ import annotations

import os
import urllib.error
import urllib.request

from course_tools.doctor.findings import NOTE, OK, Finding

MEANS = "All lessons run: the models and texts of the course come with its packages. Models of your own need the hub, or a folder."


def hub(seconds: float = 4.0) -> Finding:
    """Whether the hub answers. A refusal by the hub itself is an answer."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Finding(
            NOTE, "hub", "HF_HUB_OFFLINE is set, so nothing asks it", MEANS, "To use it: unset HF_HUB_OFFLINE"
        )
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=seconds):
            pass
    except urllib.error.HTTPError:
        pass
    except (OSError, ValueError):
        return Finding(
            NOTE,
            "hub",
            f"{address} does not answer",
            MEANS,
            "Behind a proxy: set HTTPS_PROXY; with a mirror: HF_ENDPOINT",
        )
    return Finding(OK, "hub", f"{address} answers")
