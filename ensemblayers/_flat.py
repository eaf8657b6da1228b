"""The flat buffers of an optimizer: many parameters as ranges of columns of one matrix."""

import contextlib
import itertools
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._gradients import users

if TYPE_CHECKING:
    from ._ahead import Ahead


@dataclass
class Block:
    """The parameters of one group that share a device and a dtype, and their flat buffers.

    Column ``columns[k] + j`` belongs to the j-th element of parameter k in the order of its memory.
    """

    group: dict[str, Any]
    params: list[Tensor]
    shards: list[Tensor]  # What this process holds of them: all, but for FSDP.
    strides: list[tuple[int, ...]]  # Of the shards.
    columns: list[int]
    vertices: Tensor  # [n + frozen, P]
    moments: dict[str, Tensor] = field(default_factory=dict)  # [n, P] each
    gradients: Tensor | None = None  # [n, P], where several draws accumulate
    gathered: set[int] = field(default_factory=set)  # The parameters that have a part in them.
    numbers: Tensor | None = None  # What a captured step reads.
    steps: list[int] = field(default_factory=list)  # Of each parameter's moments, so far.
    versions: list[tuple[int, int]] = field(default_factory=list)  # As this optimizer wrote them.
    ahead: "Ahead | None" = None  # A cycle of steps that is under way.
    users: int | None = None  # Of the vertices' memory, beside those who call for views.

    @classmethod
    def of(
        cls, group: dict[str, Any], params: list[Tensor], n: int, moments: Iterable[str]
    ) -> "Block":
        """Lay parameters out for n vertices, the values to be filled in, and moments of zeros.

        Raises:
            ValueError: parameters that are no floats, not dense, or on the meta device.
        """
        shards = [local(p.detach()) for p in params]
        for p in shards:
            if not p.is_floating_point():
                raise ValueError(f"expected floating-point parameters, got {p.dtype}")
            if p.is_meta:
                raise ValueError(
                    "expected parameters that hold values, got the meta device: build the "
                    "optimizer after to_empty() and the initialisation"
                )
            if not is_dense(p):
                raise ValueError(
                    f"expected parameters that fill their memory, got shape {list(p.shape)} with "
                    f"strides {list(p.stride())}; use p.data.contiguous()"
                )
        sizes = [p.numel() for p in shards]
        columns = [sum(sizes[:k]) for k in range(len(sizes))]
        # Half-precision parameters have float32 vertices: their master weights.
        dtype = torch.float64 if shards[0].dtype == torch.float64 else torch.float32
        names = list(moments)
        rows = padded(n * (1 + len(names)), sum(sizes), dtype=dtype, device=shards[0].device)
        vertices, *rest = rows.split(n)
        kept = {name: moment.zero_() for name, moment in zip(names, rest, strict=True)}
        strides = [p.stride() for p in shards]
        steps = [0] * len(params)
        return cls(group, params, shards, strides, columns, vertices, kept, steps=steps)

    def __getstate__(self) -> dict[str, Any]:
        # Compact: pickle would write the memory that they share for each of them.
        moments = {name: moment.clone() for name, moment in self.moments.items()}
        return {**vars(self), "vertices": self.vertices.clone(), "moments": moments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.vertices, *moments = lay_out(self.vertices, *self.moments.values())
        self.moments = dict(zip(self.moments, moments, strict=True))

    def add_moments(self, names: Iterable[str], n: int) -> None:
        """Add moments of zeros."""
        like = {"dtype": self.vertices.dtype, "device": self.vertices.device}
        for name in names:
            self.moments[name] = padded(n, self.vertices.shape[1], **like).zero_()

    def set_rows(self, vertices: Iterable[Tensor]) -> None:
        """Exchange the vertices for others, ``[P]`` each."""
        rows = list(vertices)
        old = self.vertices
        self.vertices = padded(len(rows), old.shape[1], dtype=old.dtype, device=old.device)
        for new, row in zip(self.vertices, rows, strict=True):
            new.copy_(row)
        self.ahead = self.users = None

    def count_users(self) -> None:
        """Note how many tensors use the vertices' memory now, none of them a user's own."""
        self.users = users(self.vertices.untyped_storage())

    def is_viewed(self) -> bool:
        """Whether somebody else holds views of the vertices, or nobody can tell."""
        now = users(self.vertices.untyped_storage())
        return self.users is None or now is None or now > self.users

    def buffer_versions(self) -> list[int]:
        """Versions of vertices and moments, which tell of others' writes to them."""
        return [t._version for t in (self.vertices, *self.moments.values())]

    def select(self, which: Iterable[int]) -> tuple[list[Tensor], list[int]]:
        """Some of the parameters' shards and their first columns."""
        which = list(which)
        if len(which) == len(self.params):
            return self.shards, self.columns
        return [self.shards[k] for k in which], [self.columns[k] for k in which]

    @property
    def sharded(self) -> bool:
        """Whether the parameters are DTensors, under FSDP."""
        return is_sharded(self.params[0])

    def view(self, buffer: Tensor, k: int) -> Tensor:
        """A buffer's columns of parameter k, shaped like it: ``[rows, *shape]``."""
        p = self.shards[k]
        strides = (buffer.stride(0), *p.stride())
        offset = buffer.storage_offset() + self.columns[k]
        return buffer.as_strided((len(buffer), *p.shape), strides, offset)

    def shown(self, buffer: Tensor, k: int) -> Tensor:
        """The same as users see it: a DTensor of the whole ``[rows, *shape]``, under FSDP."""
        own, p = self.view(buffer, k), self.params[k]
        if not is_sharded(p):
            return own
        from torch.distributed.tensor import DTensor

        shown = DTensor.from_local(
            torch.empty_like(own),
            p.device_mesh,
            [_beside_rows(placement) for placement in p.placements],
            run_check=False,
            shape=torch.Size([len(buffer), *p.shape]),
            stride=(p.numel(), *p.stride()),
        )
        # Afterwards, as fully_shard does: torch.save fails on a DTensor made of a view with offset.
        shown._local_tensor = own
        return shown

    def now(self) -> list[tuple[int, int]]:
        """The version and the address of each parameter, which tell of writes and moves."""
        if self.sharded:
            return [(p._version, local(p).data_ptr()) for p in self.params]
        return [(p._version, p.data_ptr()) for p in self.params]

    def find(self) -> None:
        """Find the parameters' memory again: ``p.data`` may have been replaced.

        Raises:
            RuntimeError: parameters of another shape, dtype or device.
        """
        found = [local(p.detach()) for p in self.params]
        for old, new in zip(self.shards, found, strict=True):
            was, now = ((list(p.shape), p.stride(), p.dtype, p.device) for p in (old, new))
            if was != now:
                raise RuntimeError(
                    f"a parameter changed from {was} to {now} (shape, strides, dtype, device): "
                    "build the optimizer after such changes"
                )
        self.shards = found

    def gradients_now(self) -> list[Tensor | None]:
        """The parameters' gradients where they lie; a copy where order or dtype are others.

        Raises:
            RuntimeError: a sparse gradient.
        """
        grads = [p.grad for p in self.params]
        if self.sharded:
            grads = [_own_part(g, p) for g, p in zip(grads, self.params, strict=True)]
        for k, g in enumerate(grads):
            if g is None:
                continue
            if g.layout is not torch.strided:
                raise RuntimeError(
                    "sparse gradients can't be shared out to n vertices; use sparse=False"
                )
            if g.stride() != self.strides[k] or g.dtype != self.shards[k].dtype:
                grads[k] = torch.empty_like(self.shards[k]).copy_(g)
        return grads


def _own_part(grad: Tensor | None, p: Tensor) -> Tensor | None:
    """A sharded gradient's part that belongs to this process's part of the parameter."""
    if grad is None:
        return None
    return local(
        grad if grad.placements == p.placements else grad.redistribute(placements=p.placements)
    )


def padded(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised matrix whose rows start at different places of a page of memory.

    Rows that lie a multiple of 4 KiB apart would share cache sets: the fused pass reads and writes
    all of them at the same column.
    """
    page, skew = 4096 // dtype.itemsize, 576 // dtype.itemsize
    pitch = -(-columns // page) * page + skew
    with torch.inference_mode(False):  # Steps outside of it write to the buffer.
        if device.type == "cpu":
            flat = _huge_pages(rows * pitch, dtype)
        else:
            flat = torch.empty(rows * pitch, dtype=dtype, device=device)
        return flat.view(rows, pitch)[:, :columns]


def lay_out(*parts: Tensor) -> tuple[Tensor, ...]:
    """Copies of matrices ``[rows, P]`` in one padded buffer."""
    first, sizes = parts[0], [len(part) for part in parts]
    rows = padded(sum(sizes), first.shape[1], dtype=first.dtype, device=first.device)
    copies = rows.split(sizes)
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part)
    return copies


def _huge_pages(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor, on huge pages where the system has them.

    The fused pass goes through dozens of megabytes at once: on pages of 4 KiB, the look-ups of
    their addresses take a fifth of its time.
    """
    size, page = count * dtype.itemsize, 2 << 20
    if size < 2 * page or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % page
    return raw[start : start + size].view(dtype)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: the parameters under FSDP are."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its shard, under FSDP."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def share(tensor: Tensor, p: Tensor) -> Tensor:
    """This process's share of a tensor ``[*shape]``, as the parameter p of that shape is cut."""
    if not is_sharded(p):
        return tensor
    if is_sharded(tensor):
        return local(tensor.redistribute(p.device_mesh, p.placements))
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole: nothing to send.
    return local(distribute_tensor(tensor, p.device_mesh, p.placements, src_data_rank=None))


def _beside_rows(placement: Any) -> Any:
    """The placement of a tensor with one more dimension in front."""
    if not hasattr(placement, "dim"):
        return placement
    strided = hasattr(placement, "split_factor")
    options = {"split_factor": placement.split_factor} if strided else {}
    return type(placement)(placement.dim + 1, **options)


def check_apart(dense: Iterable[Tensor]) -> None:
    """Raise a ValueError where parameters share memory: each would undo the others' steps."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, p.shape) for p in dense if p.numel())
    for (_, end, shape), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(
                f"expected parameters in memory of their own, got two of shapes {list(shape)} and "
                f"{list(other)} that share some"
            )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlap, in whatever order."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
