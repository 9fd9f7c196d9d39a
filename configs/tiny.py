"""A tiny T5 1.1 that learns span corruption on the running Python's own documentation.

    python main.py --config=configs/tiny.py

Two cores, two to six minutes. Mirrors no published run: it shows within a cup of tea that everything
works, on real English text that every machine with Python has.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.update(
        vocab_size=4224,  # 4,000 pieces + 100 sentinels, rounded up to a multiple of 128
        emb_dim=128,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        head_dim=32,
        mlp_dim=256,
    )
    config.data.num_pieces = 4000
    config.data.lengths.update(inputs=128, targets=29)
    config.data.validation_fraction = 0.05
    config.learning_rate.update(base_learning_rate=0.1 * 50**0.5, factors=FACTORS, warmup_steps=50)
    config.train.update(steps=1200, batch_size=16)
    config.eval.every_steps = 400
    config.save.every_steps = 400
    config.log.every_steps = 20
    return config


FACTORS = 'constant * linear_warmup * rsqrt_decay'  # 0.1 * min(t / 50, sqrt(50 / t))
