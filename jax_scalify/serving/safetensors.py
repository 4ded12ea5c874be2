"""The file format safetensors, written and read with NumPy.

A file is the length of a header (eight bytes, little-endian), the header (JSON: of each tensor its
dtype, shape, and where its bytes begin and end), and the bytes. The package of the same name would
be one more dependency, whose part for NumPy reads no FP8 (version 0.8.0).

Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_NAMES = {
    np.dtype(dtype): name
    for dtype, name in (
        (np.bool_, "BOOL"),
        *((f"{sign}{size}", f"{sign.upper()}{8 * size}") for sign in "iu" for size in (1, 2, 4, 8)),
        *((f"f{size}", f"F{8 * size}") for size in (2, 4, 8)),
        (np.complex64, "C64"),
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
        (ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
    )
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000  # what other readers take


def name_of_dtype(dtype: Any) -> str | None:
    """What the format calls a dtype; None for one that it does not have."""
    return _NAMES.get(np.dtype(dtype))


def write(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write arrays to a file, in the order of their alignment; complete, or not at all.

    Each is fetched from its devices when it is written, so that the host holds one at a time.
    """
    names = sorted(arrays, key=lambda name: (-np.dtype(arrays[name].dtype).itemsize, name))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        array = arrays[name]
        begin, end = end, end + array.size * np.dtype(array.dtype).itemsize
        dtype = _NAMES[np.dtype(array.dtype)]
        entry = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8))
    os.replace(new, path)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays of a file, mapped into memory and not writable, and its metadata.

    Raises:
        ValueError: for a file that is none of this format, or has a dtype that NumPy has not.
    """
    size = path.stat().st_size
    whole = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    length = int.from_bytes(whole[:8].tobytes(), "little")
    if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"`path`: {str(path)!r} is no safetensors file.")
    try:
        header = json.loads(whole[8 : 8 + length].tobytes())
    except ValueError as error:
        raise ValueError(f"`path`: {str(path)!r} is no safetensors file: {error}.") from None
    data = whole[8 + length :]
    metadata = header.pop(_METADATA, {})
    return {name: _array(name, entry, data) for name, entry in header.items()}, metadata


def _array(name: str, entry: dict[str, Any], data: np.ndarray) -> np.ndarray:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name!r} is of dtype {entry['dtype']}, which NumPy does not have.")
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    if not 0 <= begin <= end <= data.size or end - begin != count * dtype.itemsize:
        raise ValueError(f"{name!r}: bytes {begin} to {end} do not hold {dtype}{list(shape)}.")
    part = data[begin:end]
    if begin % dtype.itemsize:  # not aligned: a copy
        part = part.copy()
    return np.asarray(part).view(dtype).reshape(shape)
