"""UL2 20B, Flan-UL2 and a tiny one: `--config=configs/ul2.py`, `ul2.py:flan` and `ul2.py:tiny`.

    python main.py --config=configs/ul2.py --config.data.vocabulary=FILE --config.data.files=GLOB
    python main.py --config=configs/ul2.py:tiny

Reproduces: the pretraining of Tay et al. 2022 (google-research/ul2), a mixture of seven denoisers on
C4; tasks/objectives.py lists them. Inputs begin with a mode, [NLU], [NLG] or [S2S], which is plain
text to the vocabulary; also put one before the inputs for fine-tuning and inference. Batch and
lengths are the model card's. Flan-UL2 needs no mode. `flan` describes its model.
`tiny` is the model of tiny.py with silu, and learns the seven denoisers on the same text.
T5X: the model's gin, gs://scenic-bucket/ul2/ul220b/config.gin, is not in the repository. The sizes
are the model cards': the shape of T5 1.1 with silu instead of gelu. The objective follows the paper's
appendix 9.2.
Checkpoints: gs://scenic-bucket/ul2/ul220b/checkpoint_{1870000,2050000,2650000}, and
gs://scenic-bucket/ul2/flan-ul220b-v3 at step 2283000.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Hardware and time: 1.7e23 FLOPs, 230,000 hours of a GPU that sustains 200 TFLOP/s; tiny takes a few minutes
on two CPU cores.
Number to expect: none is published for the loss; docs/results.md has the loss of tiny.
"""

from configs import base, tiny
from messages import Refused

STEPS = {
    '20b': 2_650_000,
    'flan': 2_283_000,
}
TASKS = {
    '20b': 'ul2',
    'flan': 'glue_v002_proportional',
}


def get_config(version: str = '20b'):
    if version == 'tiny':
        config = tiny.get_config()
        config.model.mlp_activations = ('silu', 'linear')
        config.data.task = 'ul2'
        config.data.lengths.targets = 128
        return config
    if version not in STEPS:
        raise Refused(f'configs/ul2.py:{version}: use one of {", ".join(STEPS)}, tiny')
    config = base.get_config()
    config.model.dtype = 'bfloat16'
    config.model.emb_dim = 4096
    config.model.num_heads = 16
    config.model.num_encoder_layers = 32
    config.model.num_decoder_layers = 32
    config.model.head_dim = 256
    config.model.mlp_dim = 16384
    config.model.mlp_activations = ('silu', 'linear')
    config.data.task = TASKS[version]
    config.data.lengths.inputs = 512
    config.data.lengths.targets = 512
    config.train.steps = STEPS[version]
    config.train.batch_size = 1024
    return config
