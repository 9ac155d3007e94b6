"""KV blocks by number: which are free, which are held, and which still hold a known prefix.

A block is free, held (by one request, or by several with the same prefix), or kept: held by nobody,
but its content has a name and may be wanted again. Kept blocks are free ones too: the one that was
given back first is used for something else when no empty block is left.
"""

from collections import OrderedDict


class BlockPool:
    """Blocks 0 to `num_blocks` - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the block freed last is used first, while it may still be in a cache.
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_blocks
        self._named: dict[bytes, int] = {}
        self._names: list[bytes | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._kept)

    def take(self) -> int:
        """A block for new content; the caller has checked `num_free`."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._unname(block)
        self._num_holders[block] = 1
        return block

    def find(self, name: bytes) -> int | None:
        """The block of this name, to be held at once or never."""
        return self._named.get(name)

    def is_kept(self, block: int) -> bool:
        return self._num_holders[block] == 0

    def hold(self, block: int) -> None:
        """One holder more for a block that `find` gave."""
        self._kept.pop(block, None)
        self._num_holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less."""
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return
        if self._names[block] is None:
            self._empty.append(block)
        else:
            self._kept[block] = None

    def name(self, block: int, name: bytes) -> None:
        """`block` is full, and `name` says of what. The first block of a name keeps it."""
        if name not in self._named:
            self._named[name] = block
            self._names[block] = name

    def forget(self, name: bytes) -> None:
        """Nobody shall find the block of this name, if there is one."""
        if (block := self._named.pop(name, None)) is not None:
            self._names[block] = None
            if self._kept.pop(block, 0) is None:
                self._empty.append(block)

    def forget_all(self) -> None:
        """Nothing that any block contains now is found again."""
        self._empty.extend(reversed(self._kept))
        self._kept.clear()
        self._named.clear()
        self._names = [None] * self.num_blocks

    def _unname(self, block: int) -> None:
        if (name := self._names[block]) is not None:
            del self._named[name]
            self._names[block] = None
