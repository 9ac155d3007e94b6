"""What names a full KV block: all tokens up to its end, and the salt of who may share it.

The key of a block is a hash over its own tokens and the key before it, so equal keys mean equal
prefixes: BLAKE2b of 128 bits, where a chance meeting of two prefixes is beyond all likelihood.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

KEY_BYTES = 16


def first_key(salt: str | None) -> bytes:
    """What stands before the first block: nothing, or the salt."""
    return b"" if salt is None else _hash(b"salt", salt.encode("utf-8", "surrogatepass"))


def extend_keys(keys: list[bytes], salt: str | None, token_ids: Sequence[int], size: int) -> None:
    """Add to `keys` those of all full blocks of `size` tokens that it lacks."""
    key = keys[-1] if keys else first_key(salt)
    for start in range(len(keys) * size, len(token_ids) - size + 1, size):
        key = _hash(key, array("q", token_ids[start : start + size]).tobytes())
        keys.append(key)


def _hash(before: bytes, own: bytes) -> bytes:
    return hashlib.blake2b(own, digest_size=KEY_BYTES, key=before).digest()


class PrefixMemory:
    """The keys that somebody has used last, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def num_known(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are known."""
        for number, key in enumerate(keys):
            if key not in self._keys:
                return number
        return len(keys)

    def use(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.capacity:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()
