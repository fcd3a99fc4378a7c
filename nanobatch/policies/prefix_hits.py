"""How much of each waiting request the prefix cache holds, for policies that read it.

A lookup hashes a prompt's blocks. To look up the whole queue in each step would cost the more
the longer the queue is. So a request watches the keys of its prefix: those that it found, and
the first that is missing. Only who watches a key that came or went is looked up again:

    keys of a prompt     k0   k1   k2   k3
    in the cache         k0   k1                  2 hits; watches k0, k1 and k2
    k2 comes             k0   k1   k2             goes on from k2: 3 hits, watches k3 too
    k1 goes              k0        k2             cut before k1: 1 hit, watches k0 and k1

Always holds: after refresh() each waiting request's num_hit_tokens is what match_prefix finds.
It costs O(waiting) comparisons, and hashes O(what has come or gone) blocks.

Source: the waiting queue of SGLang's longest-prefix-match policy, which looks up everybody, and
so falls back to first come, first served with more than 128 waiting.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from nanobatch.block_allocator import BlockAllocator
from nanobatch.request import Request


class PrefixHits:
    """Keeps num_hit_tokens of waiting requests up to date.

    Args:
        allocator: has the prefix cache; from now on it tells this object about its keys.
    """

    def __init__(self, allocator: BlockAllocator):
        self.allocator = allocator
        allocator.key_changed = self._key_changed
        self._num_tokens: dict[Request, int] = {}  # that may be found; with swapped blocks 0
        self._paths: dict[Request, list[Hashable]] = {}  # keys found; last, the missing one
        self._watching: dict[Hashable, dict[Request, None]] = {}
        self._stale: dict[Request, None] = {}  # to be looked up

    def refresh(self, waiting: Sequence[Request]) -> None:
        """Look up who is new in `waiting`, and whose keys have changed."""
        for request in waiting:
            # A swapped request has no hit: it kept its computed tokens.
            num_tokens = 0 if request.num_computed_tokens > 0 else len(request.token_ids)
            if self._num_tokens.get(request) != num_tokens:
                self._forget(request)
                self._num_tokens[request] = num_tokens
                self._stale[request] = None
        if len(self._num_tokens) > len(waiting):
            for request in self._num_tokens.keys() - set(waiting):
                self._forget(request)
        for request in self._stale:
            self._look_up(request)
        self._stale.clear()

    def _look_up(self, request: Request) -> None:
        """Go on from the keys that are known."""
        known = self._paths.get(request, [])[:-1]
        token_ids = request.token_ids if self._num_tokens[request] > 0 else ()
        path = self.allocator.match_keys(token_ids, request.cache_salt, known)
        for key in path[len(known) :]:
            self._watching.setdefault(key, {})[request] = None
        self._paths[request] = path
        request.num_hit_tokens = (len(path) - 1) * self.allocator.block_size

    def _key_changed(self, key: Hashable) -> None:
        """A key came into the prefix cache or went; what follows it is not found by it now."""
        for request in self._watching.get(key, ()):
            path = self._paths[request]
            while path[-1] != key:
                self._unwatch(path.pop(), request)
            self._stale[request] = None

    def _forget(self, request: Request) -> None:
        self._num_tokens.pop(request, None)
        self._stale.pop(request, None)
        for key in self._paths.pop(request, ()):
            self._unwatch(key, request)

    def _unwatch(self, key: Hashable, request: Request) -> None:
        del self._watching[key][request]
        if not self._watching[key]:
            del self._watching[key]
