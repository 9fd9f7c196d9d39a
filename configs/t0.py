"""T0: `--config=configs/t0.py:SIZE[:REPLICAS]` with 3b or 11b.

    python main.py --config=configs/t0.py:3b --config.data.cache_dirs=P3/data \
      --config.data.vocabulary=FILE --config.restore.path=CHECKPOINT --workdir=runs/t0
    python main.py --mode=evaluate --checkpoint=runs/t0 --step=1112200 --split=validation

Reproduces: the multitask prompted training of Sanh et al. 2022 (bigscience-workshop/t-zero), 12,200
steps from LM-adapted T5 1.1 xl or xxl: Adafactor at a constant rate of 0.001, packed rows of 1024 and
256 tokens. T0+ and T0++ differ in --config.data.task=t0+_train and t0++_train. The second command ranks
the choices of t0_eval_score_eval, which the paper reports as the median over the prompts of a data set.
The checkpoint was chosen by --config.infer_eval.task=t0_train_score_eval.
Batch: t-zero gives it in tokens, 2^20 in a batch and 2,048 in a microbatch of each replica. That is
1,024 rows, and 2 in each microbatch. A replica is a part of mesh.data: name their number as REPLICAS,
64 on t-zero's TPU v3-512 (--config=configs/t0.py:11b:64 --config.mesh.model=8). Without REPLICAS there
are as few microbatches as memory allows. The gradients are the same.
Data: the folder data of huggingface.co/datasets/bigscience/P3. tasks/t0.py describes its content;
`python main.py --mode=tasks t0_train --config.data.cache_dirs=P3/data` lists missing files.
T5X: the model is t5x/examples/t5/t5_1_1/{xl,xxl}.gin. T0 was trained with Mesh-TF, which divides
the loss by batch size times target length.
Checkpoints: on Hugging Face, bigscience/{T0_3B, T0, T0p, T0pp}.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Hardware and time: 1.4e20 FLOPs (3b) and 5.4e20 (11b), which is 25 and 94 hours on eight GPUs that
sustain 200 TFLOP/s each.
Number to expect: accuracies of t0_eval_score_eval, means over prompts, of 3b and 11b: RTE 64.6 and 81.0,
CB 45.4 and 70.1, ANLI 33.4 and 41.0, WSC 65.1 and 61.1, Winogrande 51.0 and 59.9, COPA 75.9 and 91.5,
HellaSwag 27.2 and 33.6, StoryCloze 84.0 and 92.4, WiC 50.7 and 56.1 (Sanh et al. 2022, appendix).
"""

from configs import t5_1_1_lm
from messages import Refused

SIZES = {
    '3b': 'xl',
    '11b': 'xxl',
}
TOKENS_PER_BATCH = 2**20
TOKENS_PER_MICROBATCH = 2048  # on each replica
TOKENS_PER_EVALUATION_BATCH = 2**18


def get_config(model: str = '3b'):
    size, _, replicas = model.partition(':')
    if size not in SIZES:
        raise Refused(f'configs/t0.py:{model}: use one of {", ".join(SIZES)}')
    config = t5_1_1_lm.get_config(SIZES[size])
    config.train.batch_size = num_rows(TOKENS_PER_BATCH, config.data.lengths)
    if replicas:
        config.train.num_microbatches = num_microbatches(replicas, config)
    config.model.dropout_rate = 0.1
    config.data.task = 't0_train'
    config.train.steps = 1_112_200
    config.learning_rate.factors = 'constant'
    config.learning_rate.base_learning_rate = 0.001
    config.infer_eval.task = 't0_eval_score_eval'
    config.infer_eval.batch_size = num_rows(TOKENS_PER_EVALUATION_BATCH, config.data.lengths)
    return config


def num_rows(num_tokens: int, lengths) -> int:
    """Return the number of rows with `num_tokens`: a row counts as its longer side, inputs or targets.

    Source: mesh_tensorflow/transformer/utils.py `compute_batch_size`.
    """
    return num_tokens // max(lengths.inputs, lengths.targets)


def num_microbatches(replicas: str, config) -> int:
    """Return the number of microbatches of TOKENS_PER_MICROBATCH on a replica."""
    rows_per_microbatch = num_rows(TOKENS_PER_MICROBATCH, config.data.lengths)
    num_all = config.train.batch_size // rows_per_microbatch
    if not replicas.isdecimal() or int(replicas) == 0 or num_all % int(replicas):
        raise Refused(
            f'configs/t0.py: {replicas} replicas cannot share {num_all} microbatches of '
            f'{rows_per_microbatch} rows: use 1, 2, 4, 8 or another power of 2 up to {num_all}'
        )
    return num_all // int(replicas)
