"""Metrics of T5, mT5 and ByT5: texts or numbers in, {name: number} out. Imports no jax.

A metric is a function (targets, predictions) or (targets, scores): the names of its parameters say
which of the two it takes. Bind further settings with functools.partial. Values are Python numbers,
in percent unless stated otherwise. There is at least one example, and an output for each target (`paired`).
Input that would give a wrong number raises an error; other wrong input raises Python's own. scikit-learn
and SciPy are imported where they are used: each takes a second. Source:
t5/evaluation/metrics.py and qa_utils.py; other sources are named where they are used.
"""

import functools
import itertools
import math
import operator
import re
import string
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics import BLEU

from messages import Refused

Values = dict[str, float]
Metric = Callable[..., Mapping[str, float]]
References = str | Sequence[str]  # right answers: one, or several

ENGLISH_ARTICLES = r'\b(a|an|the)\b'
# MLQA's rules. The Arabic article is a prefix; as in MLQA, its letters are removed everywhere.
ARTICLES = {
    'ar': 'ال',
    'de': r'\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b',
    'en': ENGLISH_ARTICLES,
    'es': r'\b(un|una|unos|unas|el|la|los|las)\b',
    'hi': None,
    'vi': r'\b(của|là|cái|chiếc|những)\b',
    'zh': None,
}


# Translation and summarization.


def bleu(
    targets: Sequence[str] | Sequence[Sequence[str]],
    predictions: Sequence[str],
    tokenizer: str = 'intl',
) -> Values:
    """Return {'bleu'} of sacrebleu over the corpus, with its defaults: smoothing 'exp', case kept.

    `targets`: a text for each prediction; or, with several references, lists of texts, each list a
    reference for all predictions. `tokenizer`: sacrebleu's; T5 uses 'intl', most papers '13a'. Use 'zh'
    for Chinese and 'ja-mecab' for Japanese; 'char' makes each character a word.
    """
    references: list = [targets]
    if len(targets) and isinstance(targets[0], list | tuple):
        references = list(targets)
    for reference in references:
        paired(reference, predictions)
    return {'bleu': BLEU(tokenize=tokenizer).corpus_score(predictions, references).score}


def bleu_of_references(
    targets: Sequence[References], predictions: Sequence[str], tokenizer: str = 'intl'
) -> Values:
    """Return `bleu` of predictions with any number of references each."""
    references = reference_lists(targets)
    return bleu(list(itertools.zip_longest(*references)), predictions, tokenizer)


def rouge(
    targets: Sequence[References],
    predictions: Sequence[str],
    score_keys: Sequence[str] = ('rouge1', 'rouge2', 'rougeLsum'),
    tokenizer: str = '',
) -> Values:
    """Return the mean F1 of each score: 'rouge1' to 'rouge9', 'rougeL', 'rougeLsum'.

    Tokens are not stemmed. They are runs of a-z and 0-9, as in T5, so a text without them scores 0;
    with a `tokenizer`, see `bleu`, they are sacrebleu's, in lower case. A sentence ends at a newline
    and at ' . '. Differs from T5: the mean (T5's `rouge_mean`), not the median of a bootstrap. A target
    may be a list of references: the F1 of the best one counts, as in rouge_score's `score_multi`.
    Source: Lin 2004; rouge_score 0.1.2.
    """
    tokenize = BLEU(tokenize=tokenizer).tokenizer if tokenizer else None

    def sentences_of(text: str) -> list[list[str]]:
        lines = text.lower().replace(' . ', ' .\n').split('\n')
        if tokenize is None:
            return [re.findall('[a-z0-9]+', line) for line in lines]
        return [tokenize(line).split() for line in lines]

    examples = []
    for texts, prediction in paired(reference_lists(targets), predictions):
        examples.append((list(map(sentences_of, texts)), sentences_of(prediction)))
    values = {}
    for key in score_keys:
        f1 = []
        for references, prediction in examples:
            f1.append(max(rouge_f1(key, target, prediction) for target in references))
        values[key] = mean_percent(f1)
    return values


def rouge_f1(key: str, target: list[list[str]], prediction: list[list[str]]) -> float:
    """Return a ROUGE score, from 0 to 1, of the sentences of a target and a prediction."""
    if key == 'rougeLsum':
        return rouge_l_sum(target, prediction)
    # N-grams and the longest common subsequence may cross the ends of sentences.
    target_tokens = list(itertools.chain(*target))
    prediction_tokens = list(itertools.chain(*prediction))
    if key == 'rougeL':
        length = common_lengths(target_tokens, prediction_tokens)[-1, -1]
        return f_measure(length, len(target_tokens), len(prediction_tokens))
    n = int(key.removeprefix('rouge'))
    return overlap_f1(ngrams(target_tokens, n), ngrams(prediction_tokens, n))


def ngrams(tokens: list[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*[tokens[i:] for i in range(n)], strict=False))


def rouge_l_sum(target: list[list[str]], prediction: list[list[str]]) -> float:
    """Return the F1 of the summary-level longest common subsequence (Lin 2004 §3.2).

    A token of a target's sentence is a match if it is in the longest common subsequence with any
    sentence of the prediction; a token of the prediction is matched at most once.
    """
    matches = []
    for sentence in target:
        positions = set()
        for other in prediction:
            positions |= common_positions(sentence, other)
        matches += [sentence[i] for i in positions]
    prediction_tokens = list(itertools.chain(*prediction))
    num_common = count_common(matches, prediction_tokens)
    return f_measure(num_common, sum(map(len, target)), len(prediction_tokens))


def common_positions(target: list[str], prediction: list[str]) -> set[int]:
    """Return the positions in `target` of a longest common subsequence.

    If there are several, it is the one of rouge_score, because the union over sentences depends on it.
    """
    lengths = common_lengths(target, prediction)
    positions = set()
    i = len(target)
    j = len(prediction)
    while i and j:
        if target[i - 1] == prediction[j - 1]:
            i -= 1
            j -= 1
            positions.add(i)
        elif lengths[i, j - 1] > lengths[i - 1, j]:
            j -= 1
        else:
            i -= 1
    return positions


def common_lengths(target: list[str], prediction: list[str]) -> np.ndarray:
    """Return the lengths of the longest common subsequences of all prefixes, int.

    [i, j] belongs to the first i tokens of `target` and the first j of `prediction`.
    """
    is_equal = np.array(target, object)[:, None] == np.array(prediction, object)[None]
    lengths = np.zeros((len(target) + 1, len(prediction) + 1), int)
    for i, is_equal_to_token in enumerate(is_equal):
        extended = lengths[i, :-1] + is_equal_to_token
        lengths[i + 1, 1:] = np.maximum.accumulate(np.maximum(extended, lengths[i, 1:]))
    return lengths


# Question answering.


def squad(targets: Sequence[References], predictions: Sequence[str]) -> Values:
    """Return {'em', 'f1'}: exact match and F1 of words, the best over the answers of a question.

    `targets`: the answers of each question. Without a common word F1 is 0, so an empty prediction of an
    empty answer has 'em' 100 and 'f1' 0.
    """
    return answer_scores(targets, predictions, normalize_squad)


def squad_v2(targets: Sequence[References], predictions: Sequence[str]) -> Values:
    """Return {'em', 'f1'} of SQuAD 2.0, where some questions have no answer.

    `targets`: the answers of each question, [''] for one without. For that, an empty prediction is right
    and any other wrong. With questions of both kinds, 'em_with_answer', 'f1_with_answer' and
    'em_without_answer' cover one kind each. Source: SQuAD's evaluate-v2.0.py, where these are
    'exact', 'f1', 'HasAns_exact', 'HasAns_f1' and 'NoAns_exact'.
    """
    exact_matches = []
    f1 = []
    for answers, prediction in paired(reference_lists(targets), predictions):
        words = normalize_squad(prediction).split()
        words_of_answers = [normalize_squad(answer).split() for answer in answers]
        # An answer that has no words left, such as 'the', counts only if all answers are like this.
        words_of_answers = list(filter(None, words_of_answers)) or [[]]
        is_exact = words in words_of_answers
        overlaps = [overlap_f1(answer_words, words) for answer_words in words_of_answers]
        exact_matches.append(is_exact)
        f1.append(max(float(is_exact), *overlaps))
    values = {'em': mean_percent(exact_matches), 'f1': mean_percent(f1)}
    has_answer = np.array(list(map(any, reference_lists(targets))))
    if has_answer.any() and not has_answer.all():
        values['em_with_answer'] = mean_percent(np.array(exact_matches)[has_answer])
        values['f1_with_answer'] = mean_percent(np.array(f1)[has_answer])
        values['em_without_answer'] = mean_percent(np.array(exact_matches)[~has_answer])
    return values


def trivia_qa(targets: Sequence[References], predictions: Sequence[str]) -> Values:
    """Return {'em', 'f1'} as `squad`, with TriviaQA's normalization: punctuation becomes a space."""
    return answer_scores(targets, predictions, normalize_trivia_qa)


def mlqa(targets: Sequence[References], predictions: Sequence[str], lang: str) -> Values:
    """Return {'em', 'f1'} as `squad`, with the punctuation, articles and words of a language.

    Source: multilingual_t5/evaluation/metrics.py; Lewis et al. 2019 (MLQA).
    """
    return answer_scores(targets, predictions, lambda text: normalize_mlqa(text, lang))


def answer_scores(
    targets: Sequence[Sequence[str]],
    predictions: Sequence[str],
    normalize: Callable[[str], str],
) -> Values:
    """Return {'em', 'f1'} of normalized texts, the best over the answers of each question."""
    exact_matches = []
    f1 = []
    for answers, prediction in paired(reference_lists(targets), predictions):
        prediction = normalize(prediction)
        answers = [normalize(answer) for answer in answers]
        exact_matches.append(prediction in answers)
        f1.append(max(overlap_f1(answer.split(), prediction.split()) for answer in answers))
    return {'em': mean_percent(exact_matches), 'f1': mean_percent(f1)}


def normalize_squad(text: str) -> str:
    """Return a text in lower case without ASCII punctuation and articles, with single spaces."""
    text = ''.join(character for character in text.lower() if character not in string.punctuation)
    return ' '.join(re.sub(ENGLISH_ARTICLES, ' ', text).split())


def normalize_trivia_qa(text: str) -> str:
    """Return a text in lower case without articles, with single spaces; punctuation becomes a space."""
    text = re.sub(f'[{re.escape(string.punctuation)}‘’´]', ' ', text.lower())
    return ' '.join(re.sub(ENGLISH_ARTICLES, ' ', text).split())


def normalize_mlqa(text: str, lang: str) -> str:
    """Return a text in lower case without punctuation and the articles of `lang`, with single spaces.

    Each Chinese character is a word if `lang` is 'zh'.
    """

    def is_mark(character: str) -> bool:
        return character in string.punctuation or unicodedata.category(character).startswith('P')

    text = ''.join(itertools.filterfalse(is_mark, text.lower()))
    articles = ARTICLES[lang]
    if articles is not None:
        text = re.sub(articles, ' ', text)
    if lang == 'zh':
        text = re.sub('([\u4e00-\u9fa5])', r' \1 ', text)
    return ' '.join(text.split())


def span_squad(targets: Sequence[Mapping], predictions: Sequence[str]) -> Values:
    """Return {'em', 'f1'} of `squad` for predictions 'start: 3 end: 6', end included.

    The numbers count words of the context. `targets`: {'context': text, 'answers': texts}.
    """
    texts = []
    for target, span in paired(targets, predictions):
        words = re.sub(r'\W', ' ', target['context']).split()
        tokens = re.sub(r'\W', ' ', span).split()
        try:
            texts.append(' '.join(words[int(tokens[1]) : int(tokens[3]) + 1]))
        except (IndexError, ValueError):  # an untrained model writes anything
            texts.append('')
    return squad([target['answers'] for target in targets], texts)


def natural_questions(
    targets: Sequence[Sequence[Sequence[str]]],
    predictions: Sequence[Sequence[Sequence[str]]],
    non_null_threshold: int = 2,
) -> Values:
    """Return {'recall', 'golden_answers'} of Natural Questions.

    `targets`: the answers of each annotator, for each question; `predictions`: lists of one such
    group of answers. A question counts if at least `non_null_threshold` annotators gave answers. A
    prediction is correct if it has the same set of answers as one of them. 'golden_answers' is the
    number of questions that count. Source: t5_closed_book_qa/t5_cbqa/metrics.py.
    """
    is_correct = []
    for annotations, [group] in paired(targets, predictions):
        answer_sets = [set(map(normalize_squad, answers)) for answers in annotations if answers]
        if len(answer_sets) >= non_null_threshold:
            is_correct.append(set(map(normalize_squad, group)) in answer_sets)
    recall = mean_percent(is_correct) if is_correct else math.nan
    return {'recall': recall, 'golden_answers': len(is_correct)}


# Sequences.


def cer(targets: Sequence[str], predictions: Sequence[str]) -> Values:
    """Return {'cer'}, the character error rate: edits over characters of the targets, from 0.

    Both are sums over the corpus. Source: byt5/metrics.py.
    """
    num_edits = sum(itertools.starmap(Levenshtein.distance, paired(targets, predictions)))
    return {'cer': num_edits / sum(map(len, targets))}


def word_error(targets: Sequence[References], predictions: Sequence[str]) -> Values:
    """Return {'word_error'}: the percentage of predictions that match none of their references.

    `targets`: the references of each prediction, such as all pronunciations of a word.
    """
    pairs = paired(reference_lists(targets), predictions)
    return {'word_error': mean_percent([prediction not in target for target, prediction in pairs])}


def phoneme_error(targets: Sequence[References], predictions: Sequence[str]) -> Values:
    """Return {'phoneme_error'}: edits in percent of the phonemes, both summed over the corpus.

    `targets`: the references of each prediction. The nearest one counts; in a tie, the first.
    Phonemes are separated by spaces.
    """
    num_edits = 0
    num_phonemes = 0
    for references, prediction in paired(reference_lists(targets), predictions):
        phonemes = [reference.split() for reference in references]
        distances = [Levenshtein.distance(x, prediction.split()) for x in phonemes]
        nearest = int(np.argmin(distances))
        num_edits += distances[nearest]
        num_phonemes += len(phonemes[nearest])
    return {'phoneme_error': 100 * num_edits / num_phonemes}


def span_f1(targets: Sequence[str], predictions: Sequence[str]) -> Values:
    """Return {'span_f1'}, from 0 to 1: F1 over all entities of 'PER: Ada Brook $$ LOC: Oslo'.

    Source: multilingual_t5/evaluation/metrics.py (WikiANN).
    """
    num_common = 0
    num_targets = 0
    num_predictions = 0
    for target, prediction in paired(targets, predictions):
        target_spans = tagged_spans(target)
        prediction_spans = tagged_spans(prediction)
        num_common += count_common(target_spans, prediction_spans)
        num_targets += len(target_spans)
        num_predictions += len(prediction_spans)
    return {'span_f1': f_measure(num_common, num_targets, num_predictions)}


def tagged_spans(text: str) -> list[tuple[str, str]]:
    """Return the (tag, entity) of each part with exactly one colon."""
    spans = []
    for part in text.split(' $$ '):
        tag, *entities = part.split(':')
        if len(entities) == 1:
            spans.append((tag.strip(), entities[0].strip()))
    return spans


# Classification.


def accuracy(targets: Sequence[object], predictions: Sequence[object]) -> Values:
    """Return {'accuracy'} of class ids or of texts."""
    is_equal = []
    for target, prediction in paired(targets, predictions):
        is_like = isinstance(target, str) == isinstance(prediction, str)
        assert is_like, f'{target!r:.40} and {prediction!r:.40} are never equal'
        is_equal.append(target == prediction)
    return {'accuracy': mean_percent(is_equal)}


def accuracy_of_references(targets: Sequence[References], predictions: Sequence[str]) -> Values:
    """Return the percentage of predictions that match one of their references."""
    pairs = paired(reference_lists(targets), predictions)
    return {'accuracy': mean_percent([prediction in target for target, prediction in pairs])}


def f1_score_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> Values:
    """Return {'f1'} of class 1. A prediction that is neither 0 nor 1 counts as the wrong class."""
    from sklearn.metrics import f1_score

    classes, labels = np.transpose(paired(targets, predictions))
    if not np.isin(classes, (0, 1)).all():
        raise Refused('a target of F1 is neither 0 nor 1: leave out such examples')
    labels = np.where(np.isin(labels, (0, 1)), labels, 1 - classes)
    return {'f1': 100 * float(f1_score(classes, labels, zero_division=0))}


def multirc_f1_over_all_answers(
    targets: Sequence[Mapping], predictions: Sequence[Mapping]
) -> Values:
    """Return {'f1'} of `f1_score_with_invalid` over the field 'value' of each answer (MultiRC)."""
    values_of = operator.itemgetter('value')
    return f1_score_with_invalid(list(map(values_of, targets)), list(map(values_of, predictions)))


def mean_multiclass_f1(num_classes: int) -> Metric:
    """Return a metric {'mean_3class_f1'}: the mean over classes 0, 1, ... of the F1 of each.

    Any other prediction, such as -1, has no class. A class that does not occur has F1 0.
    """

    def metric(targets: Sequence[int], predictions: Sequence[int]) -> Values:
        from sklearn.metrics import f1_score

        paired(targets, predictions)
        classes = range(num_classes)
        f1 = f1_score(targets, predictions, labels=classes, average='macro', zero_division=0)
        return {f'mean_{num_classes}class_f1': 100 * float(f1)}

    return metric


def matthews_corrcoef(targets: Sequence[object], predictions: Sequence[object]) -> Values:
    """Return {'matthews_corrcoef'}, 100 times Gorodkin's R_K, over all labels that occur.

    -1, for a text that names no class, is a class of its own. 0 if either side has only one label.
    """
    from sklearn import metrics

    paired(targets, predictions)
    return {'matthews_corrcoef': 100 * float(metrics.matthews_corrcoef(targets, predictions))}


# Regression.


def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> Values:
    """Return {'pearson_corrcoef'}, nan if either side is constant."""
    return {'pearson_corrcoef': correlation_percent(targets, predictions)}


def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> Values:
    """Return {'spearman_corrcoef'}, nan if either side is constant."""
    from scipy.stats import rankdata

    ranks = correlation_percent(rankdata(targets), rankdata(predictions))
    return {'spearman_corrcoef': ranks}


def correlation_percent(targets: Sequence[float], predictions: Sequence[float]) -> float:
    """Return 100 times Pearson's correlation."""
    x, y = np.transpose(paired(targets, predictions))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return 100 * float(np.corrcoef(x, y)[0, 1])


# Groups of examples.


def all_match(targets: Sequence[object], predictions: Sequence[object]) -> Values:
    """Return {'exact_match'}: 100 if each prediction equals its target, else 0."""
    return {'exact_match': 100.0 * (accuracy(targets, predictions)['accuracy'] == 100)}


def mean_group_metric(metric_fn: Metric) -> Metric:
    """Return a metric: the mean over groups of `metric_fn` of each group.

    It takes targets {'value', 'group'} and predictions {'value'}; examples with an equal 'group' are
    a group. Part of a split gives other values than the full split.
    """

    def metric(targets: Sequence[Mapping], predictions: Sequence[Mapping]) -> Values:
        values: dict[str, list[float]] = {}
        for group in grouped(targets, predictions):
            for name, value in metric_fn(*zip(*group, strict=True)).items():
                values.setdefault(name, []).append(value)
        return {name: float(np.mean(group_values)) for name, group_values in values.items()}

    return metric


def deduplicate_metric(metric_fn: Metric) -> Metric:
    """Return a metric: `metric_fn` of the first example of each group (ReCoRD).

    It takes targets {'value', 'group'} and predictions {'value'}.
    """

    def metric(targets: Sequence[Mapping], predictions: Sequence[Mapping]) -> Values:
        firsts = [group[0] for group in grouped(targets, predictions)]
        return dict(metric_fn(*zip(*firsts, strict=True)))

    return metric


def grouped(targets: Sequence[Mapping], predictions: Sequence[Mapping]) -> Iterable[list[tuple]]:
    """Return the (target, prediction) pairs of each group, in the order of the groups' first examples."""
    groups: dict[Hashable, list[tuple]] = defaultdict(list)
    for target, prediction in paired(targets, predictions):
        groups[target['group']].append((target['value'], prediction['value']))
    return groups.values()


# Rank classification: the choice with the best score is the prediction.


class Choice(NamedTuple):
    """One of the choices of an example, and its score."""

    example: int
    choice: int
    is_correct: bool
    weight: float  # equal for all choices of an example
    score: float


def rank_classification(
    targets: Sequence[tuple[Sequence[int], bool, float, int]],
    scores: Sequence[float],
    num_classes: int | None = None,
    normalize_by_target_length: bool = False,
) -> Values:
    """Return {'accuracy'} and other metrics of choices ranked by their log-likelihoods.

    `targets`: (idx, is_correct, weight, number of target tokens) of each choice, in any order; idx is
    (example, choice). `scores`: nats. With `num_classes`, all examples have that many choices. Unless an
    example has several correct ones, more than 2 also give 'mean_3class_f1', and 2 give 'f1', 'auc-roc'
    and 'auc-pr' of choice 1, in percent.
    """
    choices = []
    for target, score in paired(targets, scores):
        (example, choice), is_correct, weight, length = target
        if math.isnan(score):
            raise Refused(
                f'the score of choice {choice} of example {example} is nan: check the model'
            )
        if normalize_by_target_length:
            score = score / length
        choices.append(Choice(int(example), int(choice), bool(is_correct), float(weight), score))
    choices.sort()
    for before, after in itertools.pairwise(choices):
        assert before[:2] != after[:2], f'two targets have idx {after[:2]}: number all examples'
    if num_classes is None:
        num_correct = 0.0
        total = 0.0
        for _, group in itertools.groupby(choices, key=operator.attrgetter('example')):
            best = max(group, key=operator.attrgetter('score'))  # the first of equal scores
            num_correct += best.weight * best.is_correct
            total += best.weight
        return {'accuracy': 100 * num_correct / total}
    for example, count in Counter(choice.example for choice in choices).items():
        if count != num_classes:
            raise Refused(f'example {example} has {count} choices, not num_classes={num_classes}')
    return fixed_choice_metrics(choices, num_classes)


def fixed_choice_metrics(choices: list[Choice], num_classes: int) -> Values:
    """Return the metrics of examples that have `num_classes` choices each. Scores are float32."""
    from sklearn import metrics

    scores = np.array([choice.score for choice in choices], np.float32).reshape(-1, num_classes)
    is_correct = np.array([choice.is_correct for choice in choices]).reshape(-1, num_classes)
    weights = np.array([choice.weight for choice in choices])[::num_classes]
    is_best = np.arange(num_classes)[None] == scores.argmax(axis=1)[:, None]
    if (is_correct.sum(axis=1) > 1).any():
        is_right = (is_correct & is_best).any(axis=1)
        return {'accuracy': 100 * float(np.average(is_right, weights=weights))}
    is_right = (is_correct == is_best).all(axis=1)
    values = {'accuracy': 100 * float(np.average(is_right, weights=weights))}
    f1_score = functools.partial(metrics.f1_score, sample_weight=weights, zero_division=0)
    if num_classes > 2:
        f1 = f1_score(is_correct, is_best, average='macro')
        return values | {f'mean_{num_classes}class_f1': 100 * float(f1)}
    values['f1'] = 100 * float(f1_score(is_correct[:, 1], is_best[:, 1]))
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    choice_1 = (is_correct[:, 1], probabilities[:, 1])
    with warnings.catch_warnings(action='ignore'):  # if a class does not occur: nan, or 0
        area = metrics.roc_auc_score(*choice_1, sample_weight=weights)
        precision = metrics.average_precision_score(*choice_1, sample_weight=weights)
    return values | {'auc-roc': 100 * float(area), 'auc-pr': 100 * float(precision)}


# Shared by the metrics.


def overlap_f1(target: Sequence[Hashable], prediction: Sequence[Hashable]) -> float:
    """Return the F1 of two multisets, from 0 to 1."""
    return f_measure(count_common(target, prediction), len(target), len(prediction))


def count_common(target: Sequence[Hashable], prediction: Sequence[Hashable]) -> int:
    """Return the size of the intersection of two multisets."""
    return (Counter(target) & Counter(prediction)).total()


def f_measure(num_common: float, num_targets: float, num_predictions: float) -> float:
    """Return 2PR / (P + R) with P = common / predictions and R = common / targets; 0 if none is common."""
    if not num_common:
        return 0.0
    return 2 * float(num_common) / float(num_targets + num_predictions)


def mean_percent(values: Sequence[float] | np.ndarray) -> float:
    return 100 * float(np.mean(values))


def reference_lists(targets: Sequence[References]) -> list[Sequence[str]]:
    """Return the references of each target; a text is its only reference."""
    return [[target] if isinstance(target, str) else target for target in targets]


def paired(targets: Sequence, outputs: Sequence) -> list[tuple]:
    """Return each target with its output."""
    if len(targets) != len(outputs) or not len(targets):
        raise ValueError(
            f'{len(targets)} targets and {len(outputs)} outputs: a metric needs one output per target, and an example'
        )
    return list(zip(targets, outputs, strict=True))
