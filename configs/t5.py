"""T5 1.0 as released: `--config=configs/t5.py:SIZE` with small, base, large, 3b or 11b.

    python main.py --config=configs/t5.py:base --config.data.vocabulary=FILE --config.data.files=GLOB

Reproduces: the models of Raffel et al. 2020, relu and tied embeddings, and the span corruption part
of their pretraining with a batch of 2,048. (The released models also saw the downstream tasks, in a
mixture.)
T5X: t5x/examples/t5/t5_1_0/{small,base,large,3B,11B}.gin. The released checkpoints were trained
with a loss divided by batch size times target length (t5x/docs/usage/finetune.md): keep that to
fine-tune them.
Checkpoints: gs://t5-data/pretrained_models/t5x/t5_{small/checkpoint_1000000,
base/checkpoint_999900, large/checkpoint_1000700, 3B/checkpoint_1000000, 11B/checkpoint_1000000}.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Hardware and time: a run takes a pod of TPUs; tests check names, shapes and number of parameters.
Number to expect: none is published for the loss of span corruption alone.
"""

from configs import base
from messages import Refused

SIZES = {
    'small': dict(emb_dim=512, num_heads=8, mlp_dim=2048),
    'base': dict(emb_dim=768, num_heads=12, mlp_dim=3072),
    'large': dict(emb_dim=1024, num_heads=16, mlp_dim=4096),
    '3b': dict(emb_dim=1024, num_heads=32, mlp_dim=16384, head_dim=128),
    '11b': dict(emb_dim=1024, num_heads=128, mlp_dim=65536, head_dim=128),
}
LAYERS = {
    'small': 6,
    'base': 12,
    'large': 24,
    '3b': 24,
    '11b': 24,
}


def get_config(size: str = 'base'):
    if size not in SIZES:
        raise Refused(f'configs/t5.py:{size}: use one of {", ".join(SIZES)}')
    config = base.get_config()
    config.model.update(SIZES[size])
    config.model.dtype = 'bfloat16'
    config.model.dropout_rate = 0.1
    config.model.num_encoder_layers = LAYERS[size]
    config.model.num_decoder_layers = LAYERS[size]
    config.model.mlp_activations = ('relu',)
    config.model.logits_via_embedding = True
    config.data.task = 'c4_v220_span_corruption'
    config.train.steps = 1_000_000
    config.train.batch_size = 2048
    # Batch size times target length: 2048 * 114.
    config.loss.loss_normalizing_factor = '233472'
    return config
