"""What a stack of arrays means: the names of KV formats, which one an engine's cache has, and its sizes.

``names`` reads a format's facts off its name, ``detect`` finds the name of a cache, ``geometry`` reads sizes and
strided planes off a cache whose name is known. All of it works on arrays and on specs alike and touches no byte.
"""

from kvshm.contiguity import attempt_permute_to_contiguous_view
from kvshm.formats.detect import (
    EngineType,
    LayoutHints,
    detect_format,
    normalize_and_discover_per_layer_formats,
)
from kvshm.formats.geometry import Geometry, geometry
from kvshm.formats.names import EngineKVFormat

__all__ = [
    "EngineKVFormat",
    "EngineType",
    "Geometry",
    "LayoutHints",
    "attempt_permute_to_contiguous_view",
    "detect_format",
    "geometry",
    "normalize_and_discover_per_layer_formats",
]
