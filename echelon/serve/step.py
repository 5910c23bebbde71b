"""What a step computes, as plain data: the same for whatever way a model is computed, and on all its ranks."""

from __future__ import annotations

from typing import NamedTuple

PENDING = -1  # a token that the step before draws: whoever computes this one has it, and nobody else yet


class Part(NamedTuple):
    """What a step computes of one sequence: `tokens` from position `start` on. The sequence has a `row` in the table of
    pages, of which `pages` are new: those from number `first_page` on.
    """

    row: int
    start: int
    tokens: list[int]
    first_page: int
    pages: list[int]
    is_last: bool  # whether the next token is wanted


class Shape(NamedTuple):
    """Of the cache: pages of so many tokens, and rows of the table, which have room for so many pages."""

    pages: int
    page_size: int
    rows: int
    row_pages: int


def pack(parts: list[Part]) -> list[int]:
    """As numbers, to tell other ranks."""
    numbers = [len(parts)]
    for part in parts:
        lengths = len(part.tokens), len(part.pages)
        numbers += [part.row, part.start, part.first_page, part.is_last, *lengths, *part.tokens, *part.pages]
    return numbers


def unpack(numbers: list[int]) -> list[Part]:
    parts, place = [], 1
    for _ in range(numbers[0]):
        row, start, first_page, is_last, tokens, pages = numbers[place : place + 6]
        middle, end = place + 6 + tokens, place + 6 + tokens + pages
        parts.append(Part(row, start, numbers[place + 6 : middle], first_page, numbers[middle:end], bool(is_last)))
        place = end
    return parts
