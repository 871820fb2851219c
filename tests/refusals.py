"""Bad input is refused with a sentence: the tests hold the exception and what it names, not the wording."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Row = tuple[Callable[[], object], type[BaseException], str]


def assert_refused(rows: Iterable[Row]) -> None:
    """Make every call; each must raise its exception with its fragment, the name or value at fault, in one message.

    Args:
        rows: (call, exception, fragment of at most three words).
    """
    wrong = []
    for number, (call, exception, fragment) in enumerate(rows):
        try:
            outcome = call()
        except exception as error:
            if fragment not in str(error):
                wrong.append(f"row {number}: {fragment!r} is not in {error!r}")
        except Exception as error:
            wrong.append(f"row {number}: expected {exception.__name__} with {fragment!r}, got {error!r}")
        else:
            wrong.append(f"row {number}: expected {exception.__name__} with {fragment!r}, got the answer {outcome!r}")
    assert not wrong, "\n".join(wrong)
