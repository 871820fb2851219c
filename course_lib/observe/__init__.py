"""Observe what a rank does: memory by category, collectives, step times, bytes on the wire, a trace."""

from course_lib.observe.collectives import Collective, record_collectives
from course_lib.observe.memory import MemoryProbe, SavedForBackward, tensor_bytes
from course_lib.observe.stages import StageRecorder
from course_lib.observe.steps import Observation, observe, product_flops
from course_lib.observe.trace import Span, trace_step
from course_lib.observe.wire import WireMeter, sent_bytes

__all__ = [
    "Collective",
    "MemoryProbe",
    "Observation",
    "SavedForBackward",
    "Span",
    "StageRecorder",
    "WireMeter",
    "observe",
    "product_flops",
    "record_collectives",
    "sent_bytes",
    "tensor_bytes",
    "trace_step",
]
