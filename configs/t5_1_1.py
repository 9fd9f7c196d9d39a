"""T5 1.1 as released: `--config=configs/t5_1_1.py:SIZE` with small, base, large, xl or xxl.

    python main.py --config=configs/t5_1_1.py:base --config.data.vocabulary=FILE --config.data.files=GLOB

Reproduces: the pretraining of the released models: gated gelu, untied embeddings, span corruption only on
C4 with a batch of 2,048 and without dropout. To fine-tune, use dropout 0.1.
T5X: t5x/examples/t5/t5_1_1/SIZE.gin with t5x/configs/runs/pretrain.gin. The released checkpoints
were trained with a loss divided by batch size times target length: keep that to fine-tune them.
Checkpoints: gs://t5-data/pretrained_models/t5x/t5_1_1_SIZE/checkpoint_1000000.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Hardware and time: a run takes a pod of TPUs; tests check names, shapes and number of parameters.
Number to expect: see the shorter run configs/small_c4.py.
"""

from configs import base
from messages import Refused

SIZES = {
    'small': dict(emb_dim=512, num_heads=6, mlp_dim=1024),
    'base': dict(emb_dim=768, num_heads=12, mlp_dim=2048),
    'large': dict(emb_dim=1024, num_heads=16, mlp_dim=2816),
    'xl': dict(emb_dim=2048, num_heads=32, mlp_dim=5120),
    'xxl': dict(emb_dim=4096, num_heads=64, mlp_dim=10240),
}
LAYERS = {
    'small': 8,
    'base': 12,
    'large': 24,
    'xl': 24,
    'xxl': 24,
}


def get_config(size: str = 'base'):
    if size not in SIZES:
        raise Refused(f'size {size!r}: use one of {", ".join(SIZES)}')
    config = base.get_config()
    config.model.update(SIZES[size])
    config.model.dtype = 'bfloat16'
    config.model.num_encoder_layers = LAYERS[size]
    config.model.num_decoder_layers = LAYERS[size]
    config.data.task = 'c4_v220_span_corruption'
    config.train.steps = 1_000_000
    config.train.batch_size = 2048
    # Batch size times target length: 2048 * 114.
    config.loss.loss_normalizing_factor = '233472'
    return config
