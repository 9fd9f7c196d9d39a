"""The errors that main.py prints in one line, and parts of messages."""

import contextlib
from collections.abc import Iterator


class Refused(ValueError):
    """A value that a person typed or copied is wrong: a flag, setting, path, line of a file, checkpoint, argument.

    The message is one line: the value, the rule, the remedy. main.py prints it without a traceback, as it does an
    OSError. A mistake in code raises another exception, which keeps its traceback.
    """


class LossNotFinite(FloatingPointError):
    """A step of training gave a loss, a gradient or parameters that are not finite."""


@contextlib.contextmanager
def noting(text: str) -> Iterator[None]:
    """Add a note to an error: what its traceback cannot say, such as a record or a task."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


def first_ten(items: list[str], separator: str = ', ') -> str:
    """Return the first ten items joined, and the number of the others."""
    text = separator.join(items[:10])
    if len(items) > 10:
        text += f' and {len(items) - 10:,} more'
    return text
