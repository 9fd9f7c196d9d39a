"""Parts of error messages."""


def first_ten(items: list[str], separator: str = ', ') -> str:
    """Return the first ten items joined, and the number of the others."""
    text = separator.join(items[:10])
    if len(items) > 10:
        text += f' and {len(items) - 10:,} more'
    return text
