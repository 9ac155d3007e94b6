"""Stop strings in a stream of text: nothing of one is ever let out, and nothing else is lost."""


class StopStrings:
    """Watches text as it comes in pieces of any size; the result does not depend on the pieces.

    The match that ends first wins. Text that may be the beginning of a stop string is held back
    until it is known not to be one.
    """

    def __init__(self, strings: tuple[str, ...], include_in_output: bool) -> None:
        """`strings` must not be empty strings."""
        assert all(strings)
        self._strings = strings
        self._include = include_in_output
        self._fallbacks = [_fallbacks(string) for string in strings]
        self._num_matched = [0] * len(strings)
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns what may be sent, and the stop string once one is complete."""
        if not self._strings:
            return text, None
        text = self._held + text
        for position in range(len(self._held), len(text)):
            for index, string in enumerate(self._strings):
                if self._advance(index, text[position]):
                    end = position + 1
                    self._held = ""
                    return text[: end if self._include else end - len(string)], string
        num_held = max(self._num_matched)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def skip(self, text: str) -> str:
        """Take text in which no stop string counts; returns all that may be sent."""
        released = self._held + text
        self._held = ""
        self._num_matched = [0] * len(self._strings)
        return released

    def flush(self) -> str:
        """What was held back, now that nothing more will come."""
        return self.skip("")

    def _advance(self, index: int, character: str) -> bool:
        """One step of Knuth-Morris-Pratt for one stop string; True when it is complete."""
        string, fallbacks = self._strings[index], self._fallbacks[index]
        matched = self._num_matched[index]
        while matched and string[matched] != character:
            matched = fallbacks[matched - 1]
        matched += string[matched] == character
        self._num_matched[index] = matched
        return matched == len(string)


def _fallbacks(string: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(string)
    matched = 0
    for position in range(1, len(string)):
        while matched and string[matched] != string[position]:
            matched = table[matched - 1]
        matched += string[matched] == string[position]
        table[position] = matched
    return table
