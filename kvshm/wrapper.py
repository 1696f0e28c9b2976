"""One array inside a segment, as a descriptor that other processes can map.

A :class:`ShmArrayWrapper` is plain data: it names a segment and says where in it an array lies. Its bytes are those of
a real LMCache, so either side may be one. Reading is strict, since the bytes come from another process: what does not
fit is a :class:`WireError`, before anything is opened or mapped.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgpack
import numpy as np

from kvshm.contiguity import attempt_permute_to_contiguous_view
from kvshm.dtypes import DType, as_dtype, dtype_name
from kvshm.migrate import address_of, home_of, move_to_segment
from kvshm.shm import mappings
from kvshm.shm.objects import SHM_NAME_PREFIX, is_posix_name
from kvshm.spec import ArraySpec, dense_strides

__all__ = ["ShmArrayWrapper", "WireError", "describe", "migrate_to_shm_and_wrap", "wrap"]

Array = np.ndarray[Any, Any]

_TYPE = "cpu_shm"
_VERSION = 1
_KEYS = frozenset({"type", "shm_name", "nbytes", "version", "metadata"})
_METADATA_KEYS = frozenset({"dtype", "shape", "stride", "storage_offset", "device_uuid"})
_MAX_RANK = 64 if int(np.__version__.partition(".")[0]) >= 2 else 32
_MAX_NUMBER = 2**64 - 1
_MAX_STRIDE_BYTES = 2**62
_INT = {int}


class WireError(ValueError):
    """Bytes or fields that are no valid descriptor or message. Nothing was opened or mapped for them."""


def _number(field: str, value: object) -> int:
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise WireError(f"{field} must be an integer, not {value!r}")
        value = operator.index(value)
    if not 0 <= value <= _MAX_NUMBER:
        raise WireError(f"{field} must lie between 0 and 2**64 - 1, not {value}")
    return value


def _numbers(field: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)):
        raise WireError(f"{field} must be a sequence of integers, not {values!r}")
    return tuple([_number(field, value) for value in values])


@dataclass(frozen=True, slots=True)
class ShmArrayWrapper:
    """The descriptor of one array in a segment of shared memory.

    Attributes:
        shm_name: The segment's name with its slash; "" for an array without bytes.
        nbytes: Bytes of the segment to map.
        dtype: A NumPy dtype; built from a wire name too.
        shape, stride: One number per axis; strides count elements.
        storage_offset: Elements from the segment's start to index (0, ..., 0).

    Raises:
        WireError: A field is not what the wire allows, or the array does not fit in ``nbytes``.
    """

    shm_name: str
    nbytes: int
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    device_uuid: str = "cpu"
    handle: None = None

    device_type: ClassVar[str] = "cpu"
    SHM_NAME_PREFIX: ClassVar[str] = SHM_NAME_PREFIX

    def __post_init__(self) -> None:
        try:
            dtype = as_dtype(self.dtype)
        except ValueError as error:
            raise WireError(str(error)) from None
        if dtype is not self.dtype:
            object.__setattr__(self, "dtype", dtype)
        shape, stride, offset, nbytes = self.shape, self.stride, self.storage_offset, self.nbytes
        # All numbers at once where they are plain, as on the wire: a cache has hundreds of layers.
        numbers = (*shape, *stride, offset, nbytes) if type(shape) is type(stride) is tuple else ()
        if set(map(type, numbers)) != _INT or min(numbers) < 0 or max(numbers) > _MAX_NUMBER:
            shape, stride = _numbers("shape", shape), _numbers("stride", stride)
            offset, nbytes = _number("storage_offset", offset), _number("nbytes", nbytes)
            for field, value in (("shape", shape), ("stride", stride), ("storage_offset", offset), ("nbytes", nbytes)):
                object.__setattr__(self, field, value)
        if len(shape) != len(stride) or len(shape) > _MAX_RANK:
            raise WireError(f"shape {shape} and stride {stride} must have the same rank, of at most {_MAX_RANK} axes")
        # ArraySpec.byte_span without making a spec for it: the steps to the last index, (size - 1) * step each.
        reach = sum(map(operator.mul, shape, stride)) - sum(stride)
        span = 0 if 0 in shape else (offset + reach + 1) * dtype.itemsize
        if span > nbytes:
            raise WireError(
                f"shape {shape}, stride {stride} and storage_offset {offset} ({dtype}) need bytes [0, {span}) of the "
                f"segment but nbytes is {nbytes}"
            )
        name, device_uuid = self.shm_name, self.device_uuid
        if not isinstance(name, str) or not (is_posix_name(name) or (name == "" and nbytes == 0)):
            raise WireError(
                f"shm_name {name!r} must be a slash and 1 to 254 bytes without slash or NUL, and not '.' or '..'; it "
                f"may be empty only without bytes (nbytes is {nbytes})"
            )
        if not isinstance(device_uuid, str) or self.handle is not None:
            raise WireError(f"device_uuid must be a string and handle None, not {device_uuid!r} and {self.handle!r}")

    @property
    def spec(self) -> ArraySpec:
        """Shape, stride, offset and dtype within the segment."""
        return ArraySpec(self.shape, self.stride, self.storage_offset, self.dtype)

    @classmethod
    def wrap(cls, array: Array) -> ShmArrayWrapper:
        """The descriptor of an array; see :func:`kvshm.wrap`."""
        return wrap(array)

    def to_array(self) -> Array:
        """The described array, mapped: the same pages, no copy.

        Raises:
            FileNotFoundError, PermissionError, OSError: The segment cannot be opened; the text says why.
            WireError: The segment is smaller than ``nbytes``, or the numbers are beyond what NumPy can hold.
        """
        try:
            if 0 in self.shape:
                return np.empty(self.shape, self.dtype)
            segment = mappings.attach_mapping(self.shm_name, self.nbytes).bytes()
            itemsize = self.dtype.itemsize
            strides = tuple([step * itemsize for step in self.stride])
            if max(strides, default=0) <= _MAX_STRIDE_BYTES:
                # ArraySpec.view, for the many layers of a cache: the bounds were checked when the fields came in.
                array: Array = np.ndarray(self.shape, self.dtype, segment, self.storage_offset * itemsize, strides)
                return array
            # What no machine word holds passes the bounds only where it moves nothing: on axes of size 1.
            pairs = zip(self.shape, self.stride, strict=True)
            return replace(self.spec, stride=tuple([step if size > 1 else 0 for size, step in pairs])).view(segment)
        except (ValueError, OverflowError) as error:
            raise WireError(f"no array of shape {self.shape} and stride {self.stride} can be had: {error}") from error

    def to_bytes(self) -> bytes:
        """The descriptor as MessagePack."""
        fields = {
            "type": _TYPE,
            "shm_name": self.shm_name,
            "nbytes": self.nbytes,
            "version": _VERSION,
            "metadata": {
                "dtype": dtype_name(self.dtype),
                "shape": self.shape,
                "stride": self.stride,
                "storage_offset": self.storage_offset,
                "device_uuid": self.device_uuid,
            },
        }
        return bytes(msgpack.packb(fields))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ShmArrayWrapper:
        """Read a descriptor. Opens and maps nothing.

        Raises:
            WireError: The bytes are no descriptor of an array in shared memory.
        """
        try:
            # Without a bound on arrays, a header of five bytes could ask for as much memory as it likes.
            fields = msgpack.unpackb(data, max_array_len=_MAX_RANK, max_map_len=_MAX_RANK, use_list=False)
        except Exception as error:
            raise WireError(f"not one MessagePack value: {error or type(error).__name__}") from error
        metadata = _fields(fields, _KEYS, "descriptor")["metadata"]
        _fields(metadata, _METADATA_KEYS, "metadata")
        if fields["type"] != _TYPE:
            raise WireError(f"descriptor of type {fields['type']!r}; only {_TYPE!r} can be mapped here")
        if type(fields["version"]) is not int or fields["version"] != _VERSION:
            raise WireError(f"descriptor of version {fields['version']!r}; only {_VERSION} is known")
        if type(metadata["dtype"]) is not str:
            raise WireError(f"dtype must be a name, not {metadata['dtype']!r}")
        return cls(fields["shm_name"], fields["nbytes"], **metadata)

    def __reduce__(self) -> tuple[Any, ...]:
        # By the constructor, which checks, and by the dtype's name.
        return ShmArrayWrapper, (
            self.shm_name,
            self.nbytes,
            dtype_name(self.dtype),
            self.shape,
            self.stride,
            self.storage_offset,
            self.device_uuid,
        )


def _fields(value: object, keys: frozenset[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"{what} must be a map, not {type(value).__name__}")
    if value.keys() != keys:
        missing, unknown = sorted(keys - value.keys()), sorted(map(repr, value.keys() - keys))
        raise WireError(f"{what} lacks the keys {missing} and has unknown ones {unknown}")
    return value


def describe(array: Array, *, migrate: bool) -> ShmArrayWrapper | None:
    """The descriptor of an array; None if it lies in no segment and is not to be moved into one.

    Raises:
        ValueError: It can be neither described nor moved.
        OSError: No room to move it.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"expected a NumPy array, not {type(array).__name__}")
    dtype = as_dtype(array.dtype)
    try:
        spec = ArraySpec.of(array)
        permuted = attempt_permute_to_contiguous_view(spec) if spec.shape else spec
    except ValueError as error:
        raise ValueError(f"{error} (kvshm.share(array) does that)") from None
    if 0 in array.shape:
        # NumPy gives fresh arrays without elements strides of 0; others keep theirs.
        stride = spec.stride if any(spec.stride) else dense_strides(spec.shape)
        return ShmArrayWrapper("", 0, dtype, spec.shape, stride, 0)
    home = home_of(array, keep=True)
    if home is None:
        if not migrate:
            return None
        home = move_to_segment(array)
    offset, rest = divmod(address_of(array) - home.address, dtype.itemsize)
    if rest or offset < 0:
        raise ValueError(
            f"array begins {address_of(array) - home.address} bytes into segment {home.name!r}, no whole number of "
            f"items of {dtype} ({dtype.itemsize} bytes); copy it with kvshm.share"
        )
    return ShmArrayWrapper(home.name, home.nbytes, dtype, permuted.shape, permuted.stride, offset)


def wrap(array: Array) -> ShmArrayWrapper:
    """The descriptor of an array in shared memory, which any process can map.

    The axes come in memory order, contiguous or padded along the first axis alone. An array that is not in shared
    memory is moved there first, in place, where that can be done (:func:`migrate_to_shm_and_wrap` says when).

    Raises:
        ValueError: It can be neither described nor moved; the text says why. ``kvshm.share`` copies such arrays.
        OSError: No room to move it.
    """
    wrapper = describe(array, migrate=True)
    assert wrapper is not None
    return wrapper


def migrate_to_shm_and_wrap(array: Array) -> ShmArrayWrapper:
    """Move an array's memory into a segment under the same addresses, and describe it.

    All whole pages of the memory that the array's owner holds move at once: the array, all views of that memory and
    every raw pointer into it see shared pages afterwards, and what else is wrapped in there lies in the same segment.
    It must be ordinary writable memory, and the array must lie in its whole pages and be contiguous after a permute.
    Memory of a file is refused, and memory that is shared in another way. Nobody may write to it meanwhile. The pages
    are private again, and then released, at the first garbage collection after the last user has gone. What is in a
    segment already, or a view of it, is only described.

    Raises:
        ValueError: It cannot be moved; the text says why. Nothing has changed.
        OSError: No room for the segment.
    """
    return wrap(array)
