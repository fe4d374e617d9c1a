"""Named tensors in a safetensors file: a JSON header, then the bytes. No pickle.

The format is the public one (https://github.com/huggingface/safetensors), so any of its readers opens our
files. A file of one rank may hold boxes of a tensor: such an entry is called `name@offset,offset` and the
header's metadata has the whole shape; a whole tensor keeps its plain name.
"""

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_BYTES = 100 << 20  # a larger header is refused before it is read


class Stage:
    """A kept copy of tensors whose bytes are the body of a file: saving blocks for one memory copy."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in NAMES:
                raise ValueError(f"{name}: {tensor.dtype} can't be saved; allowed are {', '.join(DTYPES)}")
        widest_first = sorted(
            tensors.items(), key=lambda item: (-item[1].element_size(), item[0])
        )  # keeps all aligned
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        self.on_cuda = any(t.is_cuda for t in tensors.values())
        self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.on_cuda)
        self.views: dict[str, Tensor] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt", "shapes": "{}"}}
        start = 0
        for name, tensor in widest_first:
            end = start + tensor.numel() * tensor.element_size()
            self.views[name] = self.buffer[start:end].view(tensor.dtype).view(tensor.shape)
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.header = struct.pack("<Q", len(text)) + text

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Tell whether these tensors have the names, dtypes and shapes that the buffer was made for."""
        mine = {k: (v.dtype, v.shape) for k, v in self.views.items()}
        return mine == {k: (v.dtype, v.shape) for k, v in tensors.items()}

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors into the buffer."""
        for name, view in self.views.items():
            view.copy_(tensors[name].detach(), non_blocking=self.on_cuda)
        if self.on_cuda:
            torch.cuda.synchronize()  # the copies must be done before the weights change

    @property
    def size(self) -> int:
        return len(self.header) + self.buffer.numel()

    def write(self, path: Path) -> dict[str, object]:
        """Write the file durably; returns its size in bytes and its SHA-256."""
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for part in (self.header, self.buffer.numpy().data):
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
        return {"size": self.size, "sha256": digest.hexdigest()}


def save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a new file."""
    stage = Stage(tensors)
    stage.copy(tensors)
    stage.write(path)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory: read when they are used, changes stay private.

    Raises:
        ValueError: the file is damaged or not of this format.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < 8:
            raise ValueError(f"{path}: too short to be a safetensors file")
        body = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    (length,) = struct.unpack("<Q", body[:8])
    if length > min(len(body) - 8, HEADER_BYTES):
        raise ValueError(f"{path}: the header claims {length} bytes of a file of {len(body)}")
    try:
        header = json.loads(body[8 : 8 + length])
        header.pop("__metadata__", None)
        return {name: _view(body, 8 + length, name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path}: the header can't be used: {error!r}") from None


def _view(body: mmap.mmap, base: int, name: str, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)):
        raise ValueError(f"{name} has a shape or place that is no number")
    count = math.prod(shape)
    if end - start != count * dtype.itemsize or base + end > len(body):
        raise ValueError(f"{name} lies outside the file or has another size than its shape")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if (base + start) % dtype.itemsize:  # a foreign file need not be aligned
        return torch.frombuffer(bytearray(body[base + start : base + end]), dtype=dtype).view(shape)
    return torch.frombuffer(body, dtype=dtype, count=count, offset=base + start).view(shape)


def cast(source: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, floating-point ones in the dtype of their namesakes."""
    floating = {k for k, v in source.items() if v.is_floating_point() and k in like}
    return {k: v.to(like[k].dtype) if k in floating else v for k, v in source.items()}


def copy_into(source: Mapping[str, Tensor], target: Mapping[str, Tensor], what: str) -> None:
    """Copy tensors by name, only if names, shapes and dtypes are the same.

    Raises:
        ValueError: they differ; nothing was copied.
    """
    if missing := sorted(target.keys() - source.keys()):
        raise ValueError(f"{what} lacks {_some(missing)}")
    if extra := sorted(source.keys() - target.keys()):
        raise ValueError(f"{what} has {_some(extra)}, which the model doesn't know")
    for name, wanted in target.items():
        got = source[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            want = f"{wanted.dtype} {list(wanted.shape)}"
            raise ValueError(f"{what}: {name} is {got.dtype} {list(got.shape)}, but the model wants {want}")
    with torch.no_grad():
        for name, wanted in target.items():
            wanted.copy_(source[name])


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
