"""Fine-tuning as T5X does it: `--config=configs/finetune.py:MODEL:SIZE`, by default t5_1_1:base.

    python main.py --config=configs/finetune.py:t5_1_1:base --config.data.task=TASK \
      --config.restore.path=CHECKPOINT --config.data.vocabulary=FILE

Reproduces: t5x/configs/runs/finetune.gin: a constant learning rate of 0.001, dropout 0.1, batches of
128 packed rows, validation losses and task metrics every 1,000 steps and a checkpoint every 5,000.
MODEL is t5, t5_1_1, t5_1_1_lm, flan_t5, mt5, byt5 or umt5. A task of your own without metrics:
--config.infer_eval.every_steps=0.
The recipes wmt, glue, superglue, squad, cnn_dailymail and qa_csv are this run with a task and its
lengths.
Steps: 20,000 beyond the checkpoint's. T5X counts them from the first step of pretraining:
--config.train.relative_steps=0 --config.train.steps=1020000.
The divisor of the loss is the one of the model's pretraining, batch size times target length, as T5X's
documentation asks: 233472 for t5 and t5_1_1, 262144 for t5_1_1_lm and flan_t5, 234496 for mt5, 193536 for
byt5; umt5 divides by the number of targets.
T5's lengths of inputs and targets (data.lengths): 512 and 84 for GLUE, 512 and 62 for
SuperGLUE, 512 and 97 for SQuAD, 512 and 512 for CNN/DailyMail and WMT, 1024 and 256 for T0.
T5X: t5x/configs/runs/finetune.gin with the model's gin.
Checkpoints: see the docstrings of the models' configs.
Hardware and time: T5 1.1 base takes a GPU or a TPU host; tests check names and settings.
Number to expect: T5 (Raffel et al. 2020) Table 14 has the scores of the fine-tuned models.
"""

from configs import byt5, flan_t5, mt5, t5, t5_1_1, t5_1_1_lm, umt5
from messages import Refused

MODELS = {
    't5': t5,
    't5_1_1': t5_1_1,
    't5_1_1_lm': t5_1_1_lm,
    'flan_t5': flan_t5,
    'mt5': mt5,
    'byt5': byt5,
    'umt5': umt5,
}


def get_config(model: str = 't5_1_1:base'):
    name, _, size = model.partition(':')
    if name not in MODELS:
        raise Refused(f'configs/finetune.py:{model}: use one of {", ".join(MODELS)}, as mt5:base')
    config = MODELS[name].get_config(size or 'base')
    config.model.dropout_rate = 0.1
    config.data.task = 'glue_v002_proportional'
    config.data.lengths.inputs = 512
    config.data.lengths.targets = 84
    config.learning_rate.factors = 'constant'
    config.learning_rate.base_learning_rate = 0.001
    config.train.relative_steps = 20_000
    config.train.batch_size = 128
    config.eval.every_steps = 1000
    config.infer_eval.every_steps = 1000
    config.infer_eval.batch_size = 128
    config.save.every_steps = 5000
    config.restore.path = 'CHECKPOINT'  # the command line names it; '' is from scratch
    return config
