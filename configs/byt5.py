"""ByT5 as released: `--config=configs/byt5.py:SIZE` with small, base, large, xl or xxl.

    python main.py --config=configs/byt5.py:base

Reproduces: the pretraining of Xue et al. 2022 on bytes. Noise spans have 20 bytes, there are three
encoder layers per decoder layer, and the highest bytes are the sentinels. To fine-tune, use dropout
0.1 and the same divisor of the loss; tasks/mt5.py has the tasks and their lengths.
Data: as in mt5.py, under the name byt5_mc4.
T5X: t5x/examples/t5/byt5/SIZE.gin with t5x/configs/runs/pretrain.gin.
Checkpoints: gs://t5-data/pretrained_models/t5x/byt5_SIZE/checkpoint_1000000.
Hardware and time: a run takes a pod of TPUs; tests check names, shapes and number of parameters.
Number to expect: T5X publishes no loss.
"""

from configs import base
from messages import Refused

SIZES = {
    'small': dict(emb_dim=1472, num_heads=6, mlp_dim=3584),
    'base': dict(emb_dim=1536, num_heads=12, mlp_dim=3968),
    'large': dict(emb_dim=1536, num_heads=16, mlp_dim=3840),
    'xl': dict(emb_dim=2560, num_heads=32, mlp_dim=6720),
    'xxl': dict(emb_dim=4672, num_heads=64, mlp_dim=12352),
}
DECODER_LAYERS = {
    'small': 4,
    'base': 6,
    'large': 12,
    'xl': 12,
    'xxl': 12,
}


def get_config(size: str = 'base'):
    if size not in SIZES:
        raise Refused(f'configs/byt5.py:{size}: use one of {", ".join(SIZES)}')
    config = base.get_config()
    config.model.update(SIZES[size])
    config.model.dtype = 'bfloat16'
    config.model.vocab_size = 384
    config.model.num_encoder_layers = 3 * DECODER_LAYERS[size]
    config.model.num_decoder_layers = DECODER_LAYERS[size]
    config.data.task = 'byt5_mc4'
    config.data.vocabulary = 'bytes'
    config.data.extra_ids = 0
    config.data.mean_noise_span_length = 20.0
    config.data.lengths.inputs = 1024
    config.data.lengths.targets = 189
    config.train.steps = 1_000_000
    config.train.batch_size = 1024
    # Batch size times target length: 1024 * 189.
    config.loss.loss_normalizing_factor = '193536'
    return config
