"""T5 1.1 small, pretrained by span corruption on C4: the exact run of T5X.

    python main.py --config=configs/small_c4.py --config.data.vocabulary=hf://google/t5-v1_1-small \
      --config.data.files='hf://datasets/allenai/c4/en/c4-train.*.json.gz' \
      --config.data.validation_files='hf://datasets/allenai/c4/en/c4-validation.*.json.gz'

Data: C4 on the Hugging Face hub, or paths of files on a disk or in a bucket. Each shard is fetched once, when a row of
the batch reaches it: 305 GB in all.
Reproduces: T5X's pretraining run, t5x/configs/runs/pretrain.gin (batch 128, Adafactor, rsqrt
schedule with 10,000 warm-up steps, z-loss 1e-4, evaluation and saving every 1,000 steps), with the
model of t5x/examples/t5/t5_1_1/small.gin on c4_v220_span_corruption, 512 and 114 tokens, dropout
0.0. t5x/examples/t5/t5_1_1/examples/small_c4_pretrain.gin is the same with a batch of 256 for
10,000 steps: --config.train.batch_size=256 --config.train.steps=10000.

Hardware and time: a batch takes 13.6 TFLOPs forward and backward, the whole run 1.4e18 FLOPs. That
is less than four hours on a GPU that sustains 100 TFLOP/s, and more than a hundred days on two
laptop cores.

Number to expect: 10.9 nats per token at the start, log(32128) + 1/2. No final loss is published for
small; it stays above base's 1.953 (configs/nano.py).
"""

from configs import base
from messages import Refused


def get_config(size: str = ''):
    """Return the run; `:test` has a model and a batch that one laptop core trains in a minute."""
    # The defaults of base.py are the settings of this run.
    config = base.get_config()
    config.data.task = 'c4_v220_span_corruption'
    if size == 'test':
        config.model.emb_dim = 64
        config.model.num_heads = 2
        config.model.num_encoder_layers = 2
        config.model.num_decoder_layers = 2
        config.model.head_dim = 32
        config.model.mlp_dim = 128
        config.train.steps = 20
        config.train.batch_size = 8
        config.eval.every_steps = 10
        config.log.every_steps = 10
        config.save.every_steps = 10
    elif size:
        raise Refused(f'configs/small_c4.py:{size}: use small_c4.py or small_c4.py:test')
    return config
