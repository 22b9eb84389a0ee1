"""What the caching allocator of torch reserves on a CUDA device for a sequence of tensors.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default options: sizes are rounded
to 512 bytes, small and large tensors and every stream have pools of their own, the smallest free
block that fits is taken and split, and freed neighbours join. Memory is given back only where the
device has none left: then what lies free in whole segments goes, and only if that is not enough
the program fails.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

__all__ = ["Block", "CachingAllocator"]

_MIB = 2**20
_ROUNDING = 512  # kMinBlockSize
_SMALL = _MIB  # kSmallSize: tensors up to this come from the small pool
_SMALL_SEGMENT = 2 * _MIB  # kSmallBuffer
_LARGE_SEGMENT = 20 * _MIB  # kLargeBuffer: tensors below 10 MiB share a segment of this size
_OWN_SEGMENT = 10 * _MIB  # kMinLargeAlloc
_SEGMENT_ROUNDING = 2 * _MIB  # kRoundLarge


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment.

    Attributes:
        size: bytes.
        address: of its first byte.
        pool: whose it is.
        is_free: no tensor lies in it.
        before, after: its neighbours in the segment.
    """

    size: int
    address: int
    pool: _Pool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Return what free blocks are sorted by."""
        return self.size, self.address


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of a stream and a kind of size; with expandable segments, its only segment."""

    is_small: bool
    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)
    last: Block | None = None

    def add(self, block: Block) -> None:
        insort(self.keys, block.key)
        self.blocks[block.key] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]

    def best(self, size: int) -> Block | None:
        index = bisect_left(self.keys, (size, 0))
        return self.blocks[self.keys[index]] if index < len(self.keys) else None


class CachingAllocator:
    """Counts what tensors take and what is reserved for them.

    Args:
        is_expandable: segments grow (`expandable_segments:True`), one for each pool; otherwise
            every tensor that finds no free block gets a segment.
        capacity_bytes: of the device, less what others take; None: any amount.

    Attributes:
        allocated, reserved: bytes now.
        peak_allocated, peak_reserved: most bytes so far.
        is_exhausted: some tensor did not find room; it was made nevertheless.
    """

    def __init__(self, *, is_expandable: bool = False, capacity_bytes: int | None = None) -> None:
        self.is_expandable = is_expandable
        self.capacity_bytes = capacity_bytes
        self.is_exhausted = False
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block for a tensor.

        Args:
            nbytes: of the tensor, at least 1.
            stream: on which it is made; a block never serves another one.
        """
        size = -(-nbytes // _ROUNDING) * _ROUNDING
        pool = self._pools.setdefault((stream, size <= _SMALL), _Pool(is_small=size <= _SMALL))
        block = pool.best(size)
        if block is not None:
            pool.remove(block)
        elif self.is_expandable:
            block = self._grown(pool, size)
        else:
            block = self._new(pool, _segment_bytes(size, pool))
        block.is_free = False
        self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Let a tensor go; its block joins free neighbours."""
        assert not block.is_free
        self.allocated -= block.size
        block.is_free = True
        pool = block.pool
        before, after = block.before, block.after
        if after is not None and after.is_free:
            pool.remove(after)
            self._join(block, after)
        if before is not None and before.is_free:
            pool.remove(before)
            self._join(before, block)
            block = before
        pool.add(block)

    def _new(self, pool: _Pool, size: int) -> Block:
        block = Block(size=size, address=self._next_address, pool=pool)
        # Segments do not touch: a gap of one byte keeps their order without joining them.
        self._next_address += size + 1
        self._reserve(size)
        return block

    def _grown(self, pool: _Pool, size: int) -> Block:
        """Return a free block at the end of a pool's segment, which grows as far as is needed."""
        step = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        end = pool.last
        if end is not None and end.is_free:
            pool.remove(end)
            more = -(-(size - end.size) // step) * step
            end.size += more
            self._reserve(more)
            return end
        more = -(-size // step) * step
        # An address range of its own for every pool, so large that it is never full.
        address = end.address + end.size if end is not None else len(self._pools) << 50
        block = Block(size=more, address=address, pool=pool, before=end)
        if end is not None:
            end.after = block
        pool.last = block
        self._reserve(more)
        return block

    def _reserve(self, nbytes: int) -> None:
        if self.capacity_bytes is not None and self.reserved + nbytes > self.capacity_bytes:
            self._release_cached()
            self.is_exhausted |= self.reserved + nbytes > self.capacity_bytes
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _release_cached(self) -> None:
        """Give back what lies free: whole segments, or the ends of those that grow."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                is_whole = block.before is None and block.after is None
                if is_whole or (self.is_expandable and block is pool.last):
                    pool.remove(block)
                    self.reserved -= block.size
                    if block.before is not None:
                        block.before.after = None
                    if pool.last is block:
                        pool.last = block.before

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        pool = block.pool
        least = _ROUNDING if pool.is_small or self.is_expandable else _SMALL + 1
        if left < least:
            return
        rest = Block(
            size=left,
            address=block.address + size,
            pool=pool,
            is_free=True,
            before=block,
            after=block.after,
        )
        if block.after is not None:
            block.after.before = rest
        if pool.last is block:
            pool.last = rest
        block.size, block.after = size, rest
        pool.add(rest)

    def _join(self, block: Block, after: Block) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        if block.pool.last is after:
            block.pool.last = block


def _segment_bytes(size: int, pool: _Pool) -> int:
    if pool.is_small:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
