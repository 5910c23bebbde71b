"""Which page of the cache holds which tokens' keys and values: the bookkeeping alone, without a tensor.

A request holds a list of pages; the tokens at `page_size * i` and after are in its page number i. A full page never
changes, so requests that begin alike share it. What a page holds is named by the page before it and its own tokens (a
number for each such pair, so that no two contents are ever taken for each other). A page that nobody holds keeps its
content until it is needed for another: those unused for longest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = 0  # the content before a first page


class Pages:
    """`count` pages of `size` tokens each."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._holders = [0] * count
        self._free = OrderedDict.fromkeys(range(count))  # what nobody holds, unused for longest first
        self._content: list[tuple[int, tuple[int, ...]] | None] = [None] * count
        self._named: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # content: its number, and its page
        self._next = ROOT + 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def needed(self, tokens: int) -> int:
        """How many pages so many tokens fill."""
        return (tokens + self.size - 1) // self.size

    def take(self) -> int:
        """A page for new content."""
        page, _ = self._free.popitem(last=False)
        content, self._content[page] = self._content[page], None
        if content is not None:
            del self._named[content]
        self._holders[page] = 1
        return page

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The pages that hold the beginning of these tokens, and the number of the last one's content. At least one
        token is left out: whoever computes it learns what follows.
        """
        pages, parent = [], ROOT
        for start in range(0, len(tokens) - self.size, self.size):
            found = self._named.get((parent, tuple(tokens[start : start + self.size])))
            if found is None:
                break
            parent, page = found
            pages.append(page)
        return pages, parent

    def unheld(self, pages: Iterable[int]) -> int:
        """How many of them nobody holds: to share those takes them from the free ones."""
        return sum(not self._holders[page] for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._free.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """The last ones are forgotten first: without those before them they are of no use."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None

    def name(self, page: int, parent: int, tokens: Sequence[int]) -> int:
        """Tell what a full page holds, and get the number of that. Another page may hold the same already: then that
        one stays the known one.
        """
        content = (parent, tuple(tokens))
        if content in self._named:
            return self._named[content][0]
        self._named[content] = self._next, page
        self._content[page] = content
        self._next += 1
        return self._next - 1
