"""Named segments of shared memory, and nothing about what arrays in them mean.

``pages`` maps memory by address, ``capacity`` reserves it and says why it cannot, ``objects`` makes, opens, lists and
removes names, ``mappings`` keeps what this process has mapped, ``segments`` are the handles that users hold.
"""

from kvshm.shm.objects import SHM_NAME_PREFIX, SegmentInfo, list_segments, sweep
from kvshm.shm.segments import Segment

__all__ = ["SHM_NAME_PREFIX", "Segment", "SegmentInfo", "list_segments", "sweep"]
