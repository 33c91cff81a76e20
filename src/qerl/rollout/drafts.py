"""Guesses of what comes next, from what was written before: the longest suffix of a text that occurs in the group.

A group's texts are its prompt, its samples as they grow, and completions of the same prompt from earlier calls. Every
place is filed under the three tokens before it, under the last two, and under the last one. A proposal asks for the
three, then the two, then the one, compares the few latest places it finds backwards, and copies what followed the
longest match. Work is constant a token and a proposal, and so is memory a token, up to a limit. What matched is
compared token by token, so that keys that collide cost time, not sense. What a short match is worth is not decided
here.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# The length beyond which a longer match says nothing more.
MAX_MATCH = 32
# Tokens that places are filed under, those asked first before the others.
_ORDERS = (3, 2, 1)
# Latest places kept of the same tokens.
_PLACES = 8
_TOKEN_BITS = 21


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens, and how many tokens before them matched."""

    token_ids: list[int]
    match: int

    def first(self, count: int) -> "Draft":
        """The draft cut to ``count`` tokens."""
        return Draft(self.token_ids[:count], self.match)


NO_DRAFT = Draft([], 0)


class DraftIndex:
    """Texts of one group, each known by the number that ``add`` returned.

    Args:
        max_keys: places are filed under at most this many distinct keys, at most three a token and some 300 bytes each
            (1 KB where a key is met often); the older half goes when they are full.
    """

    def __init__(self, max_keys: int) -> None:
        self._texts: list[Sequence[int]] = []
        self._filed: list[int] = []
        self._half = max(1, max_keys // 2)
        # key -> latest places (number of the text, position that follows the key), the newer half and the older one.
        self._newer: dict[int, list[tuple[int, int]]] = {}
        self._older: dict[int, list[tuple[int, int]]] = {}

    @property
    def num_keys(self) -> int:
        """Keys in use."""
        return len(self._newer) + len(self._older)

    def add(self, text: Sequence[int], start: int) -> int:
        """Take a text that may grow (it is not copied), its places from ``start`` on; returns its number."""
        self._texts.append(text)
        self._filed.append(max(start, 1))
        number = len(self._texts) - 1
        self.extend(number)
        return number

    def extend(self, number: int) -> None:
        """File the places of what the text has grown by."""
        self._file_from(number, self._filed[number])

    def extend_by_last(self, number: int, count: int) -> None:
        """As ``extend``, but leave out what lies before the last ``count`` tokens."""
        self._file_from(number, max(self._filed[number], len(self._texts[number]) - count))

    def num_unfiled(self, number: int) -> int:
        """Tokens that a text has grown by since it was added or extended."""
        return max(0, len(self._texts[number]) - self._filed[number])

    def limit_keys(self, max_keys: int) -> None:
        """Keep at most ``max_keys`` keys from now on. Where there are too many, the newest of them stay."""
        self._half = max(1, max_keys // 2)
        if len(self._newer) > self._half or len(self._older) > self._half:
            kept = [*self._older.items(), *self._newer.items()][-self._half :]
            self._older, self._newer = dict(kept), {}

    def _file_from(self, number: int, start: int) -> None:
        text = self._texts[number]
        for position in range(start, len(text)):
            for order in _ORDERS:
                if order <= position:
                    self._file(_key(text, position, order), (number, position))
        self._filed[number] = max(start, len(text))

    def propose(self, number: int, count: int) -> Draft:
        """At most ``count`` tokens that may follow text ``number``.

        They follow the longest match; among equals the most frequent next token, then the latest place. A match inside
        the text itself goes on into the draft, so that a repetition is continued for as long as is wanted.
        """
        text = self._texts[number]
        longest, best = 0, []
        for place in self._places(text) if count > 0 else ():
            length = self._match(text, *place)
            if length > longest:
                longest, best = length, [place]
            elif length == longest > 0:
                best.append(place)
        if not best:
            return NO_DRAFT
        following = Counter(self._texts[other][position] for other, position in best)
        most = max(following.values())
        other, position = next(place for place in reversed(best) if following[self._texts[place[0]][place[1]]] == most)
        source = self._texts[other]
        guess = list(source[position : position + count])
        if other == number:
            while len(guess) < count:
                guess.append(guess[len(guess) - (len(text) - position)])
        return Draft(guess, longest)

    def _file(self, key: int, place: tuple[int, int]) -> None:
        places = self._newer.get(key)
        if places is None:
            if len(self._newer) == self._half:
                self._older, self._newer = self._newer, {}
            # Both halves are asked, so what the older one has of this key need not be taken over.
            self._newer[key] = [place]
            return
        places.append(place)
        if len(places) > _PLACES:
            del places[0]

    def _places(self, text: Sequence[int]) -> list[tuple[int, int]]:
        """Latest places of the most last tokens of ``text`` that have any, oldest first."""
        for order in _ORDERS:
            if order <= len(text):
                key = _key(text, len(text), order)
                places = [*self._older.get(key, ()), *self._newer.get(key, ())]
                if places:
                    return places
        return []

    def _match(self, text: Sequence[int], other: int, position: int) -> int:
        """Length of the common suffix of ``text`` and the first ``position`` tokens of text ``other``."""
        source, end = self._texts[other], len(text)
        length = 0
        for length in range(min(position, end, MAX_MATCH)):
            if source[position - 1 - length] != text[end - 1 - length]:
                return length
        return length + 1


def _key(text: Sequence[int], position: int, order: int) -> int:
    """The ``order`` tokens before ``position`` as one number."""
    key = order
    for token in text[position - order : position]:
        key = key << _TOKEN_BITS ^ token
    return key
