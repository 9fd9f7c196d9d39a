"""SuperGLUE, all tasks at once: `--config=configs/superglue.py:MODEL:SIZE`, by default t5:base.

    python main.py --config=configs/superglue.py --config.data.tfds_dir=FOLDER \
      --config.restore.path=CHECKPOINT --config.data.vocabulary=FILE

Reproduces: the fine-tuning of Raffel et al. 2020 (§2.4) on SuperGLUE's mixture, with DPR and WSC:
262,144 steps, and all tasks are evaluated at each checkpoint, every 5,000. results.csv has their
average and the best step of each.
Data: TFDS's super_glue/*:1.0.2 and definite_pronoun_resolution:1.1.0 in data.tfds_dir.
T5X: t5x/configs/runs/finetune.gin with super_glue_v102_proportional, lengths 512 and 62.
Hardware and time: 1.3e19 FLOPs, 18 hours on a GPU that sustains 200 TFLOP/s, and the evaluations.
Number to expect: T5 base, pretrained without SuperGLUE, has 71.36 on average on the validation sets
(Table 1); the released T5 base has 76.2 on the test sets (Table 14).
"""

from configs import finetune


def get_config(model: str = 't5:base'):
    config = finetune.get_config(model)
    config.data.task = 'super_glue_v102_proportional'
    config.data.lengths.inputs = 512
    config.data.lengths.targets = 62
    config.train.relative_steps = 262_144
    config.infer_eval.every_steps = 5000
    return config
