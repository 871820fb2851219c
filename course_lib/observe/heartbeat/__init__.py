"""The heartbeat that each rank writes: how far it got, and by when its next beat is due."""

from course_lib.observe.heartbeat.beats import Beat, read_beats
from course_lib.observe.heartbeat.writer import Heartbeat

__all__ = ["Beat", "Heartbeat", "read_beats"]
