"""The pool of KV-cache blocks: which are held, which are free, what is in them.

    num_blocks 8, block_size 4            ref counts
    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ]
      2    1    1    0    0    -    -    -      r0 holds 0 1, r1 holds 0 2
                     ^    ^    ^
                     |    |    never used: handed out first, in order
                     freed: still findable by content until handed out again

The *prefix cache* finds a full block by its contents. A block's key is its own tokens and a
number, the *chain*, that stands for everything before them:

    key of block i = (chain of block i - 1, its tokens)     each key has its own chain number

Equal tokens after different prefixes have different keys, so a key stands for all tokens from
the start of the request. A Python dict compares keys, not only their hashes, so prefixes whose
hashes collide are kept apart. Chain numbers are never reused, so a key whose parent was dropped
is never found by other tokens. If two requests compute the same prompt side by side, several
blocks have the same key; match_prefix returns the one that was entered first.

Here "cached" means: entered in the prefix cache, not merely present in the KV cache.

Always holds (invariants 1 to 6): free + in use = all; a ref count is the number of tables
that hold the block; a failed call changes nothing; a key names a block with exactly those
tokens after exactly that prefix and salt, all computed; least recently freed is reused first,
a table's tail before its head.

Every operation is O(1) a block, in a pool of a million too: the free list is an OrderedDict,
and blocks that were never used are only a counter.

Taught in notebooks/05_paged_kv_blocks.ipynb. Source: PagedAttention (Kwon et al., SOSP
2023), section 4; automatic prefix caching in vLLM; the chain of parents is the path in
SGLang's radix tree (Zheng et al., 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from nanobatch.utils.checks import check_int


class OutOfBlocks(Exception):  # noqa: N818 - a condition the scheduler handles, not an error
    """Fewer blocks are free than were asked for. Nothing was changed."""


class BlockAllocator:
    """Hands out blocks by id, counts their holders, finds them again by content.

    Args:
        num_blocks: blocks in the pool; ids are 0 .. num_blocks - 1.
        block_size: tokens in a block.
        enable_prefix_caching: without it, match_prefix finds nothing.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        check_int("num_blocks", num_blocks, 1)
        check_int("block_size", block_size, 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

        self._ref_counts = [0] * num_blocks
        self._num_touched = 0  # blocks from here on were never used
        self._freed: OrderedDict[int, None] = OrderedDict()  # least recently freed first

        # The prefix cache: full computed blocks by their contents.
        self._holders: dict[Hashable, dict[int, None]] = {}  # key -> blocks, in order
        self._chains: dict[Hashable, int] = {}  # key -> its chain number
        self._keys: dict[int, Hashable] = {}  # block -> key
        self._next_chain = 0
        self.key_changed: Callable[[Hashable], object] = lambda key: None  # it came or went

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds, whether cached or not."""
        return self.num_blocks - self._num_touched + len(self._freed)

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold the block."""
        check_int("block_id", block_id, 0, self.num_blocks - 1)
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is in the prefix cache."""
        check_int("block_id", block_id, 0, self.num_blocks - 1)
        return block_id in self._keys

    def allocate(self, n: int) -> list[int]:
        """Take n free blocks. Each has ref count 1 and is no longer cached.

        Raises:
            OutOfBlocks: fewer than n are free; nothing was changed.
        """
        check_int("n", n, 0)
        if n > self.num_free_blocks:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free_blocks} free")
        return [self._take_free_block() for _ in range(n)]

    def _take_free_block(self) -> int:
        if self._num_touched < self.num_blocks:
            block_id = self._num_touched
            self._num_touched += 1
        else:
            block_id, _ = self._freed.popitem(last=False)
            self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        """Drop a block from the prefix cache, before it gets new contents."""
        key = self._keys.pop(block_id, None)
        if key is None:
            return
        del self._holders[key][block_id]
        if not self._holders[key]:
            del self._holders[key], self._chains[key]
            self.key_changed(key)

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back a table or its tail, head first. Blocks in no other table become free.

        The tail is freed first, so the end of a cached prefix is evicted before its start: a
        start without its end is still a prefix, an end without its start is not.

        Raises:
            ValueError: a block is not held by anyone, or named twice; nothing was changed.
        """
        self._check_distinct("free", block_ids)
        for block_id in block_ids:
            if self.ref_count(block_id) == 0:
                raise ValueError(
                    f"block {block_id} is free already; only held blocks can be freed"
                )
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._freed[block_id] = None

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that match_prefix found: one more table contains them.

        Raises:
            ValueError: a block is neither held nor cached, or named twice; nothing changed.
        """
        self._check_distinct("acquire", block_ids)
        for block_id in block_ids:
            if self.ref_count(block_id) == 0 and block_id not in self._keys:
                raise ValueError(f"block {block_id} is free and holds nothing cached")
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._freed[block_id]
            self._ref_counts[block_id] += 1

    def _check_distinct(self, verb: str, block_ids: Sequence[int]) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"block_ids to {verb} name a block twice: {list(block_ids)}")

    def match_prefix(self, token_ids: Sequence[int], salt: str | None = None) -> list[int]:
        """Find the blocks that hold the longest cached prefix of token_ids, in order.

        They may be free: `acquire` them before anything else is allocated. The last token is
        never covered, since its logits have to be computed (invariant 5). Only blocks that were
        entered with the same salt are found; None and "" are two different salts.
        """
        return [next(iter(self._holders[k])) for k in self.match_keys(token_ids, salt, ())[:-1]]

    def match_keys(self, token_ids: Sequence[int], salt: str | None, known: Sequence) -> list:
        """The keys of that prefix, the known ones first; last, the missing key or None."""
        keys = list(known)
        chain: Hashable = self._chains[keys[-1]] if keys else ("salt", salt)
        first, end = len(keys) * self.block_size, len(token_ids) - self.block_size
        for start in range(first, end if self.enable_prefix_caching else 0, self.block_size):
            keys.append((chain, tuple(token_ids[start : start + self.block_size])))
            if keys[-1] not in self._holders:
                return keys
            chain = self._chains[keys[-1]]
        return [*keys, None]

    def cache_blocks(
        self,
        token_ids: Sequence[int],
        block_table: Sequence[int],
        num_computed: int,
        salt: str | None = None,
    ) -> None:
        """Make the full and computed blocks of a table findable.

        Args:
            token_ids: the request's tokens.
            block_table: its blocks, in order, which it holds.
            num_computed: how many of the tokens have their keys and values in these blocks.
            salt: as in match_prefix.

        Raises:
            ValueError: num_computed is more than the tokens or the table's slots.
        """
        check_int("num_computed", num_computed, 0, len(token_ids))
        num_full = num_computed // self.block_size
        if num_full > len(block_table):
            raise ValueError(
                f"num_computed is {num_computed}; the table holds {len(block_table)} blocks"
            )
        if not self.enable_prefix_caching:
            return
        # Blocks cached by an earlier call have a key already: skip them.
        first_new = num_full
        while first_new > 0 and block_table[first_new - 1] not in self._keys:
            first_new -= 1
        chain: Hashable = ("salt", salt)
        if first_new > 0:
            chain = self._chains[self._keys[block_table[first_new - 1]]]
        for i in range(first_new, num_full):
            tokens = tuple(token_ids[i * self.block_size : (i + 1) * self.block_size])
            chain = self._cache_block(block_table[i], (chain, tokens))

    def _cache_block(self, block_id: int, key: Hashable) -> int:
        """Enter one block under its key; return the key's chain number."""
        if key not in self._holders:
            self._holders[key] = {}
            self._chains[key] = self._next_chain
            self._next_chain += 1
            self.key_changed(key)
        self._holders[key][block_id] = None
        self._keys[block_id] = key
        return self._chains[key]

    def check_invariants(self) -> None:
        """Raise AssertionError with what is wrong, if anything is. O(num_blocks)."""
        touched, freed = self._num_touched, self._freed
        for block_id, count in enumerate(self._ref_counts):
            is_free = block_id >= touched or block_id in freed
            assert count >= 0, f"block {block_id} has ref count {count}"
            assert is_free == (count == 0), (
                f"block {block_id} has ref count {count} and is {'' if is_free else 'not '}free"
            )
        in_use = sum(count > 0 for count in self._ref_counts)
        assert in_use + self.num_free_blocks == self.num_blocks, (
            f"{in_use} in use + {self.num_free_blocks} free != {self.num_blocks}"
        )
        held = {b: key for key, blocks in self._holders.items() for b in blocks}
        assert held == self._keys, "blocks by key and keys by block do not match"
        assert all(self._holders.values()), "a key has no block"
        assert self._holders.keys() == self._chains.keys(), "a key has no chain, or no block"
        assert len(set(self._chains.values())) == len(self._chains), "two keys, one chain"
        for block_id, key in self._keys.items():
            assert block_id < touched, f"block {block_id} is cached but was never used"
            assert len(key[1]) == self.block_size, f"block {block_id} is cached but not full"
