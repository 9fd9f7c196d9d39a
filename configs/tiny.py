"""A tiny T5 1.1 that learns span corruption on the documentation of the running Python.

    python main.py --config=configs/tiny.py

Reproduces: no published run. It shows in a few minutes that everything works, on real English text
that every machine with Python has.
T5X: the model has the shape of t5x/examples/t5/t5_1_1/small.gin, with smaller sizes.
Hardware and time: two CPU cores, two to six minutes.
Number to expect: a validation loss at least 0.4 nats per text token below the unigram baseline.
"""

from configs import base


def get_config():
    config = base.get_config()
    # 4,000 pieces and 100 sentinels, rounded up to a multiple of 128.
    config.model.vocab_size = 4224
    config.model.emb_dim = 128
    config.model.num_heads = 4
    config.model.num_encoder_layers = 2
    config.model.num_decoder_layers = 2
    config.model.head_dim = 32
    config.model.mlp_dim = 256
    config.data.num_pieces = 4000
    config.data.lengths.inputs = 128
    config.data.lengths.targets = 29
    config.data.validation_fraction = 0.05
    # The rate at step t is 0.1 * min(t / 50, sqrt(50 / t)).
    config.learning_rate.factors = 'constant * linear_warmup * rsqrt_decay'
    config.learning_rate.base_learning_rate = 0.1 * 50**0.5
    config.learning_rate.warmup_steps = 50
    config.train.steps = 1200
    config.train.batch_size = 16
    config.eval.every_steps = 400
    config.save.every_steps = 400
    config.log.every_steps = 20
    return config
