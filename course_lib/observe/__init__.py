"""What a rank did: bytes by category, the peak, collectives issued, step times, bytes on the wire, a trace."""

from course_lib.observe.collectives import Collective
from course_lib.observe.memory import MemoryProbe, tensor_bytes
from course_lib.observe.steps import Observation, Outcome, observe
from course_lib.observe.trace import Span, overlap_seconds, trace_step
from course_lib.observe.wire import WireMeter, sent_bytes

__all__ = [
    "Collective",
    "MemoryProbe",
    "Observation",
    "Outcome",
    "Span",
    "WireMeter",
    "observe",
    "overlap_seconds",
    "sent_bytes",
    "tensor_bytes",
    "trace_step",
]
