"""Direct preference optimization: an objective whose pairs share a row, and their loss.

A pair is two examples with the same inputs: the chosen answer, then the rejected one. Both have the reference's margin:
its log-likelihood of the chosen answer minus the one of the rejected answer. tiny_preferences.py trains with it.

Source: Rafailov et al. 2023 (DPO) equation 7; Azar et al. 2023 (IPO) equation 17; Mitchell 2023 (label smoothing).
"""

import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

import loss
from data import TextToText
from messages import Refused
from tasks import Task

# The loss.


@dataclasses.dataclass(frozen=True)
class Options:
    kind: str = dataclasses.field(
        default='dpo', metadata={'help': 'dpo, ipo, or chosen: the likelihood of the chosen alone'}
    )
    beta: float = dataclasses.field(
        default=0.1, metadata={'help': 'how strongly the reference holds the model'}
    )
    label_smoothing: float = dataclasses.field(
        default=0.0, metadata={'help': 'of dpo: the probability that a pair is the wrong way round'}
    )

    def __post_init__(self):
        if self.kind not in ('dpo', 'ipo', 'chosen'):
            raise Refused(f'loss.options.kind={self.kind!r}: use dpo, ipo or chosen')


def weighted_sums(outputs, batch, weights_bT, divisor, settings):
    """Return the sums of a loss that is a mean over the pairs.

    With AVERAGE_PER_SEQUENCE the divisor is the number of sequences: twice the number of pairs.
    """
    options = settings.options
    segments_bT = batch['decoder_segment_ids']
    nats_bT, _ = loss.cross_entropy(outputs.logits_bTv, batch['decoder_target_tokens'])
    # At each position: the log-likelihoods of its own answer, and of the next one in the row.
    own_bTM = segments_bT[:, :, None] == segments_bT[:, None]
    next_bTM = segments_bT[:, :, None] + 1 == segments_bT[:, None]
    chosen_bT = -jnp.where(own_bTM, nats_bT[:, None], 0).sum(axis=-1)
    rejected_bT = -jnp.where(next_bTM, nats_bT[:, None], 0).sum(axis=-1)
    # A pair is counted where its first answer, the chosen one, begins.
    is_pair_bT = (segments_bT % 2 == 1) & (batch['decoder_positions'] == 0)
    margin_bT = chosen_bT - rejected_bT - batch['decoder_margin']
    if options.kind == 'dpo':
        loss_bT = -(1 - options.label_smoothing) * jax.nn.log_sigmoid(options.beta * margin_bT)
        loss_bT -= options.label_smoothing * jax.nn.log_sigmoid(-options.beta * margin_bT)
    elif options.kind == 'ipo':
        loss_bT = jnp.square(margin_bT - 0.5 / options.beta)
    else:
        loss_bT = -chosen_bT

    def sum_of_pairs(x_bT):
        return 2 * jnp.where(is_pair_bT, x_bT, 0).sum()  # twice: metrics are means over answers

    sums = loss.weighted_sums(outputs, batch, weights_bT, divisor, settings)
    sums['loss'] = sum_of_pairs(loss_bT) / divisor
    sums['preferred'] = sum_of_pairs(chosen_bT > rejected_bT)
    sums['chosen'] = sum_of_pairs(chosen_bT)
    sums['rejected'] = sum_of_pairs(rejected_bT)
    return sums


# The pairs.


class Preferences(TextToText):
    """Makes each record a pair of examples that share a row, each at most half of it."""

    features = ('inputs', 'targets', 'rejected')
    numbers = ('margin',)
    shares_rows = True

    def __init__(self, data_group, vocabulary):
        super().__init__(data_group, vocabulary)
        self.lengths = ConfigDict({name: n // 2 for name, n in data_group.lengths.items()})

    def examples(self, names, records, *key):
        others = [{**record, 'targets': record['rejected']} for record in records]
        chosen = super().examples(names, records)
        rejected = super().examples(names, others)
        pairs = []
        for record, *pair in zip(records, chosen, rejected, strict=True):
            fields = record['fields']
            numbers = {'margin': fields['chosen_score'] - fields['rejected_score']}
            pairs.append(tuple(example._replace(numbers=numbers) for example in pair))
        return pairs


def texts_of(record):
    yield {'inputs': record['prompt'], 'targets': record['chosen'], **record}


TASKS = [Task('preferences', files='scored.jsonl', preprocess_fn=texts_of, objective=Preferences)]
