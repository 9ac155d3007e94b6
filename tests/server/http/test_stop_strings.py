"""Nothing of a stop string is ever let out, and nothing else is lost, however the text is cut."""

from hypothesis import given
from hypothesis import strategies as st

from moed.server.stop_strings import StopStrings


def run(strings: tuple[str, ...], pieces: list[str], include: bool) -> tuple[str, str | None]:
    stop = StopStrings(strings, include)
    sent = ""
    for piece in pieces:
        released, hit = stop.add(piece)
        sent += released
        if hit is not None:
            return sent, hit
    return sent + stop.flush(), None


def reference(strings: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    """Look at the whole text, one longer prefix at a time."""
    for end in range(1, len(text) + 1):
        for string in strings:
            if text[:end].endswith(string):
                return text[: end if include else end - len(string)], string
    return text, None


letters = st.text(alphabet="ab", min_size=0, max_size=12)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4)


@given(stops, st.lists(letters, max_size=8), st.booleans())
def test_any_cut_of_the_text_gives_what_the_whole_text_gives(
    strings: list[str], pieces: list[str], include: bool
) -> None:
    expected = reference(tuple(strings), "".join(pieces), include)
    assert run(tuple(strings), pieces, include) == expected


def test_beginning_of_a_stop_string_is_held_back_and_let_go_when_it_is_not_one() -> None:
    stop = StopStrings(("END",), include_in_output=False)
    assert stop.add("the E") == ("the ", None)
    assert stop.add("N") == ("", None)
    assert stop.add("T") == ("ENT", None)
    assert stop.add(" EEN") == (" E", None)
    assert stop.add("D and more") == ("", "END")


def test_only_what_can_still_match_is_held() -> None:
    stop = StopStrings(("abab",), include_in_output=False)
    # Of "abaab" only "ab" can begin "abab".
    assert stop.add("abaab") == ("aba", None)
    assert stop.flush() == "ab"


def test_skipped_text_does_not_count() -> None:
    stop = StopStrings(("stop",), include_in_output=False)
    assert stop.skip("a stop") == "a stop"
    assert stop.add("op") == ("op", None)
    assert stop.add("stop") == ("", "stop")
