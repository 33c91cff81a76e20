"""Stop strings over text that arrives in pieces: nothing behind one, and nothing of one, is given out."""

from collections.abc import Sequence


class StopFilter:
    """Passes text on until a stop string begins.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of ``text`` (and of what was held) that can be no part of a stop string.

        Sets ``stopped`` once a stop string is complete; later text is dropped.
        """
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            given, self._held = self._held[: min(found)], ""
            return given
        keep = self._longest_start()
        split = len(self._held) - keep
        given, self._held = self._held[:split], self._held[split:]
        return given

    def flush(self) -> str:
        """What was held, at the end of the sample."""
        given, self._held = self._held, ""
        return given

    def _longest_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
